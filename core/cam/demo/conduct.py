"""Starts the demo's processes, waits for them, and puts their results beside those of one process."""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.multiprocessing import (  # type: ignore[attr-defined]
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from cam.demo.compare import Check, StepComparison, check_moved, compare_steps
from cam.demo.moe import Shape
from cam.demo.rank_part import run_rank
from cam.demo.whole_part import run_whole
from cam.errors import CamError


class DemoFailed(CamError):
    """The demo's processes did not come to an end."""


@dataclass(frozen=True)
class Outcome:
    steps: list[StepComparison]
    checks: list[Check]

    @property
    def agrees(self) -> bool:
        return all(step.agrees for step in self.steps) and all(check.holds for check in self.checks)


def conduct(shape: Shape, *, deadline_s: float = 120.0) -> Outcome:
    """Raises DemoFailed when a process fails or they take longer than deadline_s; none is left then."""
    with tempfile.TemporaryDirectory(prefix="cam-demo-") as directory:
        _run_ranks(shape, directory, deadline_s)
        ranks = [torch.load(Path(directory) / f"rank-{rank}.pt", weights_only=True) for rank in range(shape.ranks)]
    steps = compare_steps([results["steps"] for results in ranks], run_whole(shape))
    return Outcome(steps, check_moved([results["moved"] for results in ranks], shape))


def _run_ranks(shape: Shape, directory: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    # Spawned, not forked: torch's threads do not survive a fork. They die with this process (torch sees to
    # it).
    context = start_processes(  # type: ignore[no-untyped-call]
        run_rank, args=(shape, directory), nprocs=shape.ranks, join=False, start_method="spawn"
    )
    if context is None:
        raise DemoFailed("no processes were started")
    try:
        while not context.join(timeout=max(0.1, end - time.monotonic())):
            if time.monotonic() > end:
                raise DemoFailed(f"{shape.ranks} processes did not finish within {deadline_s:.0f} s")
    except (ProcessExitedException, ProcessRaisedException) as error:
        raise DemoFailed(f"a process of the demo failed: {error}") from error
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
