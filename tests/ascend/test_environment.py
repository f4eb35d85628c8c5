"""Whether this environment can run the Ascend tests, and what is said where it cannot."""

import importlib.metadata
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cam_kernels.ascend import toolchain
from cam_kernels.ascend.cache import ArtefactCache, content_key
from cam_kernels.ascend.errors import MissingTool


def test_the_ascend_compilers_are_here() -> None:
    if not toolchain.usable():
        missing = "\n".join(f"{status.tool}: {status.detail}" for status in toolchain.report() if not status.usable)
        pytest.skip(f"the Ascend tests run in `make test-ascend`, not here:\n{missing}")


@pytest.fixture
def _fresh_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look tools up anew, and again after the test."""
    for find in (toolchain.require_triton, toolchain.bishengir, toolchain.llvm, toolchain.c_compiler):
        monkeypatch.setattr(toolchain, find.__name__, find.__wrapped__)


@pytest.mark.usefixtures("_fresh_answers")
@pytest.mark.parametrize(
    ("version", "wanted"), [(None, "triton-ascend: found nothing"), ("3.1.0", "found 3.1.0, needed version 3.2.0")]
)
def test_a_missing_python_package_is_named(monkeypatch: pytest.MonkeyPatch, version: str | None, wanted: str) -> None:
    def lookup(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", lookup)
    with pytest.raises(MissingTool, match=wanted) as caught:
        toolchain.require_triton()
    assert "pip install" in str(caught.value)
    with pytest.raises(MissingTool, match="ascendnpu-ir"):
        toolchain.bishengir("bishengir-compile")
    assert {s.tool: s.usable for s in toolchain.report()}["triton-ascend"] is False


@pytest.mark.usefixtures("_fresh_answers")
def test_plain_triton_beside_triton_ascend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: toolchain.TRITON_ASCEND)
    with pytest.raises(MissingTool, match="the distribution triton beside it"):
        toolchain.require_triton()


@pytest.mark.usefixtures("_fresh_answers")
@pytest.mark.parametrize(("tool", "package"), [("mlir-opt", "mlir-19-tools"), ("llc", "llvm-19")])
def test_a_missing_debian_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tool: str, package: str
) -> None:
    monkeypatch.setattr(toolchain, "_LLVM_DIRECTORIES", (str(tmp_path),))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingTool, match=f"found nothing.*apt-get install {package}"):
        toolchain.llvm(tool)
    old = tmp_path / tool
    old.write_text("#!/bin/sh\necho 'Ubuntu LLVM version 18.1.3'\n")
    old.chmod(0o755)
    with pytest.raises(MissingTool, match=r"LLVM 18\.1, needed LLVM 19\.1\.x"):
        toolchain.llvm(tool)


def test_the_cache_makes_each_artefact_once(tmp_path: Path) -> None:
    cache, calls = ArtefactCache(tmp_path), []

    def make() -> bytes:
        calls.append(1)
        return b"made"

    key = content_key("a", "b")
    assert cache.get(key, ".so", make).read_bytes() == b"made"
    assert cache.get(key, ".so", make).read_bytes() == b"made"
    assert len(calls) == 1
    assert content_key("ab") != content_key("a", "b")


def test_who_wants_the_same_artefact_at_the_same_time_waits_for_one_to_make_it(tmp_path: Path) -> None:
    cache, calls, together = ArtefactCache(tmp_path), [], threading.Barrier(4)

    def make() -> bytes:
        calls.append(1)
        return b"made"

    def want() -> bytes:
        together.wait(10)
        return cache.get(content_key("k"), ".so", make).read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert [done.result(10) for done in [pool.submit(want) for _ in range(4)]] == [b"made"] * 4
    assert len(calls) == 1


def test_a_failed_compilation_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("compiler")

    cache = ArtefactCache(tmp_path)
    with pytest.raises(RuntimeError):
        cache.get(content_key("x"), ".so", fail)
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.skipif(not toolchain.usable(), reason="runs in `make test-ascend`")
def test_the_command_shows_and_checks_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    from cam_kernels.ascend.__main__ import main

    assert main(["tools"]) == 0
    assert "llvm-19" in capsys.readouterr().out
    assert main(["check", "raise_flag"]) == 0
    assert "1 variants for 3 targets, 0 with findings" in capsys.readouterr().out
    for stage, wanted in (("linalg", "gpu.barrier"), ("portable", "@cam_fence"), ("hivm", "pipe_barrier[<PIPE_ALL>]")):
        assert main(["show", "push_counts", "--stage", stage]) == 0
        assert wanted in capsys.readouterr().out
    assert main(["show", "nothing"]) == 1
    assert "push_counts" in capsys.readouterr().err
