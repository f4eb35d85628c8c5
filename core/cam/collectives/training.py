"""CAM's training API: reductions of gradients, for torch tensors, NumPy arrays and anything else that speaks DLPack.

    group = cam.init(config_path="train.yaml")
    loss.backward()
    cam.all_reduce_batch([p.grad for p in model.parameters()], op="avg")

Every function is a collective of its group: all its ranks call it, in the same order, with the same shapes. Arrays are
reduced in place and in rank order, bf16 and fp16 in fp32 with one rounding; all ranks get the same bits.
"""

import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch

from cam import registry
from cam.collectives import subgroup
from cam.collectives.arrays import Memory, arrays_of, memory_of
from cam.collectives.buffers import Buffers
from cam.collectives.engine import Engine
from cam.collectives.reductions import Reduction, reduction
from cam.errors import InputError
from cam.group import Group

T = TypeVar("T")
Timeout = float | timedelta | None


def create_group(
    name: str,
    ranks: Sequence[int] | None = None,
    *,
    strategy: str = "auto",
    parent: Group | str | None = None,
    timeout: Timeout = None,
    **config_fields: Any,
) -> Group | None:
    """A group of some ranks of `parent` (default: the group "cam"), which its members call; None on others.

    ranks: in the order that becomes theirs; None means all. strategy: how reductions are done: "auto", "flat" (every
    rank reduces everything, in one round) or "direct" (each reduces its share). config_fields: of cam.Config, where
    they differ from the parent's.

    Raises InputError, ConfigError, and what cam.init raises.
    """
    return subgroup.create_group(
        name, ranks, strategy=strategy, parent=_group(parent), timeout=timeout, **config_fields
    )


def all_reduce(arrays: T, group: Group | str | None = None, op: Any = "sum", *, timeout: Timeout = None) -> T:
    """Reduces an array, or each array of an iterable, over the ranks, in place; returns its argument.

    group: a Group or the name of one; None is the group "cam". op: sum, avg, product, min, max, bit_and, bit_or,
    bit_xor, or a torch ReduceOp.

    Raises InputError, Mismatch, Timeout, PeerLost, OutOfWindowMemory, GroupAborted.
    """
    _Reducing(_group(group), arrays, reduction(op), timeout).run()
    return arrays


def all_reduce_batch(
    arrays: Iterable[Any], group: Group | str | None = None, op: Any = "sum", *, timeout: Timeout = None
) -> None:
    """Many arrays at once: those of one dtype go as if they were one, without a flattened copy.

    None among them (a parameter without a gradient) is left out, which must be the same ones on all ranks.
    """
    _Reducing(_group(group), list(arrays), reduction(op), timeout).run()


class Handle:
    """A reduction in flight; see all_reduce_async. Operations on one group keep the order in which they were begun."""

    __slots__ = ("_future",)

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._future.done()

    def wait(self) -> None:
        """Returns when the arrays are reduced; raises the reduction's error. May be called again."""
        self._future.result()


def all_reduce_async(
    arrays: Any, group: Group | str | None = None, op: Any = "sum", *, timeout: Timeout = None
) -> Handle:
    """As all_reduce, on a thread of the group: the caller computes on and does not touch the arrays until wait()."""
    joined = _group(group)
    return Handle(joined.submit(_Reducing(joined, arrays, reduction(op), timeout).run))


def wait(handles: Handle | Iterable[Handle]) -> None:
    """Waits for one reduction or several. Waits for all of them before it raises the first error."""
    errors = []
    for handle in [handles] if isinstance(handles, Handle) else list(handles):
        try:
            handle.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def broadcast(arrays: T, root: int = 0, group: Group | str | None = None, *, timeout: Timeout = None) -> T:
    """Gives all ranks the root's values, in place: to start training from the same parameters."""
    joined = _group(group)
    tensors, others = _split(arrays)
    if tensors:
        _engine(joined).broadcast(tensors, root, timeout)()
    if not 0 <= root < joined.size:
        raise InputError(f"broadcast: root must be a rank of the group (0..{joined.size - 1}), got {root}")
    for each in others:
        _engine(joined).call("broadcast", timeout, each.address, each.nbytes, root)
    return arrays


def buffers(group: Group | str | None = None) -> Buffers:
    """The group's training buffers (gradient, parameter, temporary), whose sizes the config gives."""
    joined = _group(group)
    found = _buffers.get(joined)
    if found is None:
        found = _buffers[joined] = Buffers(joined)
    return found


_buffers: "weakref.WeakKeyDictionary[Group, Buffers]" = weakref.WeakKeyDictionary()


class _Reducing:
    """Checked arguments of a reduction; run() does it."""

    __slots__ = ("_engine", "_op", "_others", "_tensors", "_timeout")

    def __init__(self, group: Group, arrays: Any, op: Reduction, timeout: Timeout) -> None:
        self._engine, self._op, self._timeout = _engine(group), op, timeout
        tensors, others = _split(arrays)
        self._tensors = [self._engine.all_reduce(each, op, timeout) for each in _by_dtype(tensors)]
        self._others: dict[str, list[Memory]] = {}
        for each in others:
            self._others.setdefault(each.dtype, []).append(each)

    def run(self) -> None:
        for call in self._tensors:
            call()
        for dtype, memories in self._others.items():
            spans = [(each.address, each.address, each.elements) for each in memories]
            self._engine.call("all_reduce", self._timeout, spans, dtype, self._op.name, self._op.factor)


def _group(group: Group | str | None) -> Group:
    if isinstance(group, Group):
        return group
    if group is None or isinstance(group, str):
        return registry.group(group or "cam")
    raise InputError(f"group must be a cam.Group or the name of one, got {type(group).__name__}")


def _engine(group: Group) -> Engine:
    return Engine(group, algorithm=group.config.collective_algorithm, piece=int(group.config.collective_piece))


def _split(arrays: Any) -> tuple[list[torch.Tensor], list[Memory]]:
    tensors, others = [], []
    for each in arrays_of(arrays):
        if isinstance(each, torch.Tensor):
            tensors.append(each)
        else:
            others.append(memory_of(each))
    return tensors, others


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
