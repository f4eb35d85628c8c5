"""Runs the sets of a suite: each in a pytest process of its own, first the baseline, then with CAM."""

import contextlib
import importlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ci import calls, record
from ci.declaration import Phase, Suite, TestSet
from ci.source import NotRun

CI = Path(__file__).parent


@dataclass
class Outcome:
    """One pytest process. tests: node id to passed, failed, skipped, xfailed, xpassed or "crashed" (was running when
    the process ended). broken: why the process as a whole is not to be trusted, empty when it is."""

    tests: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    excluded: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    reached: int = 0
    """Tests during which CAM was called."""
    seconds: float = 0.0
    broken: str = ""
    log: Path | None = None

    @property
    def passed(self) -> set[str]:
        return {test for test, outcome in self.tests.items() if outcome in ("passed", "xfailed")}


@dataclass
class SetResult:
    declared: TestSet
    baseline: Outcome
    with_cam: Outcome | None

    @property
    def problems(self) -> list[str]:
        """Why the set fails; empty when it holds."""
        found = []
        if self.baseline.broken:
            found.append(f"baseline: {self.baseline.broken}")
        elif len(self.baseline.passed) != self.declared.passed:
            found.append(f"baseline: {len(self.baseline.passed)} tests passed, {self.declared.passed} are declared")
        if self.with_cam is not None:
            found += self._problems_with_cam(self.with_cam)
        return found

    def _problems_with_cam(self, with_cam: Outcome) -> list[str]:
        found = [f"with CAM: {with_cam.broken}"] if with_cam.broken else []
        for test in sorted(self.lost):
            found.append(f"passes in the baseline, {with_cam.tests.get(test, 'did not run')} with CAM: {test}")
        found += [f"CAM's {target} was never called" for target in self.declared.calls if not with_cam.calls[target]]
        return found

    @property
    def lost(self) -> set[str]:
        """Passes in the baseline, not with CAM, and is not excluded there."""
        if self.with_cam is None:
            return set()
        left_out = {test for test in self.baseline.passed if self.with_cam.tests.get(test) == "excluded"}
        return self.baseline.passed - self.with_cam.passed - left_out


def check_requirements(suite: Suite) -> None:
    """Raises NotRun when a distribution that the suite needs is missing or has another version."""
    for name, wanted in suite.requires.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise NotRun(f"{name} {wanted} is not installed in {sys.prefix}".replace("  ", " ")) from None
        if wanted and found != wanted:
            raise NotRun(f"{name} {wanted} is needed, {found} is installed")


def prepare(suite: Suite, work: Path) -> None:
    if suite.prepare:
        module, _, function = suite.prepare.partition(":")
        getattr(importlib.import_module(module), function)(work)


def run_sets(
    suite: Suite, sets: list[TestSet], source: Path, work: Path, *, cam: bool, progress: Callable[[str], None]
) -> Iterator[SetResult]:
    for item in sets:
        progress(f"{item.name}: baseline")
        baseline = _run(suite, item, source, work, None)
        with_cam = None
        if cam and item.cam:
            progress(f"{item.name}: with CAM")
            with_cam = _run(suite, item, source, work, suite.with_cam)
        yield SetResult(item, baseline, with_cam)


def _run(suite: Suite, item: TestSet, source: Path, work: Path, cam: Phase | None) -> Outcome:
    phase = "cam" if cam else "baseline"
    results = work / "results" / item.name / phase
    results.mkdir(parents=True, exist_ok=True)
    for stale in ("record", "calls", "log"):
        (results / stale).unlink(missing_ok=True)
    excluded = [test for entry in suite.exclusions if entry.phase in ("both", phase) for test in entry.tests]
    targets = item.calls if cam else ()
    environment = {
        **os.environ,
        **_filled(suite.baseline.environment, work),
        **(_filled(cam.environment, work) if cam else {}),
        **calls.environment(targets, results / "calls"),
        record.FILE: str(results / "record"),
        record.EXCLUDED: json.dumps(excluded),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(_importable_ci(work)), str(CI / "startup"), os.environ.get("PYTHONPATH")])
        ),
    }
    plugins = ["ci.record", *suite.baseline.plugins, *(cam.plugins if cam else ())]
    command = [sys.executable, "-m", "pytest", "-ra", "-v", *suite.baseline.arguments, *(cam.arguments if cam else ())]
    command += [f"-p{plugin}" for plugin in plugins] + (["-k", item.select] if item.select else []) + list(item.files)
    begin = time.monotonic()
    with (results / "log").open("w") as log:
        status = wait(command, source / suite.folder, environment, log.fileno(), item.timeout_s)
    outcome = read(results, status, item.timeout_s)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _importable_ci(work: Path) -> Path:
    """A folder that holds this package and nothing else: the repository's root has a `tests` that would shadow."""
    folder = work / "path"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "ci"
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(CI.resolve())
    return folder


def _filled(environment: dict[str, str], work: Path) -> dict[str, str]:
    return {name: value.replace("{work}", str(work)) for name, value in environment.items()}


def wait(command: list[str], folder: Path, environment: dict[str, str], log: int, timeout_s: float) -> int | None:
    """pytest's exit status; None when it took too long. Whatever it started is gone afterwards."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read(results: Path, status: int | None, timeout_s: float) -> Outcome:
    outcome = Outcome(log=results / "log")
    running, finished, start = "", False, 0
    spans: list[tuple[int, int]] = []
    file = results / "record"
    for entry in map(json.loads, file.read_text().splitlines() if file.exists() else ()):
        if "excluded" in entry:
            outcome.excluded[entry["excluded"]] += 1
            outcome.tests[entry["test"]] = "excluded"
        elif "started" in entry:
            running, start = entry["started"], entry["calls"]
        elif "finished" in entry:
            finished, running = True, ""
        else:
            _take(outcome, entry)
            spans.append((start, entry["calls"]))
            running = "" if entry["test"] == running else running
    if running:
        outcome.tests.setdefault(running, "crashed")
    outcome.reached = len({begin for begin, end in spans if end > begin})
    outcome.calls = calls.count(results / "calls")
    if status is None:
        outcome.broken = f"took longer than {timeout_s:.0f} s" + (f", in {running}" if running else "")
    elif not finished:
        outcome.broken = f"pytest ended with status {status}" + (f" in {running}" if running else "")
    elif status not in (0, 1):
        outcome.broken = f"pytest ended with status {status} (see {results / 'log'})"
    return outcome


def _take(outcome: Outcome, entry: dict[str, str]) -> None:
    test = entry["test"]
    # A test that passed and then fails in its tear-down has failed.
    if outcome.tests.get(test) != "failed":
        outcome.tests[test] = entry["outcome"]
    if entry["text"] and entry["outcome"] == "failed":
        outcome.texts[test] = entry["text"]
