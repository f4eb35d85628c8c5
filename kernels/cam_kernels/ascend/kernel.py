"""A Triton kernel with what it takes to compile it: the types of its arguments and its constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from cam_kernels.ascend.errors import LaunchError

Constant = int | bool | float

_TENSOR_TYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Variant:
    """One kernel with fixed argument types and constants: the unit of compilation."""

    kernel: Kernel
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]

    @property
    def name(self) -> str:
        return self.kernel.name

    def identity(self) -> tuple[str, ...]:
        """What the compiled form depends on, besides the tools. Triton's cache key hashes the kernel's source and
        that of every function it calls."""
        return (self.name, str(self.kernel.fn.cache_key), repr(self.types), repr(self.constants))

    def __str__(self) -> str:
        pointers = ",".join(t[1:] for _, t in self.types if t.startswith("*"))
        values = ",".join(f"{n}={v}" for n, v in self.constants)
        return f"{self.name}[{pointers}][{values}]"


class Kernel:
    """A triton.jit function of this package.

    Conventions all kernels here keep, so that one launcher serves them:
    - arguments come first, compile-time constants (tl.constexpr, UPPER CASE) last and are passed by keyword;
    - tensors are pointers to their first element; peers' memory comes as int64 tensors of addresses;
    - integer arguments are i32 unless listed in `wide`, floats are fp32.
    """

    def __init__(self, fn: Any, *, wide: tuple[str, ...] = ()) -> None:
        if not isinstance(fn, JITFunction):
            raise LaunchError(f"{fn!r} is not a triton.jit function")
        self.fn = fn
        self.name: str = fn.fn.__name__
        self.arguments = tuple(p.name for p in fn.params if not p.is_constexpr)
        self.constants = tuple(p.name for p in fn.params if p.is_constexpr)
        self.wide = frozenset(wide)
        self.__doc__ = fn.fn.__doc__

    def variant(self, types: Mapping[str, str], constants: Mapping[str, Constant]) -> Variant:
        """Fix types (by argument name: "*bf16", "i32", ...) and constants."""
        for what, given, expected in (
            ("arguments", types, self.arguments),
            ("constants", constants, self.constants),
        ):
            if set(given) != set(expected):
                raise LaunchError(f"kernel {self.name} has the {what} {list(expected)}, given {list(given)}")
        return Variant(
            self,
            tuple((name, types[name]) for name in self.arguments),
            tuple((name, constants[name]) for name in self.constants),
        )

    def variant_for(self, values: tuple[object, ...], constants: Mapping[str, Constant]) -> Variant:
        """The variant that a call with these argument values needs."""
        if len(values) != len(self.arguments):
            raise LaunchError(f"kernel {self.name} takes {len(self.arguments)} arguments, given {len(values)}")
        types = {name: self._type_of(name, value) for name, value in zip(self.arguments, values, strict=True)}
        return self.variant(types, constants)

    def _type_of(self, name: str, value: object) -> str:
        if isinstance(value, torch.Tensor):
            found = _TENSOR_TYPES.get(value.dtype)
            if found is None:
                allowed = sorted(str(d) for d in _TENSOR_TYPES)
                raise LaunchError(f"kernel {self.name}: {name} is {value.dtype}, allowed are {allowed}")
            return found
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LaunchError(f"kernel {self.name}: {name} is a {type(value).__name__}, not a tensor, int or float")
        if isinstance(value, float):
            return "fp32"
        bits = 64 if name in self.wide else 32
        if not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            raise LaunchError(f"kernel {self.name}: {name} = {value} does not fit i{bits}")
        return f"i{bits}"
