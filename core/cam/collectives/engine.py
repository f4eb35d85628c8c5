"""Collectives on the CPU tensors of one cam.Group.

Each method checks its arguments, raises InputError before anything is sent, and gives the call that does the work. So
a caller can run it at once or hand it to the progress thread. Tensors may be non-contiguous, empty or 0-dim; where
a tensor is not one run of memory the kernels work on a copy.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from cam.collectives.reductions import DTYPES, Reduction, reducible
from cam.errors import InputError
from cam.group import Group

Timeout = float | timedelta | None
Call = Callable[[], None]


class Engine:
    """algorithm: "auto", "flat" or "direct"; piece: bytes that a rank stages at once, 0 = chosen (see
    kernels/cpu/collectives.h). All ranks must have the same.
    """

    __slots__ = ("_group", "_rank", "_size", "algorithm", "piece")

    def __init__(self, group: Group, *, algorithm: str = "auto", piece: int = 0) -> None:
        self._group = group
        self._rank, self._size = group.rank, group.size
        self.algorithm, self.piece = algorithm, piece

    # --- reductions -------------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Sequence[torch.Tensor], op: Reduction, timeout: Timeout = None) -> Call:
        """In place, of one dtype; several tensors as if they were one."""
        reals, dtype = _to_reduce("all_reduce", tensors, op)

        def run() -> None:
            outs = [_Out(tensor) for tensor in reals]
            spans = [(out.pointer, out.pointer, out.elements) for out in outs]
            self.call("all_reduce", timeout, spans, dtype, op.name, op.factor)
            for out in outs:
                out.finish()

        return run

    def reduce(self, tensors: Sequence[torch.Tensor], root: int, op: Reduction, timeout: Timeout = None) -> Call:
        """In place on the root; elsewhere the tensors keep their values."""
        reals, dtype = _to_reduce("reduce", tensors, op)
        self._check_root("reduce", root)
        receives = root == self._rank

        def run() -> None:
            outs = [_Out(tensor) for tensor in reals]
            spans = [(out.pointer, out.pointer if receives else 0, out.elements) for out in outs]
            self.call("reduce", timeout, spans, dtype, op.name, op.factor, root)
            if receives:
                for out in outs:
                    out.finish()

        return run

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, timeout: Timeout = None
    ) -> Call:
        """inputs[r]: this rank's contribution to the output of rank r, whose size inputs[r] has on every rank."""
        self._one_per_rank("reduce_scatter", inputs)
        reals, dtype = _to_reduce("reduce_scatter", [output, *inputs], op)
        real_output, parts = reals[0], reals[1:]
        _same_size("reduce_scatter", parts[self._rank], real_output)

        def run() -> None:
            ins, out = [_plain(part) for part in parts], _Out(real_output, keep=False)
            self.call(
                "reduce_scatter",
                timeout,
                [part.data_ptr() for part in ins],
                [part.numel() for part in ins],
                out.pointer,
                dtype,
                op.name,
                op.factor,
            )
            out.finish()

        return run

    def reduce_scatter_single(
        self, output: torch.Tensor, own: torch.Tensor, op: Reduction, timeout: Timeout = None
    ) -> Call:
        """own: the contributions to all ranks one after another."""
        reals, dtype = _to_reduce("reduce_scatter", [output, own], op)
        real_output, whole = reals
        elements = real_output.numel()
        if whole.numel() != elements * self._size:
            raise InputError(
                f"reduce_scatter: the input has {whole.numel()} elements, {self._size} ranks x {elements} are needed"
            )

        def run() -> None:
            source, out = _plain(whole), _Out(real_output, keep=False)
            base, step = source.data_ptr(), elements * source.element_size()
            parts = [base + step * rank for rank in range(self._size)]
            sizes = [elements] * self._size
            self.call("reduce_scatter", timeout, parts, sizes, out.pointer, dtype, op.name, op.factor)
            out.finish()

        return run

    # --- moves ------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int, timeout: Timeout = None) -> Call:
        self._check_root("broadcast", root)
        _check_dense("broadcast", tensors)
        receives = root != self._rank

        def run() -> None:
            for tensor in tensors:
                out = _Out(tensor, keep=not receives)
                self.call("broadcast", timeout, out.pointer, out.nbytes, root)
                if receives:
                    out.finish()

        return run

    def all_gather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor, timeout: Timeout = None) -> Call:
        """outputs[r]: what rank r gave; sizes may differ between ranks."""
        self._one_per_rank("all_gather", outputs)
        _check_dense("all_gather", [*outputs, own])
        _same_dtype("all_gather", [*outputs, own])
        _same_size("all_gather", own, outputs[self._rank])

        def run() -> None:
            source, outs = _plain(own), [_Out(each, keep=False) for each in outputs]
            sizes = [out.nbytes for out in outs]
            self.call("all_gather", timeout, source.data_ptr(), sizes, [out.pointer for out in outs])
            for out in outs:
                out.finish()

        return run

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, timeout: Timeout = None) -> Call:
        """output: what all ranks gave, one after another."""
        _check_dense("all_gather", [output, own])
        _same_dtype("all_gather", [output, own])
        if output.numel() != own.numel() * self._size:
            raise InputError(
                f"all_gather: the output has {output.numel()} elements, {self._size} ranks x {own.numel()} are needed"
            )

        def run() -> None:
            source, out = _plain(own), _Out(output, keep=False)
            step = source.numel() * source.element_size()
            outs = [out.pointer + step * rank for rank in range(self._size)]
            self.call("all_gather", timeout, source.data_ptr(), [step] * self._size, outs)
            out.finish()

        return run

    def gather(self, outputs: Sequence[torch.Tensor], own: torch.Tensor, root: int, timeout: Timeout = None) -> Call:
        """outputs: on the root as in all_gather, elsewhere empty."""
        self._check_root("gather", root)
        receives = root == self._rank
        if receives:
            self._one_per_rank("gather", outputs)
            _same_dtype("gather", [*outputs, own])
            for each in outputs:
                _same_size("gather", own, each)
        elif outputs:
            raise InputError(f"gather: outputs belong to the root (rank {root}) only")
        _check_dense("gather", [*outputs, own])

        def run() -> None:
            source, outs = _plain(own), [_Out(each, keep=False) for each in outputs]
            sizes = [source.numel() * source.element_size()] * self._size
            self.call("gather", timeout, source.data_ptr(), sizes, [out.pointer for out in outs], root)
            for out in outs:
                out.finish()

        return run

    def scatter(self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, timeout: Timeout = None) -> Call:
        """inputs[r]: what rank r gets; only on the root, elsewhere empty."""
        self._check_root("scatter", root)
        if root == self._rank:
            self._one_per_rank("scatter", inputs)
            _same_dtype("scatter", [output, *inputs])
        elif inputs:
            raise InputError(f"scatter: inputs belong to the root (rank {root}) only")
        _check_dense("scatter", [output, *inputs])

        def run() -> None:
            ins, out = [_plain(each) for each in inputs], _Out(output, keep=False)
            pointers, sizes = [each.data_ptr() for each in ins], [_nbytes(each) for each in ins]
            self.call("scatter", timeout, pointers, sizes, out.pointer, out.nbytes, root)
            out.finish()

        return run

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout: Timeout = None
    ) -> Call:
        """inputs[r] goes to rank r, outputs[r] comes from there. Sizes must agree pairwise."""
        self._one_per_rank("all_to_all", outputs)
        self._one_per_rank("all_to_all", inputs)
        _check_dense("all_to_all", [*outputs, *inputs])
        _same_dtype("all_to_all", [*outputs, *inputs])

        def run() -> None:
            ins, outs = [_plain(each) for each in inputs], [_Out(each, keep=False) for each in outputs]
            self.call(
                "all_to_all",
                timeout,
                [each.data_ptr() for each in ins],
                [_nbytes(each) for each in ins],
                [out.pointer for out in outs],
                [out.nbytes for out in outs],
            )
            for out in outs:
                out.finish()

        return run

    def all_to_all_single(
        self,
        output: torch.Tensor,
        own: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        timeout: Timeout = None,
    ) -> Call:
        """Splits count rows along dimension 0, one entry per rank; an empty list means equal parts."""
        _check_dense("all_to_all", [output, own])
        _same_dtype("all_to_all", [output, own])
        out_sizes = self._split_bytes("output", output, output_splits)
        in_sizes = self._split_bytes("input", own, input_splits)

        def run() -> None:
            source, out = _plain(own), _Out(output, keep=False)
            ins, outs = _after_another(source.data_ptr(), in_sizes), _after_another(out.pointer, out_sizes)
            self.call("all_to_all", timeout, ins, in_sizes, outs, out_sizes)
            out.finish()

        return run

    def _split_bytes(self, name: str, tensor: torch.Tensor, splits: Sequence[int]) -> list[int]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._size:
                raise InputError(
                    f"all_to_all: the {name} has {rows} rows, which {self._size} ranks cannot share equally: "
                    f"give {name}_split_sizes"
                )
            return [_nbytes(tensor) // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise InputError(
                f"all_to_all: {name}_split_sizes must be {self._size} numbers >= 0 that add up to the {rows} rows "
                f"of the {name}, got {list(splits)}"
            )
        row = _nbytes(tensor) // rows if rows else 0
        return [row * count for count in splits]

    # --- what they share ----------------------------------------------------------------------------------------

    def call(self, name: str, timeout: Timeout, *arguments: Any) -> None:
        group = self._group
        group.call(name, getattr(group.endpoint, name), *arguments, self.algorithm, self.piece, timeout=timeout)

    def _one_per_rank(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) != self._size:
            raise InputError(f"{name}: one tensor per rank ({self._size}) is needed, got {len(tensors)}")

    def _check_root(self, name: str, root: int) -> None:
        if not 0 <= root < self._size:
            raise InputError(f"{name}: root must be a rank of the group (0..{self._size - 1}), got {root}")


class _Out:
    """Memory for a result: the tensor's own where that is one run of memory, else a copy that finish() writes back.

    keep: whether the copy needs the tensor's values.
    """

    __slots__ = ("_copy", "_target", "elements", "nbytes", "pointer")

    def __init__(self, tensor: torch.Tensor, keep: bool = True) -> None:
        self._target = tensor
        self._copy: torch.Tensor | None = None
        if _is_plain(tensor):
            memory = tensor
        else:
            memory = self._copy = (
                _plain(tensor) if keep else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            )
        self.pointer, self.elements = memory.data_ptr(), memory.numel()
        self.nbytes = self.elements * memory.element_size()

    def finish(self) -> None:
        if self._copy is not None:
            self._target.detach().copy_(self._copy)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in one run of memory."""
    if _is_plain(tensor):
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _after_another(base: int, sizes: Sequence[int]) -> list[int]:
    pointers = []
    for size in sizes:
        pointers.append(base)
        base += size
    return pointers


def _to_reduce(name: str, tensors: Sequence[torch.Tensor], op: Reduction) -> tuple[list[torch.Tensor], str]:
    """The tensors as real ones, and the kernels' name of their dtype."""
    _check_dense(name, tensors)
    _same_dtype(name, tensors)
    reals = [reducible(tensor, op) for tensor in tensors]
    return reals, DTYPES[reals[0].dtype]


def _check_dense(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise InputError(f"{name}: no tensor was given")
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise InputError(f"{name}: dense CPU tensors are needed, got {tensor.layout} on {tensor.device}")


def _same_dtype(name: str, tensors: Sequence[torch.Tensor]) -> None:
    dtype = tensors[0].dtype
    for tensor in tensors:
        if tensor.dtype is not dtype:
            raise InputError(f"{name}: all tensors must have one dtype, got {dtype} and {tensor.dtype}")


def _same_size(name: str, own: torch.Tensor, output: torch.Tensor) -> None:
    if own.numel() != output.numel():
        raise InputError(f"{name}: this rank's input has {own.numel()} elements, the output for it {output.numel()}")
