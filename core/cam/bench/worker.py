"""One rank of a benchmark: python -m cam.bench.worker SPEC.json, started by cam.bench.launch.

Rank 0 reports events on standard output (see cam.bench.world).
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from cam.bench.contenders import Contender, Floor, Raw, Ready, UserPath
from cam.bench.golden import Golden
from cam.bench.plan import Case
from cam.bench.rank_main import rank_main
from cam.bench.routing import make_work
from cam.bench.samples import Measured, Reading
from cam.bench.startline import StartLine
from cam.bench.wires import GlooWire, MpiWire, Wire
from cam.bench.world import EVENT_MARK, WorldSpec

if TYPE_CHECKING:
    import cam

T = TypeVar("T")

_TIMEOUT_S = 120.0
_MIN_ROUNDS, _MAX_ROUNDS = 3, 100


class Rank:
    """This process's share of all cases of one group."""

    def __init__(self, spec: WorldSpec, rank: int) -> None:
        self.spec, self.rank = spec, rank
        directory = Path(spec.directory)
        path = str(directory / f"store-{spec.ranks}")
        store = dist.FileStore(path, spec.ranks)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=_TIMEOUT_S)
        mine = dist.PrefixStore("gloo", store)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=spec.ranks, timeout=timeout)
        # CAM sizes its waits by the cores it sees, so it must see them all: pinning comes after.
        self.group = self._join_cam(store) if "cam" in spec.plan.engines else None
        cores = sorted(os.sched_getaffinity(0))
        self.crowded = spec.ranks > len(cores)
        if not self.crowded:
            os.sched_setaffinity(0, {cores[rank]})
        self.gloo: Wire = GlooWire()
        self.mpi: Wire | None = MpiWire() if spec.mpi else None
        self.line = StartLine(
            directory / f"start-{spec.ranks}", rank, spec.ranks, crowded=self.crowded, timeout_s=_TIMEOUT_S
        )

    def run(self) -> None:
        self.tell("group", ranks=self.spec.ranks, pinned=not self.crowded, cam=self._cam_settings())
        for case in self.spec.cases:
            self.tell("start", title=case.title)
            with torch.no_grad():
                self.measure(case)
        if self.group is not None:
            self.group.close()
        dist.destroy_process_group()

    def measure(self, case: Case) -> None:
        golden = Golden.find(case, make_work(case, self.rank), self.rank, self.gloo)
        contenders = self.contenders(case, golden)
        for contender in contenders:
            contender.check(golden)
        sizes = {rows: sum(r.splits) for rows, r in (("expert", golden.route), ("rank", golden.rank_route))}
        del golden
        gc.collect()
        gc.disable()
        try:
            readings, rounds = self.rounds(list(contenders))
        finally:
            gc.enable()
        everyone: list[Any] = [None] * case.ranks
        dist.all_gather_object(everyone, (readings, sizes))
        moved = {rows: [their[1][rows] * case.row_bytes for their in everyone] for rows in sizes}
        everyone = [their[0] for their in everyone]
        results = [
            {
                "contender": c.key,
                "label": c.label,
                "rows": c.rows,
                "phase": phase,
                **_seconds(everyone, c, phase),
            }
            for c in contenders
            for phase in readings[c.key]
        ]
        self.tell("case", case=case, rounds=rounds, sent_bytes=moved, results=results)

    def contenders(self, case: Case, golden: Golden) -> list[Contender]:
        plan, group = self.spec.plan, self.group
        ready = Ready.make(case, golden, _allocator(group))
        chosen: list[Contender] = []
        if group is not None:
            from cam.bench.cam_contenders import cam_contenders

            chosen += cam_contenders(plan, group, golden, ready)
        if case.cam_only:
            return chosen
        wires = [(self.gloo, "Gloo")]
        if self.mpi is not None and case.fits_mpi:
            wires.append((self.mpi, "MPI"))
        chosen += [UserPath(wire, f"{name} user path", golden, ready) for wire, name in wires]
        for rows in plan.layouts:
            suffix = "" if rows == "expert" else f" ({rows})"
            chosen += [Raw(wire, f"{name} all_to_all{suffix}", rows, golden, ready) for wire, name in wires]
            if group is not None:
                chosen += [Floor(rows, nontemporal, golden, ready) for nontemporal in (False, True)]
        return chosen

    def rounds(self, contenders: list[Contender]) -> tuple[dict[str, dict[str, list[Reading]]], int]:
        """readings[key][phase], and the number of rounds. All contenders take part in every round."""
        for contender in contenders:
            contender.round(self._untimed)
        # The second round tells how many fit: the first one also touches memory and fills caches.
        started = time.perf_counter()
        readings = self._one_round(contenders, {c.key: {} for c in contenders})
        rounds = self.spec.plan.rounds or self._rounds_that_fit(time.perf_counter() - started)
        readings = {c.key: {} for c in contenders}
        order = random.Random(rounds)  # alike on every rank
        for _ in range(rounds):
            # Nobody always follows the same neighbour, whose traces in the caches it would inherit.
            order.shuffle(contenders)
            self._one_round(contenders, readings)
        return readings, rounds

    def _one_round(
        self, contenders: list[Contender], readings: dict[str, dict[str, list[Reading]]]
    ) -> dict[str, dict[str, list[Reading]]]:
        for contender in contenders:
            native_s = _unknown if self.crowded else contender.native_s
            contender.round(_Stopwatch(self.line, native_s, readings[contender.key]))
        return readings

    def _untimed(self, phase: str, call: Callable[[], T]) -> T:
        self.line.wait()
        return call()

    def _rounds_that_fit(self, round_s: float) -> int:
        slowest = torch.tensor([round_s], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        fitting = int(self.spec.plan.seconds_per_case / float(slowest))
        return min(max(fitting, _MIN_ROUNDS), _MAX_ROUNDS)

    def _join_cam(self, store: Any) -> "cam.Group":
        import cam

        # One copy thread: each rank has one core, for CAM as for its peers and the floor.
        return cam.init(
            store=store,
            rank=self.rank,
            world_size=self.spec.ranks,
            threads=1,
            name="bench",
            timeout_s=_TIMEOUT_S,
        )

    def _cam_settings(self) -> dict[str, Any] | None:
        return None if self.group is None else self.group.config.model_dump(mode="json")

    def tell(self, event: str, **content: Any) -> None:
        if self.rank == 0:
            line = json.dumps({"event": event, **content}, default=lambda value: vars(value))
            print(f"\n{EVENT_MARK}{line}", flush=True)


class _Stopwatch:
    """Timed, for one contender's round."""

    def __init__(
        self, line: StartLine, native_s: Callable[[], float | None], readings: dict[str, list[Reading]]
    ) -> None:
        self._line, self._native_s, self._readings = line, native_s, readings

    def __call__(self, phase: str, call: Callable[[], T]) -> T:
        before = self._native_s()
        start = self._line.wait()
        result = call()
        total = time.perf_counter_ns() - start
        after = self._native_s()
        native = None if before is None or after is None else round((after - before) * 1e9)
        self._readings.setdefault(phase, []).append((total, native))
        return result


def _unknown() -> None:
    return None


def _seconds(everyone: list[Any], contender: Contender, phase: str) -> dict[str, Any]:
    measured = Measured.of([readings[contender.key][phase] for readings in everyone])
    return {
        "seconds": measured.total,
        "native_seconds": measured.native,
        "python_seconds": measured.python,
    }


def _allocator(group: "cam.Group | None") -> Callable[[tuple[int, int], torch.dtype], torch.Tensor]:
    if group is None:
        return lambda shape, dtype: torch.empty(shape, dtype=dtype)
    return lambda shape, dtype: group.empty(shape, dtype)


def main(spec_path: str) -> None:
    rank_main(spec_path, WorldSpec.from_json, lambda spec, rank: Rank(spec, rank).run())


if __name__ == "__main__":
    main(sys.argv[1])
