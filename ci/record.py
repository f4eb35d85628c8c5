"""pytest plugin of a run: leaves out what is excluded and writes each outcome at once, so that a crash loses none."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FILE = "SUITE_RECORD"
EXCLUDED = "SUITE_EXCLUDED"
CALLS = "SUITE_CALL_FILE"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    prefixes = json.loads(os.environ.get(EXCLUDED, "[]"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        matching = [prefix for prefix in prefixes if _begins(item.nodeid, prefix)]
        (left_out if matching else kept).append(item)
        for prefix in matching:
            _write({"excluded": prefix, "test": item.nodeid})
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_runtest_logstart(nodeid: str, location: tuple[str, int | None, str]) -> None:
    _write({"started": nodeid, "calls": _calls()})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = "" if report.outcome == "passed" else str(report.longreprtext)[-3000:]
        _write({"test": report.nodeid, "outcome": _outcome(report), "text": text, "calls": _calls()})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "text": str(report.longreprtext)[-3000:], "calls": 0})


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _write({"finished": int(exitstatus)})


def _begins(test: str, prefix: str) -> bool:
    return test == prefix or (test.startswith(prefix) and test[len(prefix)] in "[:")


def _outcome(report: pytest.TestReport) -> str:
    if report.when != "call" and report.failed:
        return "failed"  # an error in set-up or tear-down
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return report.outcome


def _calls() -> int:
    """Bytes that calls.py has written so far."""
    file = os.environ.get(CALLS)
    return os.path.getsize(file) if file and os.path.exists(file) else 0


def _write(entry: dict[str, Any]) -> None:
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(entry) + "\n")
