"""Final HIVM of A2 and A3 -> a shared library for this CPU.

The same kernels one stage further than native.py: after bishengir-compile has placed every tile in the unified buffer,
doubled buffers, turned operations into the device's instructions and thrown away what it thought useless. Tiles lie at
the addresses they have on the device, in one array per thread, so tiles that overlap wrongly give wrong results. The
pipes are run one instruction after the other in program order; flags between pipes are not simulated (hivm_check reads
them).

Vector kernels only: the cube's instructions have no CPU form here.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from cam_kernels.ascend import native, toolchain
from cam_kernels.ascend.cache import ArtefactCache, content_key
from cam_kernels.ascend.errors import CompileFailed
from cam_kernels.ascend.hivm import HivmModule

_HEADER = Path(__file__).with_name("hivm_runtime.h")
_TIMEOUT_S = 240.0
_TO_LLVM_DIALECT = (
    "--lower-affine",
    "--convert-scf-to-cf",
    "--arith-expand=include-bf16=true",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--convert-cf-to-llvm",
    "--reconcile-unrealized-casts",
)
_CXX = ("-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Werror")

_ENTRY = re.compile(r"^  func\.func @(\w+)\((.*)\) attributes \{.*hacc\.entry.*\} \{$", re.MULTILINE)
_PRIVATE = re.compile(r"func\.func private @(\w+)\((.*?)\)")
# An instruction's name begins with what it does; then come dimensions and types, in an order of its own.
_SUFFIX = re.compile(r"_(?:\dd|bfloat16_t|half|float|int8_t|int16_t|int32_t|bool)(?:_.*)?$")
_TYPES = {
    "bf16": "hivm::bf16", "f16": "hivm::f16", "f32": "float", "i1": "hivm::bit", "i8": "int8_t", "i16": "int16_t",
    "i32": "int32_t", "i64": "int64_t", "index": "int64_t",
}  # fmt: skip


_BITCAST = re.compile(
    r"\n(?P<indent>\s*)%(?P<result>\w+) = hivm\.hir\.bitcast (?P<source>%\w+) : (?P<type>memref<[^\n]*>)"
    r" -> memref<(?P<size>\d+)x(?P<element>\w+)(?:, strided<\[(?P<stride>\d+)\]>)?>"
)


def _bitcasts(body: str) -> tuple[str, list[str]]:
    """Replace hivm.hir.bitcast, the same memory as elements of another type; also returns the source types.

    The address goes through C: upstream's extract_aligned_pointer_as_index forgets the shift of a memref.view.
    """
    types: list[str] = []

    def replace(match: re.Match[str]) -> str:
        name, size, element, stride = match["result"], match["size"], match["element"], match["stride"]
        if match["type"] not in types:
            types.append(match["type"])
        result = f"memref<{size}x{element}" + (f", strided<[{stride}]>>" if stride else ">")
        address = f"func.call @cam_address_{types.index(match['type'])}({match['source']}) : ({match['type']}) -> i64"
        cast = (
            f"func.call @cam_pointer_cast_{element}(%word_{name}, %size_{name}) : (i64, index) -> memref<?x{element}>"
        )
        shape = f"to offset: [0], sizes: [{size}], strides: [{stride or 1}]"
        lines = (
            f"%word_{name} = {address}",
            f"%size_{name} = arith.constant {int(size) * int(stride or 1)} : index",
            f"%any_{name} = {cast}",
            f"%{name} = memref.reinterpret_cast %any_{name} {shape} : memref<?x{element}> to {result}",
        )
        return "".join(f"\n{match['indent']}{line}" for line in lines)

    return _BITCAST.sub(replace, body), types


def portable(module: HivmModule) -> str:
    """The entry function and its instructions as declarations, in upstream dialects. Raises CompileFailed."""
    text = re.sub(r", #hivm\.address_space<\w+>", "", module.text)
    entry = _ENTRY.search(text)
    if entry is None or "address_space" in text or len(_ENTRY.findall(text)) != 1:
        raise CompileFailed(module.kernel, "reading HIVM", "not one entry function", module.text)
    body = text[entry.end() : text.index("\n  }\n", entry.end())]
    for drop in (
        r"hivm\.hir\.(?:set_flag|wait_flag|set_mask_norm|set_ctrl)\b",
        r"hivm\.hir\.pipe_barrier\[<PIPE_(?!ALL)",
    ):
        body = re.sub(rf"\n\s*{drop}[^\n]*", "", body)
    body = re.sub(r"\n(\s*)hivm\.hir\.pipe_barrier\[<PIPE_ALL>\]", r"\n\1func.call @cam_fence() : () -> ()", body)
    body = body.replace("hivm.hir.get_block_idx -> i64", "func.call @cam_block_index() : () -> i64")
    body = re.sub(r" \{(?:hivm|pipeline)\.[^{}]*\}", "", body)
    ub = _unified_buffer_bytes(module.text)
    body = re.sub(
        # A second address is that of the other half of a double buffer which nothing alternates with.
        r"\n(\s*)%(\w+) = hivm\.hir\.pointer_cast\((%[\w-]+)(?:, %[\w-]+)*\) : (memref<[^\n]*>)",
        rf"\n\1%at_\2 = arith.index_cast \3 : i64 to index"
        rf"\n\1%\2 = memref.view %cam_ub[%at_\2][] : memref<{ub}xi8> to \4",
        body,
    )
    body = re.sub(
        r"hivm\.hir\.pointer_cast\((%\w+)\) \[(%\w+)\] : memref<\?x(\w+)>",
        r"func.call @cam_pointer_cast_\3(\1, \2) : (i64, index) -> memref<?x\3>",
        body,
    )
    body, bitcast_types = _bitcasts(body)
    unknown = sorted(set(re.findall(r"\b(?:hivm|hacc|annotation)\.[\w.]+", body)))
    if unknown:
        raise CompileFailed(module.kernel, "making HIVM portable", f"no CPU form is known for {unknown}", module.text)
    used = set(re.findall(r"call @(\w+)\(", body))
    elements = sorted({name.removeprefix("cam_pointer_cast_") for name in used if name.startswith("cam_pointer_cast_")})
    interface = " attributes {llvm.emit_c_interface}"
    declarations = [
        f"  func.func private @cam_ub() -> memref<{ub}xi8>{interface}",
        "  func.func private @cam_fence()",
        "  func.func private @cam_block_index() -> i64",
        *(f"  func.func private @cam_pointer_cast_{e}(i64, index) -> memref<?x{e}>{interface}" for e in elements),
        *(f"  func.func private @cam_address_{n}({t}) -> i64{interface}" for n, t in enumerate(bitcast_types)),
        *(f"  func.func private @{n}({a}){interface}" for n, a in _PRIVATE.findall(text) if n in used),
    ]
    arguments = re.sub(r" \{[^{}]*\}", "", entry.group(2))
    maps = [line for line in text.splitlines() if line.startswith("#map")]
    opening = f"  func.func @{entry.group(1)}({arguments}) {{"
    first = f"    %cam_ub = func.call @cam_ub() : () -> memref<{ub}xi8>"
    return "\n".join([*maps, "module {", *declarations, opening, first]) + body + "\n  }\n}\n"


def instructions(text: str) -> str:
    """C++ that gives every declared instruction its symbol. `text` is what portable() returned."""
    source = ['#include "hivm_runtime.h"', "using namespace hivm;", 'extern "C" {']
    for name, arguments in _PRIVATE.findall(text):
        if name.startswith("cam_address_"):
            size = {"f32": 4, "i32": 4}[re.findall(r"x(\w+)", arguments)[0]]
            body = f"return int64_t(a->aligned) + a->offset * {size};"
            source.append(f"int64_t _mlir_ciface_{name}(Memref *a) {{ {body} }}")
        if name.startswith("cam_"):
            continue
        kinds = re.findall(r"memref<(?:[^<>]|<[^<>]*>)*>|\w+", arguments)
        parameters, passed = [], []
        for number, kind in enumerate(kinds):
            memory = re.match(r"memref<((?:\?x)+)(\w+)", kind)
            if memory:
                parameters.append(f"memref<{_TYPES[memory.group(2)]}, {memory.group(1).count('?')}> *a{number}")
                passed.append(f"*a{number}")
            elif kind in ("bf16", "f16"):
                # A 16-bit float comes in the low half of a float register; compilers before GCC 13 have no bf16.
                parameters.append(f"float a{number}")
                passed.append(f"low<{_TYPES[kind]}>(a{number})")
            else:
                parameters.append(f"{'bool' if kind == 'i1' else _TYPES[kind]} a{number}")
                passed.append(f"a{number}")
        stem = re.sub(r"^vsel_[vs][vs]$", "vsel", _SUFFIX.sub("", name))
        source.append(f"void _mlir_ciface_{name}({', '.join(parameters)}) {{ {stem}({', '.join(passed)}); }}")
    return "\n".join([*source, "}", ""])


_SUPPORT = """
#include <cstdint>
#include <cstring>
namespace hivm {
template <class T> T low(float x) { T result; memcpy(&result, &x, 2); return result; }
}
struct Memref { void *allocated, *aligned; int64_t offset, size, stride; };
static thread_local int64_t block_index;
static thread_local char unified_buffer[@UB@] __attribute__((aligned(512)));
extern "C" {
void _mlir_ciface_cam_ub(Memref *result) { *result = {unified_buffer, unified_buffer, 0, @UB@, 1}; }
void _mlir_ciface_cam_pointer_cast(Memref *result, int64_t address, int64_t size) {
    *result = {(void *)address, (void *)address, 0, size, 1};
}
int64_t cam_block_index() { return block_index; }
void cam_fence() { __sync_synchronize(); }
/* Tiles must be written before they are read: what an earlier program left behind would hide that. */
void cam_begin_block(int64_t index) { block_index = index; memset(unified_buffer, 0xA5, sizeof unified_buffer); }
}
"""


def build(module: HivmModule, cache: ArtefactCache | None = None) -> Path:
    """Path of the shared library. Raises MissingTool, CompileFailed."""
    tools = [toolchain.llvm(name) for name in ("mlir-opt", "mlir-translate", "opt", "llc")]
    compiler = toolchain.cxx_compiler()
    text = portable(module)
    support = _SUPPORT.replace("@UB@", str(_unified_buffer_bytes(module.text))) + instructions(text)
    key = content_key("hivm native", toolchain.LLVM, *_TO_LLVM_DIALECT, *_CXX, _HEADER.read_text(), support, text)
    return (cache or ArtefactCache()).get(key, ".so", lambda: _build(module.kernel, text, support, tools, compiler))


def _build(kernel: str, text: str, support: str, tools: list[Path], compiler: Path) -> bytes:
    mlir_opt, mlir_translate, opt, llc = tools
    with tempfile.TemporaryDirectory(prefix="cam-hivm-native-") as name:
        directory = Path(name)

        def run(stage: str, tool: Path, *arguments: str | Path) -> None:
            try:
                done = subprocess.run(
                    [tool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=directory, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise CompileFailed(kernel, f"{stage} ({_TIMEOUT_S} s)", "timeout", text) from error
            if done.returncode != 0:
                raise CompileFailed(kernel, stage, done.stderr or done.stdout, text)

        (directory / "in.mlir").write_text(text)
        (directory / "support.cpp").write_text(support)
        run(
            "mlir-opt on HIVM",
            mlir_opt,
            "in.mlir",
            "--allow-unregistered-dialect",
            *_TO_LLVM_DIALECT,
            "-o",
            "llvm.mlir",
        )
        run("mlir-translate", mlir_translate, "--mlir-to-llvmir", "llvm.mlir", "-o", "kernel.ll")
        (directory / "kernel.ll").write_text(native.one_pointer_cast((directory / "kernel.ll").read_text()))
        run("opt", opt, *native.OPT, "kernel.ll", "-o", "kernel.bc")
        run("llc", llc, *native.LLC, "kernel.bc", "-o", "kernel.o")
        run("instructions", compiler, *_CXX, f"-I{_HEADER.parent}", "kernel.o", "support.cpp", "-o", "kernel.so")
        return (directory / "kernel.so").read_bytes()


def _unified_buffer_bytes(text: str) -> int:
    size = re.search(r'"UB_SIZE", (\d+)', text)
    if size is None:
        raise CompileFailed("?", "reading HIVM", "no UB_SIZE", text)
    return int(size.group(1)) // 8
