"""One run of the KV-cache benchmark, from a plan to a report.

Each contender runs in processes of its own, because some of the engines have threads that never rest; the contenders
take turns, and each measures the plain copies between its own rounds, so that a drift of the machine shows.
"""

import datetime
import time
from collections.abc import Callable

from cam.bench import kv_pair, machine
from cam.bench.kv_contenders import missing
from cam.bench.kv_pair import Job, Pass
from cam.bench.kv_plan import KvPlan, fitting
from cam.bench.kv_report import KvReport, KvResult, summarise
from cam.bench.launch import BenchFailed


def run(
    plan: KvPlan,
    *,
    command: str = "",
    started: Callable[[str], None] = lambda _: None,
    finished: Callable[[KvReport, KvResult], None] = lambda *_: None,
    patience_s: float = 300.0,
) -> KvReport:
    """started: told before each pass; finished: after each case. patience_s: for one pass. Raises BenchFailed when one
    of CAM's own fails; a peer that fails is reported and left out."""
    began = time.monotonic()
    report = KvReport(
        command=command,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        machine=machine.describe(),
        versions=machine.versions(),
        plan=vars(plan),
    )
    taking_part = []
    for name in plan.contenders:
        why = missing(name)
        report.engines[name] = f"not measured: {why}" if why else "measured"
        if not why:
            taking_part.append(name)
    cases, report.skipped = fitting(plan.cases(), machine.available_memory())
    for case in cases:
        passes: dict[str, list[Pass]] = {}
        for turn in range(plan.passes):
            for name in list(taking_part):
                started(f"{case.title}: {name}, pass {turn + 1} of {plan.passes}")
                job = Job(name, case, plan.rounds, plan.seconds, plan.threads, plan.latency)
                try:
                    passes.setdefault(name, []).append(kv_pair.run(job, patience_s))
                except BenchFailed as error:
                    if name.startswith("cam-"):
                        raise
                    passes.pop(name, None)
                    taking_part.remove(name)
                    report.engines[name] = f"failed: {error}"
        result = summarise(case, passes)
        report.results.append(result)
        finished(report, result)
    report.seconds = time.monotonic() - began
    return report
