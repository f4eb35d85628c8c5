"""CAM's own kernels behind cam.ep.Buffer, beyond what the conformance suite asks of every backend.

The suite itself runs over them as backend ascend-ir: `pytest tests/conformance -k ascend-ir`.
"""

import os
import signal
import time
from typing import Any

import pytest
import torch

import cam
from tests.conformance import programs
from tests.conformance.case import Case, inputs
from tests.launcher import RankDied, Ranks

CASE = Case((6, 6, 6), hidden=32, experts=6, topk=6, routing="distinct")
KERNELS = {"ep_kernels": "ascend"}


def fails_in_the_middle(group: Any) -> str:
    """Rank 1's launcher breaks after the ranks have agreed to dispatch."""
    buffer = programs.make_buffer(group, CASE)
    mine = inputs(CASE, group.rank)
    buffer.dispatch(mine.x, mine.topk_idx)
    if group.rank == 1:

        def broken(*arguments: object, **constants: object) -> None:
            raise RuntimeError("the device is gone")

        buffer._path._launcher.launch = broken
    start = time.monotonic()
    try:
        buffer.dispatch(mine.x, mine.topk_idx)
    except (RuntimeError, cam.GroupAborted) as error:
        assert time.monotonic() - start < 10, "long before the deadline"
        first = f"{type(error).__name__}: {error}"
    try:
        buffer.dispatch(mine.x, mine.topk_idx)
    except cam.GroupAborted as error:
        return f"{first}; then {error}"
    return "went on"


def test_a_rank_that_fails_in_the_middle_is_named_at_once() -> None:
    with Ranks(3, **KERNELS) as ranks:
        said = ranks.run(fails_in_the_middle)
        ranks.discard()
    for rank, text in enumerate(said):
        assert text.startswith("RuntimeError: the device is gone" if rank == 1 else "GroupAborted"), text
        assert "rank 1" in text


def dies(group: Any, phase: str) -> BaseException | None:
    """The last rank dies inside `phase`, after the ranks have agreed on it."""
    buffer = programs.make_buffer(group, CASE)
    mine = inputs(CASE, group.rank)
    recv, handle = buffer.dispatch(mine.x, mine.topk_idx)
    buffer.combine(recv.x, handle)  # so that nobody compiles below
    if group.rank == group.size - 1:
        buffer._path._launcher.launch = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        if phase == "dispatch":
            buffer.dispatch(mine.x, mine.topk_idx)
        else:
            buffer.combine(recv.x, handle)
    except cam.CamError as error:
        return error
    return None


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_rank_that_dies_in_the_middle_is_named(phase: str) -> None:
    with Ranks(3, **KERNELS) as ranks:
        results = ranks.run(dies, phase, expect_errors=True)
    assert isinstance(results[2], RankDied)
    for error in results[:2]:
        assert isinstance(error, cam.PeerLost), repr(error)
        assert (error.rank, error.operation) == (2, phase)
        assert error.waited_s < 10


def grows(group: Any) -> list[str]:
    """Batches of every size on one buffer: windows are replaced and handles of older windows still lead back."""
    buffer, wrong, flights = cam.ep.Buffer(group, 4), [], []
    for tokens, hidden in ((1, 8), (40, 8), (3, 200), (90, 300), (2, 2)):
        x = torch.full((tokens, hidden), float(tokens + group.rank))
        recv, handle = buffer.dispatch(x, torch.tensor([[0, 3]]).expand(tokens, 2))
        flights.append((x, recv.x, handle))
    for x, rows, handle in reversed(flights):
        out = buffer.combine(rows, handle)
        if not torch.equal(out, 2 * x):
            wrong.append(f"{tuple(x.shape)}: {out}")
    return wrong


def test_windows_grow_with_the_batches() -> None:
    with Ranks(2, **KERNELS) as ranks:
        assert ranks.run(grows) == [[], []]


def gradients(group: Any) -> list[str]:
    buffer, said = cam.ep.Buffer(group, 4), []
    x, idx = torch.ones(2, 8, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64)
    recv, handle = buffer.dispatch(x.detach(), idx)
    for call in (lambda: buffer.dispatch(x, idx), lambda: buffer.combine(recv.x.requires_grad_(), handle)):
        try:
            call()
        except cam.InputError as error:
            said.append(str(error))
    with torch.no_grad():
        buffer.dispatch(x, idx)
    return said


def test_gradients_are_refused() -> None:
    with Ranks(2, **KERNELS) as ranks:
        for said in ranks.run(gradients):
            assert len(said) == 2
            assert all("no gradients" in text and "ep_kernels='auto'" in text for text in said)


def mixed(group: Any) -> str:
    buffer = cam.ep.Buffer(group, 4)
    try:
        buffer.dispatch(torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), timeout=5.0)
    except cam.CamError as error:
        return type(error).__name__
    return "accepted"


def one_of_each(env: Any) -> str:
    kernels = "ascend" if env.rank else "auto"
    with cam.init(store=env.store, rank=env.rank, world_size=env.world_size, ep_kernels=kernels) as group:
        return mixed(group)


def test_ranks_with_different_kernels_are_told() -> None:
    with Ranks(2, group=False) as ranks:
        said = ranks.run(one_of_each)
    assert "Mismatch" in said
    assert set(said) <= {"Mismatch", "GroupAborted"}
