"""Memory that is reduced or broadcast: torch tensors, NumPy arrays, and whatever else speaks DLPack, without torch."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import cam_kernels as native
from cam.errors import InputError


@dataclass(frozen=True, slots=True)
class Memory:
    """One run of memory. dtype: the kernels' name. owner: keeps it alive."""

    address: int
    elements: int
    dtype: str
    nbytes: int
    owner: Any


def is_array(value: Any) -> bool:
    """Whether this is one array rather than a collection of arrays."""
    return isinstance(value, torch.Tensor) or hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__")


def arrays_of(value: Any) -> list[Any]:
    """The arrays in an array or an iterable of arrays. None among them (a parameter without a gradient) is left out."""
    if is_array(value):
        return [value]
    if not isinstance(value, Iterable):
        raise InputError(f"a tensor, an array or an iterable of them is needed, got {type(value).__name__}")
    found = [each for each in _values(value) if each is not None]
    for each in found:
        if not is_array(each):
            raise InputError(f"tensors or arrays are needed, got {type(each).__name__} among them")
    return found


def _values(value: Iterable[Any]) -> Iterator[Any]:
    yield from value.values() if isinstance(value, dict) else value


def memory_of(array: Any) -> Memory:
    """An array's memory. Raises InputError unless it is writable CPU memory in one run."""
    try:
        address, elements, dtype, size, plain = native.array_facts(array)
    except TypeError:
        raise InputError(f"writable CPU memory is needed; {type(array).__name__} does not give it") from None
    if not plain:
        raise InputError("the array must be one run of memory (C order); pass a contiguous copy")
    return Memory(address, elements, dtype, elements * size, array)
