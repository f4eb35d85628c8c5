"""Tells how a suite went: one line a set, then what failed, what was left out and why, and one summary line."""

from collections import Counter
from collections.abc import Iterable

from ci.declaration import Exclusion, Suite
from ci.run import Outcome, SetResult

_COUNTED = ("passed", "failed", "crashed", "skipped", "xfailed", "xpassed")


def set_lines(result: SetResult) -> Iterable[str]:
    verdict = "FAILED" if result.problems else "ok"
    yield f"{verdict:6} {result.declared.name}"
    yield f"         baseline  {_counts(result.baseline)}"
    if result.with_cam:
        total, reached = sum(result.with_cam.calls.values()), result.with_cam.reached
        yield f"         with CAM  {_counts(result.with_cam)}; {total} counted calls, in {reached} tests"
    else:
        yield f"         with CAM  not run: {result.declared.why or 'only the baseline was asked for'}"
    for problem in result.problems:
        yield f"         - {problem}"


def failure_lines(results: list[SetResult]) -> Iterable[str]:
    for result in results:
        for test in sorted(result.lost) if result.problems else ():
            text = result.with_cam.texts.get(test, "") if result.with_cam else ""
            yield f"--- {test}"
            yield text
        for phase in (result.baseline, result.with_cam):
            if phase and phase.broken:
                yield f"--- log: {phase.log}"


def exclusion_lines(suite: Suite) -> Iterable[str]:
    for entry in suite.exclusions:
        where = " (with CAM only)" if entry.phase == "cam" else ""
        yield f"  {len(entry.tests)} entries{where}: {entry.reason}"
        for test in entry.tests:
            yield f"      {test}"


def stale(suite: Suite, results: list[SetResult]) -> list[str]:
    """Exclusions of the files that ran which left nothing out: the reason is gone, or the name is wrong."""
    files = {file for result in results for file in result.declared.files}
    return [
        f"the exclusion {test!r} matches no test"
        for entry in suite.exclusions
        for test in entry.tests
        if test.split("::")[0] in files and not _used(entry, test, results)
    ]


def _used(entry: Exclusion, test: str, results: list[SetResult]) -> bool:
    file = test.split("::")[0]
    for result in results:
        phase = result.with_cam if entry.phase == "cam" else result.baseline
        if file in result.declared.files and (phase is None or phase.excluded[test]):
            return True
    return False


def _counts(outcome: Outcome) -> str:
    found = Counter(outcome.tests.values())
    told = ", ".join(f"{found[name]} {name}" for name in _COUNTED if found[name]) or "no tests ran"
    left = f", {sum(outcome.excluded.values())} left out" if outcome.excluded else ""
    return f"{told}{left} in {outcome.seconds:.0f} s"
