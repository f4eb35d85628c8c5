"""Host side of weight buckets: the runs that a pack or an unpack consists of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernels.bucket import COPY_RUNS
from cam_kernels.ascend.launch import Launcher

# Large enough that a run's addresses cost nothing beside its bytes, small enough that cores finish together.
PIECE_BYTES = 256 * 1024
_TILE_BYTES = 32 * 1024
ALIGNMENT = 4
"""Tensors start at multiples of this in a bucket, so that everything can be copied in words of 4 bytes."""


@dataclass(frozen=True)
class BucketPlan:
    """Where each tensor lies in a bucket. sizes and offsets in bytes, offsets multiples of ALIGNMENT."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        if not self.sizes:
            return 0
        return _aligned(self.offsets[-1] + self.sizes[-1])


def plan_bucket(sizes: Sequence[int]) -> BucketPlan:
    """One tensor after the other, each at a multiple of ALIGNMENT."""
    offsets, position = [], 0
    for size in sizes:
        if size < 0:
            raise LimitExceeded(f"a tensor of {size} bytes")
        offsets.append(position)
        position = _aligned(position + size)
    return BucketPlan(tuple(sizes), tuple(offsets))


def pack(launcher: Launcher, plan: BucketPlan, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    """Copy contiguous tensors to their places in `bucket` (int8, plan.nbytes, own memory or a view of a window)."""
    _check(plan, tensors, bucket)
    base = bucket.data_ptr()
    _copy(launcher, [(t.data_ptr(), base + o, s) for t, o, s in zip(tensors, plan.offsets, plan.sizes, strict=True)],
          bucket.device)  # fmt: skip


def unpack(launcher: Launcher, plan: BucketPlan, bucket: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """The inverse of pack, into contiguous tensors."""
    _check(plan, tensors, bucket)
    base = bucket.data_ptr()
    _copy(launcher, [(base + o, t.data_ptr(), s) for t, o, s in zip(tensors, plan.offsets, plan.sizes, strict=True)],
          bucket.device)  # fmt: skip


def _check(plan: BucketPlan, tensors: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
    if bucket.dtype != torch.int8 or bucket.numel() < plan.nbytes or not bucket.is_contiguous():
        raise LimitExceeded(f"the bucket has {bucket.numel()} {bucket.dtype}, needed are {plan.nbytes} contiguous int8")
    found = tuple(t.numel() * t.element_size() for t in tensors)
    if found != plan.sizes:
        raise LimitExceeded(f"tensors of {found} bytes for a plan of {plan.sizes}")
    if not all(t.is_contiguous() for t in tensors):
        raise LimitExceeded("all tensors of a bucket must be contiguous")


def _copy(launcher: Launcher, runs: Sequence[tuple[int, int, int]], device: torch.device) -> None:
    """Copy (from, to, bytes) runs, in words of 4 bytes as far as a run is made of them."""
    for word, dtype in ((4, torch.int32), (1, torch.int8)):
        pieces = list(_pieces(runs, word))
        if not pieces:
            continue
        table = torch.tensor(pieces, dtype=torch.int64, device=device).t().contiguous()
        launcher.launch(
            COPY_RUNS, min(launcher.cores, len(pieces)), table[0], table[1], table[2],
            torch.empty(1, dtype=dtype, device=device), len(pieces), BI=_TILE_BYTES // word,
        )  # fmt: skip


def _pieces(runs: Sequence[tuple[int, int, int]], word: int) -> Iterator[tuple[int, int, int]]:
    """(from, to, words) of the parts that are copied in words of this size: with 4 the body of runs that are aligned on
    both sides, with 1 everything else."""
    for source, target, nbytes in runs:
        body = nbytes // 4 * 4 if source % 4 == 0 and target % 4 == 0 else 0
        start, end = (0, body) if word == 4 else (body, nbytes)
        for at in range(start, end, PIECE_BYTES):
            yield source + at, target + at, min(PIECE_BYTES, end - at) // word


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
