"""The outside tools, found and checked in one place.

Two of them are Python packages that must share a virtual environment of their own, because triton-ascend owns the
import name `triton`; the others are Debian's LLVM 19, the release that the Ascend compiler itself is built on.
Nothing here is configured by environment variables: a tool is where its package puts it, or on PATH.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cam_kernels.ascend.errors import MissingTool

TRITON_ASCEND = "3.2.0"
ASCENDNPU_IR = "1.2.0"
# The native path edits the IR as text, so every producer and consumer of that text is pinned. LLVM is pinned to its
# minor release: 19.1.x is what bishengir 1.2.0 is built from, and the textual IR is stable inside it.
LLVM = "19.1"

_PIP = "python -m pip install torch==2.13.0 numpy==1.26.4 pybind11 setuptools attrs"
_PIP += f" triton-ascend=={TRITON_ASCEND} ascendnpu-ir=={ASCENDNPU_IR}   (in a virtual environment without triton)"
_LLVM_DIRECTORIES = ("/usr/lib/llvm-19/bin",)


def _distribution_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_distribution(name: str, pinned: str) -> None:
    version = _distribution_version(name)
    if version != pinned:
        raise MissingTool(name, version or "nothing", f"version {pinned}", _PIP)


@functools.cache
def require_triton() -> None:
    """Check that `import triton` means triton-ascend in the pinned version. Raises MissingTool."""
    _require_distribution("triton-ascend", TRITON_ASCEND)
    if _distribution_version("triton") is not None:
        # Both distributions write the same files: whichever was installed last has overwritten part of the other.
        raise MissingTool("triton-ascend", "the distribution triton beside it", "triton-ascend alone", _PIP)


@functools.cache
def bishengir(binary: str) -> Path:
    """Path of one of ascendnpu-ir's binaries: bishengir-compile, bishengir-opt or their -a5 forms (950)."""
    _require_distribution("ascendnpu-ir", ASCENDNPU_IR)
    for file in importlib.metadata.files("ascendnpu-ir") or ():
        if file.name == binary and file.parent.name == "bin":
            path = Path(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    raise MissingTool(binary, "no such file in ascendnpu-ir", f"ascendnpu-ir {ASCENDNPU_IR}", _PIP)


@functools.cache
def llvm(binary: str) -> Path:
    """Path of mlir-opt, mlir-translate, opt or llc of LLVM 19."""
    package = "mlir-19-tools" if binary.startswith("mlir-") else "llvm-19"
    candidates = [Path(directory) / binary for directory in _LLVM_DIRECTORIES]
    candidates += [Path(found) for found in (shutil.which(f"{binary}-19"), shutil.which(binary)) if found]
    seen = "nothing"
    for path in candidates:
        if not os.access(path, os.X_OK):
            continue
        text = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
        match = re.search(r"LLVM version (\d+\.\d+)(\.\d+)?", text)
        seen = f"{path} of LLVM {match.group(1)}" if match else f"{path} of unknown version"
        if match and match.group(1) == LLVM:
            return path
    raise MissingTool(binary, seen, f"LLVM {LLVM}.x", f"apt-get install {package}")


@functools.cache
def c_compiler() -> Path:
    """The C compiler that links native kernels."""
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise MissingTool("cc", "nothing", "any C compiler", "apt-get install gcc")


@functools.cache
def cxx_compiler() -> Path:
    """The C++ compiler for the instructions of final HIVM."""
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise MissingTool("c++", "nothing", "any C++17 compiler", "apt-get install g++")


@dataclass(frozen=True)
class ToolStatus:
    """One line of `cam doctor`: a tool, where it is or why it is not usable."""

    tool: str
    usable: bool
    detail: str


def report() -> tuple[ToolStatus, ...]:
    """Every tool with its state; raises nothing."""

    def probe(tool: str, find: functools._lru_cache_wrapper[Path], *arguments: str) -> ToolStatus:
        try:
            return ToolStatus(tool, True, str(find(*arguments)))
        except MissingTool as error:
            return ToolStatus(tool, False, str(error))

    try:
        require_triton()
        triton = ToolStatus("triton-ascend", True, TRITON_ASCEND)
    except MissingTool as error:
        triton = ToolStatus("triton-ascend", False, str(error))
    hivmc = shutil.which("hivmc")
    return (
        triton,
        probe("bishengir-compile", bishengir, "bishengir-compile"),
        probe("bishengir-compile-a5", bishengir, "bishengir-compile-a5"),
        *(probe(name, llvm, name) for name in ("mlir-opt", "mlir-translate", "opt", "llc")),
        probe("cc", c_compiler),
        probe("c++", cxx_compiler),
        ToolStatus(
            "hivmc", hivmc is not None, hivmc or "not on PATH: it is part of CANN, and only machines with NPUs need it"
        ),
    )


def missing() -> list[str]:
    """What kernels need to be compiled to HIVM and run from their Ascend IR here, and is not there; hivmc is not asked
    for."""
    return [f"{each.tool}: {each.detail}" for each in report() if not each.usable and each.tool != "hivmc"]


def usable() -> bool:
    """Whether kernels can be compiled to HIVM and run from their Ascend IR here."""
    return not missing()
