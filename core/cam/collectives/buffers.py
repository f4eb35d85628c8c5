"""Window memory set aside for training: gradients, parameters, temporaries.

Tensors of one buffer lie one after another, so a batch of them is one run of memory for the kernels.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from cam.errors import OutOfWindowMemory
from cam.group import Group

_ALIGN = 64  # a cache line


class TrainingBuffer:
    """One of a group's buffers: hands out its memory from the beginning; reset() starts over.

    size: bytes, None = what the first batch of tensors needs. reuse: "keep" leaves the memory in place at a reset, so
    the next step finds pages that are mapped already; "release" gives it back.
    """

    def __init__(self, group: Group, name: str, size: int | None, reuse: Literal["keep", "release"]) -> None:
        self._group, self._name, self._size, self._reuse = group, name, size, reuse
        self._memory: torch.Tensor | None = None
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes handed out since the last reset."""
        return self._used

    @property
    def size(self) -> int:
        """Bytes that are set aside now; 0 before the first use."""
        return 0 if self._memory is None else self._memory.numel()

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uninitialised. Raises OutOfWindowMemory when the buffer is full."""
        return self._take([(tuple(shape), dtype)])[0]

    def like(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Zeros of the same shapes and dtypes, one after another: for `parameter.grad = ...`."""
        taken = self._take([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        for tensor in taken:
            tensor.zero_()
        return taken

    def reset(self) -> None:
        """Starts over. The caller no longer uses the tensors that were handed out."""
        self._used = 0
        if self._reuse == "release":
            self._memory = None

    def _take(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
        starts, end = [], self._used
        for shape, dtype in wanted:
            start = -(-end // dtype.itemsize) * dtype.itemsize
            starts.append(start)
            end = start + math.prod(shape) * dtype.itemsize
        end = -(-end // _ALIGN) * _ALIGN
        if self._memory is None:
            self._memory = self._group.empty((self._size or max(end, _ALIGN),), torch.uint8)
        if end > self._memory.numel():
            raise OutOfWindowMemory(
                f"group {self._group.name!r}: the {self._name} buffer has no room for {end - self._used} bytes: "
                f"{self._used} of {self._memory.numel()} are in use (knob: {self._name}_buffer, "
                f"CAM_{self._name.upper()}_BUFFER)",
                rank=self._group.rank,
                requested=end - self._used,
                allocated=self._used,
                limit=self._memory.numel(),
            )
        self._used = end
        memory = self._memory
        return [
            memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, wanted, strict=True)
        ]


class Buffers:
    """gradient, parameter, temporary: a group's training buffers, as its config says."""

    def __init__(self, group: Group) -> None:
        config = group.config
        sizes = {
            "gradient": config.gradient_buffer,
            "parameter": config.parameter_buffer,
            "temporary": config.temporary_buffer,
        }
        self.gradient, self.parameter, self.temporary = (
            TrainingBuffer(group, name, None if size is None else int(size), config.buffer_reuse)
            for name, size in sizes.items()
        )
