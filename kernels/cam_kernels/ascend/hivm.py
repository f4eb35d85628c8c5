"""Ascend linalg IR -> final HIVM, the last form before machine code, for each kind of NPU.

bishengir-compile allocates the unified buffer, multi-buffers loops and inserts the flags between the pipes, then calls
hivmc. hivmc comes only with CANN, so on this machine the command always ends with an error after its work is done:
success is that module.hivm.opt.mlir has been written.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cam_kernels.ascend import toolchain
from cam_kernels.ascend.cache import ArtefactCache, content_key
from cam_kernels.ascend.errors import CompileFailed, UnifiedBufferOverflow
from cam_kernels.ascend.linalg import LinalgModule

A2 = "Ascend910B3"
A3 = "Ascend910_9392"
A5 = "Ascend950PR_9579"
TARGETS = (A2, A3, A5)

_UB_OVERFLOW = re.compile(r"ub overflow, requires (\d+) bits while (\d+) bits", re.IGNORECASE)
_TIMEOUT_S = 120.0


# When the unified buffer overflows, bishengir-compile tries again without code motion and then without double
# buffering, and says so only in its log.
_RETRIED = "Ub overflow detected"
_CRAMPED = "// cam: compiled after the unified buffer overflowed\n"


@dataclass(frozen=True)
class HivmModule:
    """Final HIVM of one variant for one target."""

    kernel: str
    target: str
    text: str

    @property
    def cramped(self) -> bool:
        """The tiles fit the unified buffer only after the compiler gave up double buffering or code motion: correct,
        but copies and computation overlap less than the kernel was written for."""
        return self.text.startswith(_CRAMPED)


def compile_hivm(module: LinalgModule, target: str, cache: ArtefactCache | None = None) -> HivmModule:
    """Compile for one target. Raises MissingTool, UnifiedBufferOverflow, CompileFailed."""
    if target not in TARGETS:
        raise CompileFailed(module.entry, "choosing a target", f"{target} is none of {TARGETS}", "")
    compiler = toolchain.bishengir("bishengir-compile")
    if target == A5:
        toolchain.bishengir("bishengir-compile-a5")
    options = _options(target)
    key = content_key("hivm", toolchain.ASCENDNPU_IR, *options, module.text)
    path = (cache or ArtefactCache()).get(key, ".hivm.mlir", lambda: _compile(module, compiler, options))
    return HivmModule(module.entry, target, path.read_text())


def _options(target: str) -> list[str]:
    # The options triton-ascend passes with its defaults, so that what is checked here is what a device would run.
    options = [f"--target={target}", "--enable-hfusion-compile=true", "--enable-triton-kernel-compile=true"]
    options += ["--enable-auto-multi-buffer=True", "--enable-auto-bind-sub-block=True"]
    return options + ([] if target == A5 else ["--enable-hivm-compile=true"])


def _compile(module: LinalgModule, compiler: Path, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cam-hivm-") as name:
        directory = Path(name)
        source = directory / "kernel.mlir"
        source.write_text(module.text)
        command = [str(compiler), str(source), *options, "-o", str(directory / "kernel.o"), f"--save-temps={name}"]
        # For 950 the driver looks for its second binary on PATH.
        environment = os.environ | {"PATH": f"{compiler.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CompileFailed(module.entry, f"bishengir-compile ({_TIMEOUT_S} s)", "timeout", module.text) from error
        result = directory / "module.hivm.opt.mlir"
        log = done.stdout + done.stderr
        if result.exists():
            return (_CRAMPED if _RETRIED in log else "").encode() + result.read_bytes()
        # The missing hivmc is reported first, whatever the real failure was.
        log = "\n".join(line for line in log.splitlines() if "hivmc" not in line)
        kind = UnifiedBufferOverflow if _UB_OVERFLOW.search(log) else CompileFailed
        raise kind(module.entry, f"bishengir-compile {options[0]}", log, module.text)
