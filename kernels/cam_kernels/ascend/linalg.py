"""Triton source -> Ascend linalg IR, without CANN.

triton.compile() and launching both ask for an Ascend installation; the compiler stages themselves do not, so they are
called one by one. The result is what triton-ascend hands to bishengir-compile on a machine with NPUs.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cam_kernels.ascend import toolchain
from cam_kernels.ascend.cache import ArtefactCache, content_key
from cam_kernels.ascend.errors import CompileFailed
from cam_kernels.ascend.kernel import Variant

_ENTRY = re.compile(r"func\.func @(\w+)\((.*?)\) attributes", re.DOTALL)
_ARGUMENT_TYPE = re.compile(r"%arg\d+: ([^,{]+?)(?: \{[^}]*\})?(?:, |$)")
# Inside IR text: "aiv" runs on vector cores, "aic" on cube cores, "mix" on both.
_MIX_MODE = re.compile(r', mix_mode\s*=\s*"([^"]+)"')

# What the Ascend compiler puts before the user's arguments (lock, workspace) and after them (grid and program id).
LEADING_ARGUMENTS = 2
TRAILING_ARGUMENTS = 6


@dataclass(frozen=True)
class LinalgModule:
    """Ascend linalg IR of one variant."""

    variant: Variant
    text: str
    entry: str
    argument_types: tuple[str, ...]
    """MLIR types of all arguments of `entry`, including the leading and trailing ones of the Ascend ABI."""
    core: str
    """The kind of core: "aiv", "aic" or "mix"."""


def lower(variant: Variant, cache: ArtefactCache | None = None) -> LinalgModule:
    """Lower one variant. Raises MissingTool, CompileFailed."""
    toolchain.require_triton()
    cache = cache or ArtefactCache()
    key = content_key("linalg", toolchain.TRITON_ASCEND, *variant.identity())
    path = cache.get(key, ".linalg.mlir", lambda: _run_stages(variant).encode())
    return _parse(variant, path.read_text())


def _run_stages(variant: Variant) -> str:
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # The architecture named here does not reach the linalg text: it matters from bishengir on.
    target = GPUTarget("npu", "Ascend910B3", 0)
    backend = AscendBackend(target)
    options = backend.parse_options({})
    signature = dict(variant.types) | {name: "constexpr" for name, _ in variant.constants}
    source = ASTSource(fn=variant.kernel.fn, signature=signature, constants=dict(variant.constants))
    context = ir.context()
    ir.load_dialects(context)
    try:
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    except Exception as error:
        raise CompileFailed(variant.name, "triton front end", str(error), str(variant)) from error
    metadata = {"target": target, **options.__dict__}
    ttir = make_ttir(module, metadata, options)
    try:
        return str(ttir_to_linalg(ttir, metadata, options, named_ops=True))
    except subprocess.CalledProcessError as error:
        log = (error.stderr or b"").decode(errors="replace")
        raise CompileFailed(variant.name, "triton-adapter-opt", log, str(ttir)) from error


def _parse(variant: Variant, text: str) -> LinalgModule:
    entry, mode = _ENTRY.search(text), _MIX_MODE.search(text)
    if entry is None or mode is None:
        raise CompileFailed(variant.name, "reading the linalg IR", "no entry function or mix_mode", text)
    # bishengir rejects the attribute; triton-ascend, too, takes it out before it calls bishengir.
    text = _MIX_MODE.sub("", text)
    return LinalgModule(variant, text, entry.group(1), tuple(_ARGUMENT_TYPE.findall(entry.group(2))), mode.group(1))


def dump(module: LinalgModule, directory: Path) -> Path:
    """Write the IR where a person can read it; returns the file."""
    path = directory / f"{module.entry}.linalg.mlir"
    path.write_text(module.text)
    return path
