"""Checksums of blocks: both sides compute the same plan, gather the bytes of a block, and hash them (XXH3, 64 bit)."""

import numpy as np
import xxhash

from cam.kv.planner import Plan
from cam.transport.pieces import (
    COLUMNS,
    MY_OFFSET,
    MY_STRIDE,
    NBYTES,
    ROWS,
    THEIR_OFFSET,
    THEIR_STRIDE,
    Int64s,
)
from cam_kernels import Mover


def digests(mover: Mover, plan: Plan, bases: Int64s, *, theirs: bool) -> list[int]:
    """One for each block of the plan that has bytes in it, in the order of plan.block.

    bases: int64 [layers], addresses in this process of the plan's `theirs` side, or of its `mine` side.
    """
    if not len(plan.table) or not len(bases):
        return []
    offset, stride = (THEIR_OFFSET, THEIR_STRIDE) if theirs else (MY_OFFSET, MY_STRIDE)
    order = np.argsort(plan.block, kind="stable")
    block, table = plan.block[order], plan.table[order]
    first = np.flatnonzero(np.append(True, block[1:] != block[:-1]))
    size = table[:, NBYTES] * table[:, ROWS]
    largest = int(np.add.reduceat(size, first).max())
    staging = np.empty(largest * len(bases), np.uint8)
    bases = np.ascontiguousarray(bases)
    result = []
    for begin, end in zip(first.tolist(), [*first[1:].tolist(), len(table)], strict=True):
        part = np.zeros((end - begin, COLUMNS), np.int64)
        sizes = size[begin:end]
        part[:, MY_OFFSET] = np.cumsum(sizes) - sizes
        part[:, THEIR_OFFSET] = table[begin:end, offset]
        part[:, NBYTES] = part[:, MY_STRIDE] = table[begin:end, NBYTES]
        part[:, ROWS] = table[begin:end, ROWS]
        part[:, THEIR_STRIDE] = table[begin:end, stride]
        total = int(sizes.sum())
        targets = staging.ctypes.data + np.arange(len(bases), dtype=np.int64) * total
        mover.copy(part.ctypes.data, len(part), targets.ctypes.data, bases.ctypes.data, len(bases), True, 0, 0)
        result.append(xxhash.xxh3_64_intdigest(staging[: total * len(bases)].data))
    return result


def blocks_of(plan: Plan) -> Int64s:
    """Positions in the caller's list of the blocks that `digests` covers, in its order."""
    return np.unique(plan.block)
