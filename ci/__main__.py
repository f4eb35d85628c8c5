"""`python -m ci SUITE`: exit status 0 = it holds, 1 = it does not, 3 = it could not be run here."""

import argparse
import signal
import sys
from pathlib import Path

from ci import declaration, report, run, source

ROOT = Path(__file__).resolve().parent.parent
NOT_RUN = 3


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    file = Path(options.suite) if options.suite.endswith(".toml") else declaration.SUITES / f"{options.suite}.toml"
    try:
        suite = declaration.load(file)
    except declaration.BadDeclaration as error:
        print(error, file=sys.stderr)
        return 1
    work: Path = (options.work or ROOT / "build" / "suites") / f"{suite.name}-{suite.source.version}"
    work.mkdir(parents=True, exist_ok=True)
    _say(f"== {suite.title}")
    try:
        sets = _chosen(suite, options)
        run.check_requirements(suite)
        tests = source.bring(suite.name, suite.source, work, path=options.source, clone=options.clone)
        run.prepare(suite, work)
    except source.NotRun as reason:
        _say(f"suite {suite.name} {suite.source.version}: not run: {reason}")
        return NOT_RUN
    return _run(suite, sets, tests, work, cam=not options.baseline_only)


def _run(suite: declaration.Suite, sets: list[declaration.TestSet], tests: Path, work: Path, *, cam: bool) -> int:
    results = []
    for result in run.run_sets(suite, sets, tests, work, cam=cam, progress=lambda text: _say(f"  ... {text}")):
        results.append(result)
        for line in report.set_lines(result):
            _say(line)
    for line in report.failure_lines(results):
        _say(line)
    _say("left out:")
    for line in report.exclusion_lines(suite):
        _say(line)
    problems = [problem for result in results for problem in result.problems] + report.stale(suite, results)
    baseline = sum(len(result.baseline.passed) for result in results)
    again = sum(len(result.with_cam.passed) for result in results if result.with_cam)
    calls = sum(sum(result.with_cam.calls.values()) for result in results if result.with_cam)
    for problem in problems:
        _say(f"FAILED: {problem}")
    verdict = f"FAILED, {len(problems)} problems" if problems else "ok"
    _say(
        f"suite {suite.name} {suite.source.version}: {verdict}: {baseline} passed in the baseline, {again} again with "
        f"CAM ({calls} counted calls)"
    )
    return 1 if problems else 0


def _chosen(suite: declaration.Suite, options: argparse.Namespace) -> list[declaration.TestSet]:
    names = [item.name for item in suite.sets]
    for name in options.set:
        if name not in names:
            raise source.NotRun(f"it has no set {name!r}; its sets are {', '.join(names)}")
    return [item for item in suite.sets if (item.name in options.set if options.set else options.long or not item.long)]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m ci", description="Runs a framework's own test suite with CAM in place.")
    known = ", ".join(declaration.declared()) or "none yet"
    parser.add_argument("suite", help=f"a suite's name ({known}) or its TOML file")
    parser.add_argument("--set", action="append", default=[], help="only this set (can be repeated)")
    parser.add_argument("--long", action="store_true", help="also the sets marked long")
    parser.add_argument("--source", type=Path, help="a checkout or an unpacked sdist, instead of fetching one")
    parser.add_argument("--clone", action="store_true", help="clone the repository of a suite that needs it")
    parser.add_argument("--baseline-only", action="store_true", help="do not run with CAM")
    parser.add_argument("--work", type=Path, help="working folder (build/suites)")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    # A time limit from outside ends the run in order: the pytest process has a session of its own, and would stay.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
