"""The peers' wires: an all-to-all of rows with uneven splits, once over Gloo and once over MPI.

mpi4py is imported only when MPI takes part: its import starts MPI.
"""

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Wire(Protocol):
    """name: as in reports. Rows lie along dimension 0; splits count rows, one entry per rank."""

    name: str

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], splits: list[int]) -> None: ...


class GlooWire:
    name = "gloo"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], splits: list[int]) -> None:
        dist.all_to_all_single(out, rows, out_splits, splits, group=self._group)


class MpiWire:
    name = "mpi"

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm = MPI.COMM_WORLD

    def all_to_all(self, out: torch.Tensor, rows: torch.Tensor, out_splits: list[int], splits: list[int]) -> None:
        row_bytes = rows.element_size() * math.prod(rows.shape[1:])
        self._comm.Alltoallv(
            [self._memory(rows), [row_bytes * n for n in splits], self._mpi.BYTE],
            [self._memory(out), [row_bytes * n for n in out_splits], self._mpi.BYTE],
        )

    def _memory(self, tensor: torch.Tensor) -> Any:
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())
