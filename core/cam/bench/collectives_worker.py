"""One rank of the benchmark of collectives: python -m cam.bench.collectives_worker SPEC.json (see cam.bench.launch)."""

import gc
import json
import os
import random
import sys
import time
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cam.bench.collectives import Case, CollectivesSpec
from cam.bench.collectives_contenders import (
    Buffers,
    Call,
    batch_calls,
    ddp_calls,
    mpi_call,
    native_call,
    torch_call,
)
from cam.bench.rank_main import rank_main
from cam.bench.samples import Summary
from cam.bench.startline import StartLine
from cam.bench.world import EVENT_MARK
from cam.errors import CamError

_TIMEOUT = timedelta(seconds=120)
_MIN_ROUNDS, _MAX_ROUNDS = 3, 300


class WrongResult(CamError):
    """A contender computed something else than Gloo."""


class Rank:
    """This process's share of all cases of one group."""

    def __init__(self, spec: CollectivesSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        directory = Path(spec.directory)
        store = dist.FileStore(str(directory / f"store-{spec.ranks}"), spec.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.ranks, timeout=_TIMEOUT)
        self.gloo: Any = dist.group.WORLD
        self.cam: Any = None
        if "cam" in spec.plan.engines:
            # CAM sizes its waits by the cores it sees, so it must see them all: pinning comes after.
            os.environ["CAM_COLLECTIVE_ALGORITHM"] = spec.plan.algorithm
            os.environ["CAM_COLLECTIVE_PIECE"] = str(spec.plan.piece)
            os.environ["CAM_THREADS"] = "1"  # each rank has one core, for CAM as for its peers
            self.cam = dist.new_group(backend="cam", timeout=_TIMEOUT)
        cores = sorted(os.sched_getaffinity(0))
        crowded = spec.ranks > len(cores)
        if not crowded:
            os.sched_setaffinity(0, {cores[rank]})
        timeout_s = _TIMEOUT.total_seconds()
        self.line = StartLine(directory / f"start-{spec.ranks}", rank, spec.ranks, crowded=crowded, timeout_s=timeout_s)

    def run(self) -> None:
        for case in self.spec.cases:
            self.tell("start", title=case.title)
            self.measure(case)
        dist.destroy_process_group()

    def measure(self, case: Case) -> None:
        calls = self.calls(case)
        gc.collect()
        gc.disable()
        try:
            readings, rounds = self.rounds(calls)
        finally:
            gc.enable()
        everyone: list[Any] = [None] * case.ranks
        dist.all_gather_object(everyone, readings)
        seconds: dict[str, Any] = {}
        for name in calls:
            slowest = [max(times) / 1e9 for times in zip(*(their[name] for their in everyone), strict=True)]
            seconds[name] = asdict(Summary.of(slowest))
        self.tell("case", case=asdict(case), rounds=rounds, seconds=seconds)

    def calls(self, case: Case) -> dict[str, Call]:
        """By contender, each with its result checked."""
        if case.operation == "ddp":
            return ddp_calls(self.gloo, self.cam)
        if case.operation == "batch":
            return self._batch()
        buffers = Buffers(case, self.rank)
        found: dict[str, Call] = {"gloo": torch_call(case, buffers, self.gloo)}
        if self.cam is not None:
            found["cam"] = torch_call(case, buffers, self.cam)
            found["cam kernels"] = native_call(case, buffers, self.cam.group)
        if self.spec.mpi:
            theirs = mpi_call(case, buffers)
            if theirs is not None:
                found["mpi"] = theirs
        wanted = None
        for name, call in found.items():
            buffers.reset()
            call()
            if wanted is None:
                wanted = buffers.output.clone()
            elif not torch.equal(buffers.output, wanted):
                raise WrongResult(f"{case.title}: {name} differs from gloo on rank {self.rank}")
        # Repeated sums in place would overflow: zeros are reduced at the same speed.
        buffers.input.zero_()
        return found

    def _batch(self) -> dict[str, Call]:
        found = batch_calls(self.rank, self.gloo, self.cam)
        wanted = None
        for name, (call, tensors) in found.items():
            call()
            if wanted is None:
                wanted = [tensor.clone() for tensor in tensors]
            elif not all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True)):
                raise WrongResult(f"batch: {name} differs from gloo on rank {self.rank}")
            for tensor in tensors:
                tensor.zero_()
        return {name: call for name, (call, _) in found.items()}

    def rounds(self, calls: dict[str, Call]) -> tuple[dict[str, list[int]], int]:
        """Nanoseconds of each round, by contender, and the number of rounds."""
        for _ in range(2):  # touches memory, fills caches; the second tells how many rounds fit
            started = time.perf_counter()
            for call in calls.values():
                self.line.wait()
                call()
        slowest = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fitting = int(self.spec.plan.seconds_per_case / float(slowest))
        rounds = self.spec.plan.rounds or min(max(fitting, _MIN_ROUNDS), _MAX_ROUNDS)
        readings: dict[str, list[int]] = {name: [] for name in calls}
        order = list(calls)
        shuffle = random.Random(rounds)  # alike on every rank
        for _ in range(rounds):
            # Nobody always follows the same neighbour, whose traces in the caches it would inherit.
            shuffle.shuffle(order)
            for name in order:
                call = calls[name]
                start = self.line.wait()
                call()
                readings[name].append(time.perf_counter_ns() - start)
        return readings, rounds

    def tell(self, event: str, **content: Any) -> None:
        if self.rank == 0:
            print(f"\n{EVENT_MARK}{json.dumps({'event': event, **content})}", flush=True)


def main(spec_path: str) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renamed what older versions have no new name for
    rank_main(spec_path, CollectivesSpec.from_json, lambda spec, rank: Rank(spec, rank).run())


if __name__ == "__main__":
    main(sys.argv[1])
