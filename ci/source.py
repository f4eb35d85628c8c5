"""Brings a suite's tests to a working folder: from PyPI, from a checkout, or not at all, with the reason."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from ci.declaration import Source

_DOWNLOAD_S = 300.0


class NotRun(Exception):
    """The suite cannot run here; the message is the reason. Never counted as passed."""


def variable(suite: str) -> str:
    """Environment variable that names a checkout of the suite's source."""
    return f"SUITE_SOURCE_{suite.upper().replace('-', '_')}"


def bring(suite: str, source: Source, work: Path, *, path: Path | None, clone: bool) -> Path:
    """The folder with `source.take` of the source, under `work`. Raises NotRun.

    path: a checkout or an unpacked sdist, before all else. A copy that an earlier run made is used again, but never
    one of another version or of another path.
    """
    given = path or (Path(os.environ[variable(suite)]) if os.environ.get(variable(suite)) else None)
    target = work / "source"
    origin = work / "source.origin"
    wanted = str(given.resolve()) if given else f"{source.kind} {source.package or source.repository} {source.version}"
    if given is None and target.is_dir() and origin.is_file() and origin.read_text() == wanted:
        return target
    folder = given if given else _fetch(suite, source, work, clone)
    missing = [name for name in source.take if not (folder / name).exists()]
    if missing:
        raise NotRun(f"{folder} does not hold {', '.join(missing)}")
    shutil.rmtree(target, ignore_errors=True)
    for name in source.take:
        _copy(folder / name, target / name)
    origin.write_text(wanted)
    return target


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy2(source, target)


def _fetch(suite: str, source: Source, work: Path, clone: bool) -> Path:
    if source.kind == "sdist":
        return _download(source, work)
    if not clone:
        raise NotRun(
            f"its tests are only in {source.repository} ({source.version}); name a checkout with --source or "
            f"{variable(suite)}, or allow --clone"
        )
    folder = work / "clone"
    shutil.rmtree(folder, ignore_errors=True)
    command = ["git", "clone", "--quiet", "--depth=1", f"--branch={source.version}", source.repository, str(folder)]
    _call(command, {}, f"{source.repository} cannot be cloned")
    return folder


def _download(source: Source, work: Path) -> Path:
    downloads = work / "download"
    downloads.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    environment = dict(source.build_environment)
    if source.build_requires:
        # Not into the environment under test, which these would change.
        tools = work / "build-tools"
        what = f"what the sdist of {source.package} needs to be read cannot be installed"
        _call([*pip, "install", "--quiet", "--upgrade", "--target", str(tools), *source.build_requires], {}, what)
        environment["PYTHONPATH"] = str(tools)
    _call(
        [*pip, "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:",
         "--dest", str(downloads), f"{source.package}=={source.version}"],
        environment,
        f"no index gives the sdist of {source.package} {source.version}",
    )  # fmt: skip
    archive = next(iter(sorted(downloads.glob("*.tar.gz"))), None)
    if archive is None:
        raise NotRun(f"pip brought no .tar.gz of {source.package} {source.version}: {os.listdir(downloads)}")
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


def _call(command: list[str], environment: dict[str, str], what: str) -> None:
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=_DOWNLOAD_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotRun(f"{what}: {error}") from None
    if done.returncode:
        raise NotRun(f"{what}: {(done.stderr or done.stdout).strip()[-600:]}")
