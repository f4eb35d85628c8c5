"""Rules that every kernel must keep in its final HIVM, for all paths through it.

What they catch are the mistakes that a CPU cannot show: it has no pipes, no data cache per core and no unified buffer.

    barrier          a full pipe barrier stands between every store to a peer and every flag store after it
    flag-width       a flag fills at least 32 bytes, the granule of a copy
    polling          a loop that waits for memory reads it by vector copies, never by scalar loads through the data
                     cache, and has a full barrier between two looks
    scalar-store     nothing is stored to global memory by scalar stores: the data cache writes back whole lines, and
                     two cores that own words of one line overwrite each other
    paired-sync      every set_flag between two pipes has its wait_flag on every path
    ub               the tiles fit the unified buffer, and double buffering was not given up for it
    integer-division no integer is divided as fp32, which is what the compiler makes of a division of int32 vectors
    element-wise     no vector access has fallen apart into a loop over elements
    missing          what the kernel declares to do is there: the compiler deletes, for one, a waiting loop that has
                     no barrier

Limits: the rules read text of the pinned compiler version. They see order within one core; that the interconnect keeps
the order which the barrier asks for, they cannot see.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cam_kernels.ascend.hivm import HivmModule
from cam_kernels.ascend.hivm_graph import Function, Op, loops, read_functions

_FULL_BARRIER = "hivm.hir.pipe_barrier[<PIPE_ALL>]"
# Ops that only rename or slice memory.
_VIEWS = (
    "memref.cast",
    "memref.reinterpret_cast",
    "memref.subview",
    "memref.extract_strided_metadata",
    "memref.collapse_shape",
    "memref.expand_shape",
    "arith.select",
    "llvm.select",
    "builtin.unrealized_conversion_cast",
    "hivm.hir.bitcast",
)
_SYNC = re.compile(r"hivm\.hir\.(set|wait)_flag\[<PIPE_(\w+)>, <PIPE_(\w+)>")
# The matrix multiply is one call that takes event numbers and does the rest of the pairing itself: it waits for both
# operands (MTE2 -> MTE1) and gives both buffers back (MTE1 -> MTE2).
_MACRO_SYNC = {"mma_tile": (("MTE2 -> MTE1", -2), ("MTE1 -> MTE2", 2))}
_SIZES = re.compile(r"sizes: \[([^\]]*)\]")
_UB_CAST = re.compile(r"hivm\.hir\.pointer_cast\((%[^)]+)\).* : memref<([^,>]+), #hivm\.address_space<ub>>")
_CONSTANT = re.compile(r"^(%[\w-]+) = (?:arith\.constant (-?\d+) : i64|llvm\.mlir\.constant\((-?\d+) : i64\))")
_UB_SIZE = re.compile(r'"UB_SIZE", (\d+)')
_ELEMENT_BITS = {"bf16": 16, "f16": 16, "f32": 32, "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}
FLAG_BYTES = 32


@dataclass(frozen=True)
class Finding:
    """One broken rule. `line` counts in the HIVM text."""

    rule: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.rule} (line {self.line}): {self.message}"


@dataclass(frozen=True)
class Expectation:
    """What a kernel does, so that the checker knows when it has recognised nothing of it."""

    sends: bool = False
    """Stores payload through peers' addresses."""
    flags: bool = False
    """Stores flags at peers."""
    waits: bool = False
    """Has a polling loop."""


@dataclass(frozen=True)
class Report:
    """What was found in one module, and what was recognised."""

    findings: tuple[Finding, ...]
    peer_stores: int
    flag_stores: int
    polling_loops: int
    ub_bytes: int
    ub_limit: int


def check(module: HivmModule, expected: Expectation) -> Report:
    """Apply all rules. Raises UnreadableHivm when the text is not understood."""
    findings: list[Finding] = []
    payloads = flags = polls = 0
    for function in read_functions(module.text):
        stores = _peer_stores(function)
        flag_ops = {op.line for op, is_flag in stores if is_flag}
        payload_ops = {op.line for op, is_flag in stores if not is_flag}
        payloads, flags = payloads + len(payload_ops), flags + len(flag_ops)
        findings += _check_barriers(function, payload_ops, flag_ops)
        findings += [_narrow(function, op) for op, is_flag in stores if is_flag and _bytes(function, op) < FLAG_BYTES]
        waiting, wrong = _check_polling(function)
        polls += waiting
        findings += wrong
        findings += _check_scalar_stores(function)
        findings += _check_sync(function)
        findings += _check_division(function)
        findings += _check_element_wise(function)
    for what, wanted, seen in (
        ("a store to a peer", expected.sends, payloads),
        ("a flag store", expected.flags, flags),
        ("a waiting loop", expected.waits, polls),
    ):
        if wanted != (seen > 0):
            findings.append(Finding("missing", 1, f"{what} is {'' if wanted else 'not '}expected, {seen} are there"))
    used, limit, line = _unified_buffer(module.text)
    if used > limit:
        findings.append(Finding("ub", line, f"{used} bytes of {limit} are used"))
    if module.cramped:
        findings.append(Finding("ub", 1, "fits only after the compiler gave up double buffering or code motion"))
    return Report(tuple(findings), payloads, flags, polls, used, limit)


def _peer_stores(function: Function) -> list[tuple[Op, bool]]:
    """Stores through an address that was read from memory, and whether each is a flag: one value, which is an argument
    of the kernel, in all lanes."""
    writers: dict[str, list[Op]] = {}
    for op in function.ops():
        if op.callee and not op.callee.startswith("store_ubuf_to_gm"):
            for operand in op.operands:
                for root in function.roots(operand, _VIEWS):
                    writers.setdefault(root, []).append(op)
    found = []
    for op in function.ops():
        if op.callee and op.callee.startswith("store_ubuf_to_gm"):
            source, target = op.operands[:2]
            if any(_is_peer(function, root) for root in function.roots(target, _VIEWS)):
                sources = function.roots(source, _VIEWS)
                makers = [w for root in sources for w in writers.get(root, [])]
                is_flag = bool(makers) and all(_splats_argument(function, w, sources) for w in makers)
                found.append((op, is_flag and "int32" in str(op.callee)))
    return found


def _is_peer(function: Function, root: str) -> bool:
    op = function.definitions.get(root)
    return op is not None and "hivm.hir.pointer_cast" in op.text and "address_space<gm>" in op.text


def _splats_argument(function: Function, op: Op, sources: set[str]) -> bool:
    """Whether a call fills its buffer from nothing but one argument of the kernel and constants."""
    others = [o for o in op.operands if not function.roots(o, _VIEWS) & sources]
    constant = ("arith.constant", "llvm.mlir.constant")
    values = [
        o
        for o in others
        if not (o in function.definitions and any(c in function.definitions[o].text for c in constant))
    ]
    return len(values) == 1 and values[0] in function.arguments


def _bytes(function: Function, op: Op) -> int:
    """Bytes a store writes; a size not known before run time counts as 0."""
    for result in _chain(function, op.operands[1]):
        match = _SIZES.search(function.definitions[result].text)
        if match:
            total = 4
            for size in match.group(1).split(","):
                total *= int(size) if size.strip().isdigit() else 0
            return total
    return 0


def _chain(function: Function, name: str) -> list[str]:
    """The name and the views it is made of, the outermost first."""
    chain = []
    while name in function.definitions:
        chain.append(name)
        op = function.definitions[name]
        if not op.operands or "hivm.hir.pointer_cast" in op.text:
            break
        name = op.operands[0]
    return chain


def _narrow(function: Function, op: Op) -> Finding:
    return Finding("flag-width", op.line, f"a flag of {_bytes(function, op)} bytes, at least {FLAG_BYTES} are needed")


def _check_barriers(function: Function, payloads: set[int], flags: set[int]) -> list[Finding]:
    """Forward data flow: which stores to peers have no full barrier after them yet."""
    entering: list[set[int] | None] = [None] * len(function.blocks)
    entering[0] = set()
    todo, wrong = [0], {}
    while todo:
        index = todo.pop()
        open_stores = set(entering[index] or ())
        for op in function.blocks[index].ops:
            if _FULL_BARRIER in op.text:
                open_stores.clear()
            elif op.line in flags and open_stores:
                wrong[op.line] = Finding(
                    "barrier",
                    op.line,
                    f"a flag is stored while the stores of lines {sorted(open_stores)} may be pending",
                )
            elif op.line in payloads:
                open_stores.add(op.line)
        for successor in function.blocks[index].successors:
            before = entering[successor]
            if before is None or not open_stores <= before:
                entering[successor] = (before or set()) | open_stores
                todo.append(successor)
    return list(wrong.values())


def _check_polling(function: Function) -> tuple[int, list[Finding]]:
    """Loops whose end depends on memory that is read inside them."""
    findings, count = [], 0
    for members in loops(function.blocks):
        inside = {result for index in members for op in function.blocks[index].ops for result in op.results}
        reads: list[Op] = []
        for index in members:
            block = function.blocks[index]
            if block.condition and any(s not in members for s in block.successors):
                reads += _memory_reads(function, block.condition, inside)
        if not reads:
            continue
        count += 1
        ops = [op for index in members for op in function.blocks[index].ops]
        for op in reads:
            if "address_space<gm>" in op.text:
                findings.append(Finding("polling", op.line, "a loop waits for a scalar load from global memory"))
        if not any((op.callee or "").startswith("load_gm_to_ubuf") for op in ops):
            findings.append(Finding("polling", reads[0].line, "a loop waits for memory that it does not copy anew"))
        if not any(_FULL_BARRIER in op.text for op in ops):
            findings.append(Finding("polling", reads[0].line, "no full barrier between two looks of a waiting loop"))
    return count, findings


def _memory_reads(function: Function, name: str, inside: set[str]) -> list[Op]:
    """Loads inside the loop, other than of loop bookkeeping on the stack, that a value depends on."""
    found, seen, todo = [], set(), [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        op = function.definitions.get(current)
        if op is not None and current not in inside:
            continue
        if op is not None and "memref.load" in op.text:
            if "address_space" in op.text:
                found.append(op)
            continue
        todo.extend(function.flows.get(current, ()))
    return found


def _check_scalar_stores(function: Function) -> list[Finding]:
    return [
        Finding("scalar-store", op.line, "a scalar store to global memory")
        for op in function.ops()
        if re.search(r"(memref|llvm)\.store .*address_space<gm>", op.text)
    ]


def _check_element_wise(function: Function) -> list[Finding]:
    return [
        Finding("element-wise", op.line, "a vector access has become a loop over elements")
        for op in function.ops()
        if "DiscreteMemAccess" in op.text
    ]


def _check_sync(function: Function) -> list[Finding]:
    """Outstanding flags between each pair of pipes: never negative, the same on all ways to a block, none at the end.

    Event numbers chosen at run time (double buffers) are counted with those of the same pair of pipes.
    """
    entering: list[dict[str, int] | None] = [None] * len(function.blocks)
    entering[0] = {}
    todo, wrong = [0], {}
    while todo:
        index = todo.pop()
        state = dict(entering[index] or {})
        for op in function.blocks[index].ops:
            for pair, change in _sync_changes(op):
                state[pair] = state.get(pair, 0) + change
                if state[pair] < 0:
                    wrong[op.line] = Finding("paired-sync", op.line, f"{pair}: a wait that nothing has set")
                    state[pair] = 0
        state = {pair: number for pair, number in state.items() if number}
        last = function.blocks[index].ops[-1] if function.blocks[index].ops else None
        if not function.blocks[index].successors and state:
            line = last.line if last else 0
            wrong[line] = Finding("paired-sync", line, f"flags are set and never waited for: {state}")
        for successor in function.blocks[index].successors:
            before = entering[successor]
            if before is None:
                entering[successor] = state
                todo.append(successor)
            elif before != state:
                line = last.line if last else 0
                wrong[line] = Finding("paired-sync", line, f"paths meet with different flags set: {before} and {state}")
    return list(wrong.values())


def _sync_changes(op: Op) -> list[tuple[str, int]]:
    """How an op changes the number of outstanding flags, by pair of pipes."""
    match = _SYNC.search(op.text)
    if match:
        return [(f"{match.group(2)} -> {match.group(3)}", 1 if match.group(1) == "set" else -1)]
    callee = op.callee or ""
    return [change for macro, changes in _MACRO_SYNC.items() if callee.startswith(macro) for change in changes]


def _check_division(function: Function) -> list[Finding]:
    """int32 -> fp32, divided, -> int32 again, on buffers that only these three write."""
    made: dict[str, str] = {}
    findings = []
    for op in function.ops():
        callee = op.callee or ""
        roots = [function.roots(operand, _VIEWS) for operand in op.operands]
        if callee.startswith("vcast_int32_t_to_float"):
            made.update(dict.fromkeys(roots[1], "integer"))
        elif callee.startswith("vdiv"):
            if any(made.get(root) == "integer" for group in roots for root in group):
                target = roots[2] if len(roots) > 2 else roots[-1]
                made.update(dict.fromkeys(target, "quotient"))
        elif callee.startswith("vcast_float_to_int32") and any(made.get(root) == "quotient" for root in roots[0]):
            findings.append(
                Finding("integer-division", op.line, "int32 vectors are divided as fp32: inexact above 2^24")
            )
        elif callee:
            for group in roots[1:]:
                for root in group:
                    made.pop(root, None)
    return findings


def _unified_buffer(text: str) -> tuple[int, int, int]:
    """Bytes of UB up to the end of the highest buffer, the target's UB, and the line of that buffer."""
    limit = _UB_SIZE.search(text)
    constants: dict[str, int] = {}
    highest, where = 0, 1
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        constant = _CONSTANT.match(stripped)
        if constant:
            constants[constant.group(1)] = int(constant.group(2) or constant.group(3))
        cast = _UB_CAST.search(stripped)
        addresses = [constants[name] for name in cast.group(1).split(", ") if name in constants] if cast else []
        if cast and addresses:
            *sizes, element = cast.group(2).split("x")
            bits = _ELEMENT_BITS.get(element, 64)
            for size in sizes:
                bits *= int(size) if size.isdigit() else 1
            end = max(addresses) + -(-bits // 8)
            if end > highest:
                highest, where = end, number
    return highest, int(limit.group(1)) // 8 if limit else 0, where
