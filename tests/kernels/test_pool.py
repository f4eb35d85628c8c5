"""The pool of threads that copies rows: what no call from Python can bring about, in a small C++ program."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CPU = Path(__file__).parents[2] / "kernels" / "cpu"
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_failures_in_threads_reach_the_caller(tmp_path: Path) -> None:
    sources = [Path(__file__).with_name("pool.cpp"), CPU / "pool.cpp"]
    build = [COMPILER, "-std=gnu++20", "-O1", "-pthread", f"-I{CPU}", *sources, "-o", tmp_path / "pool"]
    subprocess.run([str(word) for word in build], check=True, timeout=120)
    # It limits its own memory, of which a sanitizer that `make sanitize` preloads needs more.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run([str(tmp_path / "pool")], capture_output=True, text=True, timeout=60, env=plain)
    assert done.returncode == 0, done.stderr
    *thrown, total, refused = done.stdout.splitlines()
    assert thrown == [f"range {rank}, 3 others done" for rank in range(4)]
    assert total == "then 499500"
    assert re.fullmatch(r"cannot run 1024 threads, only \d+: .*knob: threads\)", refused), refused
