"""The runner of frameworks' own suites: what it counts as passed, and what it must never count as passed."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ci import declaration, run

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
    import os, pytest, subprocess, sys
    import stock

    def test_plain():
        assert stock.answer() == 42

    def test_in_a_worker_process():
        subprocess.run([sys.executable, "-c", "import stock; assert stock.answer() == 42"], check=True)

    def test_fails_anyway():
        assert stock.answer() == 0

    @pytest.mark.skipif(True, reason="no hardware")
    def test_skipped():
        raise AssertionError

    def test_unwanted():
        raise AssertionError("left out")
"""

STOCK = """
    import os

    def answer():
        if os.environ.get("ANSWER_WITH"):
            import substitute
            return substitute.Substitute.answer()
        return 42
"""

SUBSTITUTE = """
    class Substitute:
        @staticmethod
        def answer():
            return 42
"""

SUITE = """
    name = "{name}"
    title = "A suite to test the runner with"
    [source]
    kind = "checkout"
    repository = "https://invalid.invalid/nothing"
    version = "1"
    take = ["checks", "stock.py", "substitute.py"]
    [requires]
    pytest = ""
    [baseline]
    environment = {{ PYTHONPATH = "{{work}}/source", ANSWER_WITH = "", PYTEST_DISABLE_PLUGIN_AUTOLOAD = "1" }}
    [with_cam]
    environment = {{ ANSWER_WITH = "substitute" }}
    [[sets]]
    name = "answers"
    files = ["checks/test_answers.py"]
    passed = {passed}
    calls = ["substitute:Substitute.answer"]
    [[exclusions]]
    tests = ["checks/test_answers.py::{excluded}"]
    reason = "wants what is not here"
"""


class Bench:
    """A checkout of a framework with a suite, which a test may spoil before it runs it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.checkout = folder, folder / "checkout"
        self.write("checks/test_answers.py", TESTS)
        self.write("stock.py", STOCK)
        self.write("substitute.py", SUBSTITUTE)
        self.declare()

    def write(self, name: str, text: str) -> None:
        path = self.checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))

    def declare(
        self, *, passed: int = 2, excluded: str = "test_unwanted", timeout: float = 60, extra: str = ""
    ) -> None:
        text = textwrap.dedent(SUITE).format(name="bench", passed=passed, excluded=excluded)
        (self.folder / "suite.toml").write_text(text)

    def run(self, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "ci", str(self.folder / "suite.toml"), "--work", str(self.folder / "work")]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SUITE_")}
        done = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        return done.returncode, done.stdout + done.stderr

    def run_here(self, *arguments: str) -> tuple[int, str]:
        return self.run("--source", str(self.checkout), *arguments)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_what_passes_in_both_runs_holds_and_calls_are_counted_in_worker_processes_too(bench: Bench) -> None:
    status, told = bench.run_here()
    assert status == 0, told
    # test_plain, test_in_a_worker_process, test_fails_anyway
    assert "3 counted calls, in 3 tests" in told
    assert "ok: 2 passed in the baseline, 2 again with CAM" in told
    assert "wants what is not here" in told
    assert "2 passed, 1 failed, 1 skipped, 1 left out" in told


def test_a_test_that_only_passes_without_cam_fails_the_suite(bench: Bench) -> None:
    bench.write("substitute.py", SUBSTITUTE.replace("42", "41"))
    status, told = bench.run_here()
    assert status == 1
    assert "passes in the baseline, failed with CAM: checks/test_answers.py::test_plain" in told


def test_cam_that_was_never_called_is_not_proof(bench: Bench) -> None:
    bench.write("stock.py", "def answer():\n    return 42\n")
    status, told = bench.run_here()
    assert status == 1
    assert "CAM's substitute:Substitute.answer was never called" in told


def test_a_target_that_does_not_exist_is_an_error(bench: Bench) -> None:
    bench.write("substitute.py", SUBSTITUTE.replace("class Substitute", "class Other"))
    status, told = bench.run_here()
    assert status == 1
    assert "failed with CAM" in told


def test_a_source_that_is_not_there_is_not_run_and_not_passed(bench: Bench) -> None:
    status, told = bench.run()
    assert status == 3
    assert "not run: its tests are only in https://invalid.invalid/nothing" in told
    assert "SUITE_SOURCE_BENCH" in told
    status, told = bench.run("--source", str(bench.folder / "nowhere"))
    assert status == 3
    assert "does not hold checks, stock.py, substitute.py" in told


def test_a_missing_distribution_is_not_run(bench: Bench) -> None:
    declared = (bench.folder / "suite.toml").read_text()
    (bench.folder / "suite.toml").write_text(declared.replace('pytest = ""', 'no-such-framework = "1.2"'))
    status, told = bench.run_here()
    assert status == 3
    assert "not run: no-such-framework 1.2 is not installed" in told


def test_another_number_of_passing_tests_fails(bench: Bench) -> None:
    bench.declare(passed=3)
    status, told = bench.run_here()
    assert status == 1
    assert "baseline: 2 tests passed, 3 are declared" in told


def test_a_crash_loses_no_outcome_and_names_the_test(bench: Bench) -> None:
    bench.write("substitute.py", SUBSTITUTE.replace("return 42", "__import__('os').abort()"))
    status, told = bench.run_here()
    assert status == 1
    assert "with CAM: pytest ended with status -6 in checks/test_answers.py::test_plain" in told
    assert "passes in the baseline, crashed with CAM: checks/test_answers.py::test_plain" in told
    assert "passes in the baseline, did not run with CAM: checks/test_answers.py::test_in_a_worker_process" in told


def test_a_hang_ends_with_the_limit_and_leaves_no_process(tmp_path: Path) -> None:
    hanging = f"__import__('subprocess').run(['sleep', '987'], cwd={str(tmp_path)!r})"
    with (tmp_path / "log").open("w") as log:
        assert run.wait([sys.executable, "-c", hanging], tmp_path, dict(os.environ), log.fileno(), 1.0) is None
    _wait_until(lambda: not _sleepers_in(str(tmp_path)))  # it was killed; the kernel may need a moment


def test_a_run_that_is_terminated_takes_its_processes_along(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    sleep = f"__import__('subprocess').run(['sleep', '987'], cwd={str(folder)!r})"
    bench.write("stock.py", f"def answer():\n    {sleep}\n")
    command = [sys.executable, "-m", "ci", str(bench.folder / "suite.toml"), "--source", str(bench.checkout)]
    with subprocess.Popen([*command, "--work", str(tmp_path / "work")], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        _wait_until(lambda: bool(_sleepers_in(str(folder))))
        process.terminate()
        assert process.wait(60) == 143
    _wait_until(lambda: not _sleepers_in(str(folder)))


def test_a_hang_is_told_with_the_test_that_hung(tmp_path: Path) -> None:
    (tmp_path / "record").write_text('{"started": "checks/test_x.py::test_y", "calls": 0}\n')
    outcome = run.read(tmp_path, None, 7.0)
    assert outcome.broken == "took longer than 7 s, in checks/test_x.py::test_y"
    assert outcome.tests == {"checks/test_x.py::test_y": "crashed"}


def test_an_exclusion_that_matches_nothing_fails(bench: Bench) -> None:
    bench.declare(excluded="test_unw")
    status, told = bench.run_here()
    assert status == 1
    assert "the exclusion 'checks/test_answers.py::test_unw' matches no test" in told


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("[[sets]]\nname = 'x'\nfiles = []\npassed = 1\ntimeout = 3", "sets[1].timeout: expected one of"),
        ("[[sets]]\nname = 'x'\nfiles = []\npassed = '1'\ncalls = ['a:b']", "sets[1].passed: expected int, found '1'"),
        ("[[sets]]\nname = 'x'\nfiles = []\ncalls = ['a:b']", "sets[1].passed is missing"),
        ("[[sets]]\nname = 'x'\nfiles = []\npassed = 1", "names no calls that would prove it"),
        ("[[sets]]\nname = 'x'\nfiles = []\npassed = 1\ncam = false", "does not say why"),
        ("[[sets]]\nname = 'answers'\nfiles = []\npassed = 1\ncalls = ['a:b']", "two sets have the same name"),
    ],
)
def test_bad_declarations_are_refused(bench: Bench, extra: str, message: str) -> None:
    (bench.folder / "suite.toml").write_text(
        (bench.folder / "suite.toml").read_text().replace("[[exclusions]]", f"{extra}\n[[exclusions]]")
    )
    with pytest.raises(declaration.BadDeclaration, match=r"suite\.toml") as caught:
        declaration.load(bench.folder / "suite.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize("name", declaration.declared())
def test_declared_suites_can_be_read(name: str) -> None:
    assert declaration.load(declaration.SUITES / f"{name}.toml").name == name


def _wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _sleepers_in(where: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str((folder / "cwd").readlink()) == where and b"sleep" in (folder / "cmdline").read_bytes():
                found.append(folder.name)
        except OSError:
            continue  # ended meanwhile, or not ours
    return found
