"""What torch calls reductions and dtypes, as the kernels know them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cam.errors import InputError


@dataclass(frozen=True, slots=True)
class Reduction:
    """name: the kernels' name. factor: what premul_sum multiplies each rank's elements by."""

    name: str
    factor: float = 1.0


_NAMES = {
    "SUM": "sum",
    "AVG": "avg",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "bit_and",
    "BOR": "bit_or",
    "BXOR": "bit_xor",
}
_REDUCTIONS = {name: Reduction(native) for name, native in _NAMES.items()}
_BY_OP: dict[Any, Reduction] = {getattr(dist.ReduceOp, name): each for name, each in _REDUCTIONS.items()}
_WORDS = {native: each for each in _REDUCTIONS.values() for native in (each.name,)}

#: Of the dtypes, those that can be reduced.
DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_BITWISE = frozenset({"bit_and", "bit_or", "bit_xor"})
_LINEAR = frozenset({"sum", "avg", "premul_sum"})


def reduction(op: Any) -> Reduction:
    """The reduction of a torch ReduceOp, or of its name ("sum", "avg", "product", "min", ...). Raises InputError."""
    if isinstance(op, Reduction):
        return op
    if isinstance(op, str):
        found = _WORDS.get(op.lower()) or _REDUCTIONS.get(op.upper())
        if found is None:
            raise InputError(f"reduction {op!r} is not one of: {', '.join(_WORDS)}")
        return found
    kind = getattr(op, "op", op)
    known = _BY_OP.get(kind)
    if known is not None:
        return known
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, torch.Tensor):
            if factor.numel() != 1:
                raise InputError(f"PREMUL_SUM takes one factor, got a tensor of shape {tuple(factor.shape)}")
            factor = factor.item()
        return Reduction("premul_sum", float(factor))
    raise InputError(f"reduction {op!r} is not one of: {', '.join(_NAMES)}, PREMUL_SUM")


def reducible(tensor: torch.Tensor, op: Reduction) -> torch.Tensor:
    """The tensor, or its real view if it is complex. Raises InputError where the reduction has no meaning for it."""
    if tensor.is_complex():
        if op.name not in _LINEAR:
            raise InputError(f"{op.name} is not defined for {tensor.dtype}")
        return torch.view_as_real(tensor.resolve_conj())
    dtype = tensor.dtype
    if dtype not in DTYPES:
        raise InputError(f"{dtype} cannot be reduced; those that can: {', '.join(map(str, DTYPES))}, and complex")
    floating = dtype.is_floating_point
    if (floating and op.name in _BITWISE) or (not floating and op.name == "premul_sum"):
        raise InputError(f"{op.name} is not defined for {dtype}")
    if dtype is torch.bool and op.name == "avg":
        raise InputError("avg is not defined for torch.bool")
    return tensor
