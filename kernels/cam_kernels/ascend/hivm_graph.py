"""Reads final HIVM text into a control-flow graph, so that rules about order can be decided on all paths.

A2 and A3 keep structured loops (scf.for, scf.while, scf.if), 950 has blocks and branches (cf.br, cf.cond_br): both
become basic blocks here. Only what the rules need is understood: results, operands, regions, branches. A line that
opens a region of an unknown kind is an error, so a new compiler version cannot slip past the checks unread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from cam_kernels.ascend.errors import AscendError

_NAME = re.compile(r"%[A-Za-z0-9_$.-]+")
_RESULTS = re.compile(r"^((?:%[\w-]+(?::\d+)?(?:, )?)+) = ")
_FUNCTION = re.compile(r"^func\.func (?:private )?@(\w+)\((.*)")
_BINDING = re.compile(r"(%[\w-]+) = (%[\w#-]+)")
_TARGET = re.compile(r"\^(bb\d+)(?:\(([^)]*)\))?")


class UnreadableHivm(AscendError):
    """The text has a construct that the reader does not know."""


@dataclass
class Op:
    """One line. Names are unique in the function: the text reuses them in neighbouring regions."""

    line: int
    text: str
    results: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def callee(self) -> str | None:
        match = re.search(r"\bcall @(\w+)\(", self.text)
        return match.group(1) if match else None


@dataclass
class Block:
    """Ops that run one after the other; then one of the successors, by `condition` when there are two."""

    ops: list[Op] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)
    condition: str | None = None


@dataclass
class Function:
    """A device function."""

    name: str
    arguments: tuple[str, ...]
    blocks: list[Block]
    flows: dict[str, set[str]]
    """For each name, the names it is computed from: operands of its op, or what branches and yields pass to it."""
    definitions: dict[str, Op]

    def ops(self) -> Iterator[Op]:
        for block in self.blocks:
            yield from block.ops

    def roots(self, name: str, through: tuple[str, ...]) -> set[str]:
        """Where a value comes from: follow `flows` through ops whose text has one of the given op names (and through
        block arguments) until a name that is defined by something else."""
        found, seen, todo = set(), set(), [name]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            op = self.definitions.get(current)
            passes = op is None and current in self.flows
            if passes:
                todo.extend(self.flows[current])
            elif op is not None and _operation(op.text).startswith(through):
                # Of a select, the values and not the condition.
                todo.extend(op.operands[1:] if ".select" in op.text else op.operands)
            else:
                found.add(current)
        return found


def _operation(text: str) -> str:
    """The name of a line's operation with what follows it."""
    return _RESULTS.sub("", text)


def read_functions(text: str) -> list[Function]:
    """All device entry functions of a module. Raises UnreadableHivm."""
    lines = text.splitlines()
    functions = []
    index = 0
    while index < len(lines):
        stripped = lines[index].strip()
        if stripped.startswith("func.func") and stripped.endswith("{") and "hacc.entry" in stripped:
            reader = _Reader(lines, index)
            functions.append(reader.function())
            index = reader.position
        index += 1
    if not functions:
        raise UnreadableHivm("no function with the attribute hacc.entry")
    return functions


class _Reader:
    """Recursive descent over the lines of one function."""

    def __init__(self, lines: list[str], start: int) -> None:
        self._lines = lines
        self.position = start
        self._blocks: list[Block] = [Block()]
        self._current = 0
        self._flows: dict[str, set[str]] = {}
        self._definitions: dict[str, Op] = {}
        self._scopes: list[dict[str, str]] = [{}]
        self._counter = 0
        self._labels: dict[str, int] = {}
        self._label_arguments: dict[str, list[str]] = {}
        self._seen_labels: list[str] = []
        self._passed: list[tuple[str, list[str]]] = []

    def function(self) -> Function:
        header = self._lines[self.position].strip()
        match = _FUNCTION.match(header)
        if match is None:
            raise UnreadableHivm(f"line {self.position + 1}: not a function: {header[:80]}")
        arguments = tuple(self._define(name) for name in re.findall(r"(%arg\d+): ", match.group(2)))
        self.position += 1
        self._region(labels=True)
        for label, passed in self._passed:
            for argument, value in zip(self._label_arguments.get(label, []), passed, strict=False):
                self._flows.setdefault(argument, set()).add(value)
        for block in self._blocks:
            block.successors = [s if s >= 0 else self._labels[self._seen_labels[-s - 1]] for s in block.successors]
        return Function(match.group(1), arguments, self._blocks, self._flows, self._definitions)

    # --- names -------------------------------------------------------------------------------------------------

    def _define(self, name: str) -> str:
        self._counter += 1
        unique = f"{name}.{self._counter}"
        self._scopes[-1][name] = unique
        return unique

    def _resolve(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise UnreadableHivm(f"line {self.position + 1}: {name} is used before it is defined")

    def _names_in(self, text: str) -> tuple[str, ...]:
        return tuple(self._resolve(name) for name in _NAME.findall(text))

    # --- blocks ------------------------------------------------------------------------------------------------

    def _new_block(self) -> int:
        self._blocks.append(Block())
        return len(self._blocks) - 1

    def _go(self, block: int) -> None:
        self._current = block

    def _link(self, source: int, *targets: int, condition: str | None = None) -> None:
        self._blocks[source].successors = list(targets)
        self._blocks[source].condition = condition

    def _label(self, name: str) -> int:
        """A successor known by its label only, as a negative number; resolved when the function has been read."""
        if name not in self._seen_labels:
            self._seen_labels.append(name)
        return -1 - self._seen_labels.index(name)

    # --- lines -------------------------------------------------------------------------------------------------

    def _region(self, *, labels: bool = False, arguments: list[str] | None = None) -> tuple[str, tuple[str, ...]]:
        """Read until the brace that closes the region; returns the text after it and what its yield passes."""
        passed: tuple[str, ...] = ()
        while True:
            text = self._lines[self.position].strip()
            if text.startswith("}"):
                return text[1:].strip(), passed
            if text.startswith("^"):
                self._block_header(text, labels, arguments or [])
            elif text.startswith(("scf.yield", "scf.condition", "scf.reduce")):
                passed = self._names_in(text.split(" : ")[0])
            elif text.endswith("{") and not text.startswith("//"):
                self._nested(text)
            elif text and not text.startswith("//"):
                self._plain(text)
            self.position += 1

    def _block_header(self, text: str, labels: bool, arguments: list[str]) -> None:
        names = [self._define(name) for name in re.findall(r"(%[\w-]+): ", text)]
        if not labels:
            # The first block of a scf region: its arguments are what the region's op passes.
            for name, value in zip(names, arguments, strict=False):
                self._flows.setdefault(name, set()).add(value)
            return
        label = text[1:].split("(")[0].split(":")[0]
        block = self._new_block()
        self._labels[label] = block
        self._label_arguments[label] = names
        self._go(block)

    def _plain(self, text: str) -> None:
        match = _RESULTS.match(text)
        body = text[match.end() :] if match else text
        if body.startswith("cf."):
            self._branch(body)
            return
        operands = self._names_in(body)
        names = [part.split(":")[0] for part in match.group(1).split(", ")] if match else []
        results = tuple(self._define(name) for name in names)
        op = Op(self.position + 1, text, results, operands)
        self._blocks[self._current].ops.append(op)
        for result in results:
            self._definitions[result] = op
            self._flows.setdefault(result, set()).update(operands)

    def _branch(self, body: str) -> None:
        targets = _TARGET.findall(body)
        condition = None
        if body.startswith("cf.cond_br"):
            condition = self._names_in(body.split(",")[0])[0]
        elif not body.startswith("cf.br"):
            raise UnreadableHivm(f"line {self.position + 1}: unknown branch {body[:60]}")
        for label, passed in targets:
            self._passed.append((label, list(self._names_in(passed.split(":")[0]))))
        self._link(self._current, *(self._label(label) for label, _ in targets), condition=condition)

    def _nested(self, text: str) -> None:
        match = _RESULTS.match(text)
        body = text[match.end() :] if match else text
        names = [part.split(":")[0] for part in match.group(1).split(", ")] if match else []
        if body.startswith("scf.for"):
            passed = self._for(body)
        elif body.startswith("scf.while"):
            passed = self._while(body)
        elif body.startswith("scf.if"):
            passed = self._if(body)
        else:
            raise UnreadableHivm(f"line {self.position + 1}: unknown region {body[:80]}")
        for name in names:
            result = self._define(name)
            # Which of several results gets which value does not matter to the rules.
            self._flows.setdefault(result, set()).update(passed)

    def _enter(self) -> None:
        self._scopes.append({})
        self.position += 1

    def _for(self, body: str) -> set[str]:
        head, _, rest = body.partition("iter_args(")
        bounds = self._names_in(head.split(" = ", 1)[1])
        bindings = [(name, self._resolve(value.split("#")[0])) for name, value in _BINDING.findall(rest.split("->")[0])]
        test, inside, after = self._new_block(), self._new_block(), self._new_block()
        self._link(self._current, test)
        self._scopes.append({})
        counter = self._define(body.split()[1])
        self._flows[counter] = set(bounds)
        arguments = [self._define(name) for name, _ in bindings]
        for argument, (_, value) in zip(arguments, bindings, strict=True):
            self._flows.setdefault(argument, set()).add(value)
        self._link(test, inside, after, condition=counter)
        self._go(inside)
        self.position += 1
        _, passed = self._region()
        for argument, value in zip(arguments, passed, strict=True):
            self._flows[argument].add(value)
        self._link(self._current, test)
        self._scopes.pop()
        self._go(after)
        return set(arguments)

    def _while(self, body: str) -> set[str]:
        bindings = [
            (name, self._resolve(value.split("#")[0])) for name, value in _BINDING.findall(body.split(" : ")[0])
        ]
        before, after = self._new_block(), self._new_block()
        self._link(self._current, before)
        self._scopes.append({})
        arguments = [self._define(name) for name, _ in bindings]
        for argument, (_, value) in zip(arguments, bindings, strict=True):
            self._flows.setdefault(argument, set()).add(value)
        self._go(before)
        self.position += 1
        follows, condition = self._region()
        if not follows.startswith("do {"):
            raise UnreadableHivm(f"line {self.position + 1}: scf.while without do")
        inside = self._new_block()
        self._link(self._current, inside, after, condition=condition[0])
        self._scopes[-1] = {}
        self._go(inside)
        self.position += 1
        _, passed = self._region(arguments=list(condition[1:]))
        for argument, value in zip(arguments, passed, strict=True):
            self._flows[argument].add(value)
        self._link(self._current, before)
        self._scopes.pop()
        self._go(after)
        return set(condition[1:])

    def _if(self, body: str) -> set[str]:
        condition = self._names_in(body.split("->")[0].split("{")[0])[0]
        start, then, after = self._current, self._new_block(), self._new_block()
        self._enter()
        self._go(then)
        follows, passed = self._region()
        values = set(passed)
        self._link(self._current, after)
        otherwise = after
        if follows.startswith("else"):
            otherwise = self._new_block()
            self._scopes[-1] = {}
            self._go(otherwise)
            self.position += 1
            _, passed = self._region()
            values |= set(passed)
            self._link(self._current, after)
        self._scopes.pop()
        self._link(start, then, otherwise, condition=condition)
        self._go(after)
        return values


def loops(blocks: list[Block]) -> list[set[int]]:
    """Every set of blocks that can reach each other: the loops, nested ones inside their outermost loop as well.

    Found per back edge, so that an inner loop is a set of its own.
    """
    dominators = _dominators(blocks)
    predecessors: dict[int, set[int]] = {i: set() for i in range(len(blocks))}
    for index, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].add(index)
    found = []
    for index, block in enumerate(blocks):
        for head in block.successors:
            if head in dominators[index]:
                members, todo = {head}, [index]
                while todo:
                    current = todo.pop()
                    if current not in members:
                        members.add(current)
                        todo.extend(predecessors[current])
                found.append(members)
    return found


def _dominators(blocks: list[Block]) -> list[set[int]]:
    everything = set(range(len(blocks)))
    result = [everything.copy() for _ in blocks]
    result[0] = {0}
    changed = True
    while changed:
        changed = False
        incoming: list[set[int]] = [everything.copy() for _ in blocks]
        for index, block in enumerate(blocks):
            for successor in block.successors:
                incoming[successor] &= result[index]
        for index in range(1, len(blocks)):
            new = incoming[index] | {index}
            if new != result[index]:
                result[index], changed = new, True
    return result
