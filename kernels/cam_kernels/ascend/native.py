"""Ascend linalg IR -> a shared library for this machine, with upstream MLIR 19 and LLVM 19.

The IR is the one the NPU compiler gets. Ascend's own operations in it are few, and each is rewritten into a call that
runtime.c provides; anything not rewritten is an error here, never a silent difference. What this path cannot show is
listed in README.md: code generation by hivmc, memory ordering between pipes and devices, device rounding, speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from cam_kernels.ascend import toolchain
from cam_kernels.ascend.cache import ArtefactCache, content_key
from cam_kernels.ascend.errors import CompileFailed
from cam_kernels.ascend.linalg import LinalgModule

_RUNTIME = Path(__file__).with_name("runtime.c")
_TIMEOUT_S = 240.0

# The deallocation passes are left out on purpose (see runtime.c). Bufferization sees memory the kernel reads through
# addresses as unknown operations, hence allow-unknown-ops.
_TO_LLVM_DIALECT = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true allow-unknown-ops=true",
    "--convert-bufferization-to-memref",
    "--canonicalize",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm=use-generic-functions=true",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
# -fp-contract=off: one rounding per multiplication and one per addition, as the kernels and the reference are written.
OPT = ("-O2",)
LLC = ("-O2", "-filetype=obj", "-relocation-model=pic", "-fp-contract=off")
_LINK = ("-O2", "-fPIC", "-shared", "-Wall", "-Werror")

_POINTER_CAST = re.compile(r"hivm\.hir\.pointer_cast\((%\w+)\) \[(%\w+)\] : memref<\?x(\w+)>")
_LEFT_OVER = re.compile(
    r"^\s*(?:%[\w:, ]+ = )?\"?((?:hivm|hfusion|hacc|annotation|gpu|tt|scope)\.[\w.]+)", re.MULTILINE
)


def portable(module: LinalgModule) -> str:
    """The IR with Ascend's operations replaced by calls, for upstream MLIR. Raises CompileFailed on an unknown one."""
    # Hints about placement and layout that have no meaning on a CPU.
    text = re.sub(r" \{hivm\.[a-z_]+\}", "", module.text)
    text = re.sub(r"\n\s*annotation\.mark[^\n]*", "", text)
    declarations = []
    for element in sorted({m.group(3) for m in _POINTER_CAST.finditer(text)}):
        # The result descriptor does not depend on the element type, so all types share one C function.
        declarations.append(
            f"  func.func private @cam_pointer_cast_{element}(i64, index) -> memref<?x{element}>"
            " attributes {llvm.emit_c_interface}"
        )
    text = _POINTER_CAST.sub(
        r"func.call @cam_pointer_cast_\3(\1, \2) : (i64, index) -> memref<?x\3>",
        text,
    )
    text, fences = re.subn(r"\n(\s*)gpu\.barrier[^\n]*", r"\n\1func.call @cam_fence() : () -> ()", text)
    if fences:
        declarations.append("  func.func private @cam_fence()")
    unknown = sorted(set(_LEFT_OVER.findall(text)))
    if unknown:
        raise CompileFailed(module.entry, "making the IR portable", f"no CPU form is known for {unknown}", module.text)
    return text.replace("module {", "\n".join(["module {", *declarations]), 1)


def build(module: LinalgModule, cache: ArtefactCache | None = None) -> Path:
    """Path of the shared library. Raises MissingTool, CompileFailed."""
    tools = [toolchain.llvm(name) for name in ("mlir-opt", "mlir-translate", "opt", "llc")]
    compiler = toolchain.c_compiler()
    text = portable(module)
    options = (*_TO_LLVM_DIALECT, *OPT, *LLC, *_LINK)
    key = content_key("native", toolchain.LLVM, *options, _RUNTIME.read_text(), text)
    return (cache or ArtefactCache()).get(key, ".so", lambda: _build(module, text, tools, compiler))


def _build(module: LinalgModule, text: str, tools: list[Path], compiler: Path) -> bytes:
    mlir_opt, mlir_translate, opt, llc = tools
    with tempfile.TemporaryDirectory(prefix="cam-native-") as name:
        directory = Path(name)

        def run(stage: str, tool: Path, *arguments: str | Path) -> None:
            try:
                done = subprocess.run(
                    [tool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=directory, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise CompileFailed(module.entry, f"{stage} ({_TIMEOUT_S} s)", "timeout", text) from error
            if done.returncode != 0:
                raise CompileFailed(module.entry, stage, done.stderr or done.stdout, text)

        (directory / "in.mlir").write_text(text)
        run("mlir-opt", mlir_opt, "in.mlir", *_TO_LLVM_DIALECT, "-o", "llvm.mlir")
        run("mlir-translate", mlir_translate, "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll")
        (directory / "kernel.ll").write_text(one_pointer_cast((directory / "kernel.ll").read_text()))
        run("opt", opt, *OPT, "kernel.ll", "-o", "kernel.bc")
        run("llc", llc, *LLC, "kernel.bc", "-o", "kernel.o")
        run("linking", compiler, *_LINK, "kernel.o", _RUNTIME, "-lm", "-o", "kernel.so")
        return (directory / "kernel.so").read_bytes()


def one_pointer_cast(ir: str) -> str:
    """LLVM IR in which all pointer casts call one C function, whatever their element type."""
    seen = False
    kept = []
    for line in ir.splitlines():
        if line.startswith("declare") and "@_mlir_ciface_cam_pointer_cast_" in line:
            if seen:
                continue
            seen = True
        kept.append(re.sub(r"@_mlir_ciface_cam_pointer_cast_\w+", "@_mlir_ciface_cam_pointer_cast", line))
    return "\n".join(kept) + "\n"
