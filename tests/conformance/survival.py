"""What ranks run in test_survival.py."""

import gc
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch

import cam
from tests.conformance.case import Case, expert_output, inputs
from tests.conformance.programs import make_buffer
from tests.launcher import reached


def loop(group: Any, layout: str, seed: int, timeout: float | None = None) -> None:
    """Dispatches and combines until something breaks."""
    case = Case((40,) * group.size, hidden=512, experts=16, topk=4, layout=layout, seed=seed)
    mine, buffer, n = inputs(case, group.rank), make_buffer(group, case), 0
    while True:
        try:
            recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, timeout=timeout)
            buffer.combine(expert_output(case, group.rank, recv.x.shape[0]), handle, timeout=timeout)
        except cam.CamError:
            reached("failed")
            raise
        n += 1
        if n == 10:
            reached("looping")


def leave(group: Any, who: int) -> BaseException | None:
    buffer = cam.ep.Buffer(group, 4)
    x, idx = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    buffer.dispatch(x, idx)
    if group.rank == who:
        group.close()
        return None
    try:
        buffer.dispatch(x, idx)
    except cam.CamError as error:
        return error
    return None


def use_after_close(group: Any) -> BaseException | None:
    buffer = cam.ep.Buffer(group, 4)
    group.barrier()
    group.close()
    group.close()
    try:
        buffer.dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64))
    except cam.CamError as error:
        return error
    return None


def alone(group: Any, timeout: float | timedelta) -> BaseException | None:
    buffer = cam.ep.Buffer(group, 4)
    if group.rank == 1:
        return None
    try:
        buffer.dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), timeout=timeout)
    except cam.CamError as error:
        return error
    return None


def shared_errors(group: Any) -> tuple[list[str], int, int]:
    """(errors raised, window bytes in use before, and after)."""
    buffer = cam.ep.Buffer(group, 4)
    idx = torch.zeros(3, 1, dtype=torch.int64)
    recv, handle = buffer.dispatch(torch.ones(3, 8), idx)
    buffer.combine(recv.x, handle)
    del recv, handle
    gc.collect()
    before, raised = int(group.memory()["allocated"]), []
    for _ in range(5):
        for call in (
            lambda: buffer.dispatch(torch.ones(3, 8 + group.rank % 2), idx),
            lambda: buffer.dispatch(torch.ones(1000, 4096), torch.zeros(1000, 1, dtype=torch.int64)),
            lambda: buffer.dispatch(torch.ones(3, 8), idx + 99),
        ):
            try:
                call()
                raised.append("nothing")
            except cam.CamError as error:
                raised.append(type(error).__name__)
        recv, handle = buffer.dispatch(torch.ones(3, 8), idx)
        buffer.combine(recv.x, handle)
        del recv, handle
    gc.collect()
    return raised, before, int(group.memory()["allocated"])


def outlive_sender(group: Any) -> bool:
    """Rank 1 sends to rank 0 and dies."""
    buffer = cam.ep.Buffer(group, 2)
    recv, _ = buffer.dispatch(torch.full((50, 64), float(group.rank + 1)), torch.zeros(50, 1, dtype=torch.int64))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
        return False
    except cam.PeerLost:
        return bool((recv.x[:50] == 1).all() and (recv.x[50:] == 2).all())


def interrupted(group: Any) -> str:
    buffer = cam.ep.Buffer(group, 4)
    group.barrier()
    if group.rank == 1:
        while True:
            time.sleep(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        reached("waiting")
        buffer.dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64))
        return "no error"
    except BaseException as error:
        reached("interrupted")
        return type(error).__name__
