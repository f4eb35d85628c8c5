"""One run of the expert-parallel benchmark, from a plan to a report."""

import datetime
import importlib
import tempfile
import time
from collections.abc import Callable
from typing import Any, Protocol

from cam import host
from cam.bench import machine
from cam.bench.launch import Mpi, run_world
from cam.bench.plan import Case, Plan
from cam.bench.report import CaseResult, Report, find_crowding
from cam.bench.world import WorldSpec
from cam.errors import BackendUnavailable


class Progress(Protocol):
    """Told what happens. All methods are called in this thread, never while a case is timed.

    The report that `planned` gets fills up as cases finish.
    """

    def planned(self, report: Report, cases: list[Case]) -> None: ...

    def started(self, title: str) -> None: ...

    def finished(self, result: CaseResult) -> None: ...


def run(plan: Plan, *, command: str = "", progress: Progress | None = None, patience_s: float = 600.0) -> Report:
    """Measures every case of the plan, one group size after another.

    command: what a person types to repeat it, for the report. patience_s: the longest time for one case; then
    all ranks are killed. Raises BenchFailed, and BackendUnavailable when CAM is asked for and its kernels do
    not load.
    """
    began = time.monotonic()
    cores = host.usable_cores()
    mpi = Mpi.find() if "mpi" in plan.engines else Mpi(None)
    report = Report(
        command=command,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        plan=vars(plan),
        engines=_engines(plan, mpi),
    )
    cases = _that_fit(plan.cases(cores), report)
    if progress is not None:
        progress.planned(report, cases)
    try:
        with tempfile.TemporaryDirectory(prefix="cam-bench-") as directory:
            for ranks in dict.fromkeys(case.ranks for case in cases):
                mine = tuple(case for case in cases if case.ranks == ranks)
                spec = WorldSpec(ranks, directory, mine, plan, mpi=mpi.version is not None)
                listener = _listener(report, progress)
                run_world(spec, listener, mpi=mpi, crowded=ranks > cores, patience_s=patience_s)
    finally:
        base = plan.base_ranks(cores)
        if base is not None:
            report.crowding = find_crowding(report.results, base)
        report.seconds = time.monotonic() - began
    return report


def _listener(report: Report, progress: Progress | None) -> Callable[[dict[str, Any]], None]:
    def listen(event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "group":
            report.groups.append(event)
        elif kind == "start" and progress is not None:
            progress.started(event["title"])
        elif kind == "case":
            result = CaseResult.from_event(event)
            report.results.append(result)
            if progress is not None:
                progress.finished(result)

    return listen


def _engines(plan: Plan, mpi: Mpi) -> dict[str, str]:
    """Who takes part and, where one does not, why."""
    if "cam" in plan.engines:
        try:
            importlib.import_module("cam_kernels")
            importlib.import_module("cam.ep")
        except ImportError as error:
            raise BackendUnavailable(f"CAM's CPU kernels do not load: {error}") from error
    return {
        "cam": "measured" if "cam" in plan.engines else "not asked for",
        "gloo": "measured",
        "mpi": _mpi_state(plan, mpi),
    }


def _mpi_state(plan: Plan, mpi: Mpi) -> str:
    if "mpi" not in plan.engines:
        return "not asked for"
    return f"measured: {mpi.version}" if mpi.version is not None else f"not measured: {mpi.reason}"


def _that_fit(cases: list[Case], report: Report) -> list[Case]:
    """Cases that memory allows; the others are listed in the report."""
    available = machine.available_memory()
    fitting = []
    for case in cases:
        if case.memory_bytes <= available:
            fitting.append(case)
        else:
            needs, has = case.memory_bytes / 2**30, available / 2**30
            report.skipped.append(
                {"case": case.title, "reason": f"needs about {needs:.1f} GiB, {has:.1f} GiB are available"}
            )
    return fitting
