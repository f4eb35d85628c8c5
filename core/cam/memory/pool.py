"""Shared memory of a single process: tensors whose pages a peer of this host may map.

For owners that belong to no group (serving engines). The same segment and arena as a group's window, without its
mailboxes.
"""

import os
from collections.abc import Sequence

import torch
from torch.utils.dlpack import from_dlpack

import cam_kernels as native
from cam import host
from cam.errors import InputError, OutOfWindowMemory
from cam.memory.segment import Segment

#: Any dtype travels as bytes; its tensor is a view.
_CARRIER = "uint8"


class Pool:
    """name: shown by the kernel (/proc/PID/maps). limit: bytes; None: the memory that this process may use.

    Costs nothing until something is allocated: the segment is sparse.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self._name = name
        self.limit = host.usable_memory() if limit is None else limit
        self._segment: Segment | None = None
        self._arena: native.Arena | None = None
        self._base = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised. Raises OutOfWindowMemory, InputError."""
        elements = 1
        for size in shape:
            if size < 0:
                raise InputError(f"sizes must be >= 0, got {list(shape)}")
            elements *= size
        if elements == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return self._bytes(elements * dtype.itemsize).view(dtype).view(tuple(shape))

    def adopt(self, tensors: Sequence[torch.Tensor], *, keep: bool = True) -> int:
        """Moves the storages of these tensors into this pool: contents, shapes and strides stay, addresses change.

        keep: False leaves the contents behind, for storages that nobody has written yet: what is there instead is
        undefined. All given tensors of one storage move together; other tensors that share a storage stay where they
        are, and no longer see what is written here. Returns the bytes that moved. Raises OutOfWindowMemory, InputError.
        """
        groups: dict[int, list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise InputError(f"only strided CPU tensors can move, got {tensor.layout} on {tensor.device}")
            if tensor.numel() and not self.holds(tensor):
                groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        moved = 0
        for each in groups.values():
            old = each[0].untyped_storage()
            room = self._bytes(old.nbytes())
            if keep:
                room.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
            new = room.untyped_storage()
            for tensor in each:
                offset = tensor.storage_offset() + room.storage_offset() // tensor.element_size()
                with torch.no_grad():
                    tensor.set_(new, offset, tensor.shape, tensor.stride())
            moved += old.nbytes()
        return moved

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the whole storage part that the tensor uses lies in this pool."""
        if self._segment is None or not tensor.numel():
            return False
        span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return self.covers(tensor.data_ptr(), span * tensor.element_size())

    def covers(self, address: int, nbytes: int) -> bool:
        return self._arena is not None and self._arena.offset_of(address, nbytes) >= 0

    @property
    def segment(self) -> tuple[Segment, int] | None:
        """The segment and its address in this process; None when nothing was allocated yet."""
        return None if self._segment is None else (self._segment, self._base)

    def close(self) -> None:
        """Closes the descriptor: nobody can map this memory from now on. Tensors stay valid. Idempotent."""
        if self._segment is not None:
            self._segment.close()

    def _bytes(self, nbytes: int) -> torch.Tensor:
        if self._arena is None:
            segment = Segment(f"{self._name}-{os.getpid()}", native.control_bytes(1) + self.limit)
            self._segment, self._arena = segment, native.Arena(segment.fd, 1, self.limit, 0)
        try:
            tensor: torch.Tensor = from_dlpack(self._arena.empty((nbytes,), _CARRIER))
        except native.OutOfMemory as error:
            fields = error.args[0]
            raise OutOfWindowMemory(
                f"no room for {nbytes} bytes of shared memory: {fields['allocated']} of {self.limit} are in use: "
                f"{fields['message']} (knob: memory_limit)",
                requested=nbytes,
                allocated=fields["allocated"],
                limit=self.limit,
            ) from error
        self._base = tensor.data_ptr() - self._arena.offset_of(tensor.data_ptr(), nbytes)
        return tensor
