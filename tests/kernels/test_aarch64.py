"""The native sources compile for aarch64, and the row kernels give the same bits there as on x86-64.

Runs where Debian's g++-aarch64-linux-gnu and qemu-user are installed; aarch64 hardware is not needed.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

CPU = Path(__file__).parents[2] / "kernels" / "cpu"
CROSS, QEMU, NATIVE = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64"), shutil.which("g++")
FLAGS = ["-std=gnu++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", f"-I{CPU}"]
needs_cross = pytest.mark.skipif(CROSS is None, reason="needs Debian's g++-aarch64-linux-gnu")
needs_qemu = pytest.mark.skipif(
    None in (CROSS, QEMU, NATIVE), reason="needs g++ and Debian's g++-aarch64-linux-gnu and qemu-user"
)


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_cross
@pytest.mark.parametrize(
    "source",
    [path for path in sorted(CPU.glob("*.cpp")) if not any(word in path.name for word in ("bind", "avx"))],
    ids=lambda path: path.name,
)
def test_sources_compile(source: Path, tmp_path: Path) -> None:
    run(CROSS, *FLAGS, "-c", source, "-o", tmp_path / "object.o")


@needs_qemu
def test_row_kernels_give_the_same_bits(tmp_path: Path) -> None:
    sources = [Path(__file__).with_name("row_bits.cpp"), CPU / "rows_portable.cpp"]
    run(NATIVE, *FLAGS, *sources, "-o", tmp_path / "native")
    run(CROSS, *FLAGS, "-static", *sources, "-o", tmp_path / "cross")
    assert run(tmp_path / "native") == run(QEMU, tmp_path / "cross")
