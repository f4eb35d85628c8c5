"""Buckets for weight sync: many tensors into one piece of memory and back.

A bucket is sent and flagged as a whole, so pack and unpack are the same gather of runs with the two sides exchanged:
the host cuts tensors into pieces of at most `piece` elements, so that one big tensor keeps every core busy.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel


@triton.jit
def copy_runs(from_ptr, to_ptr, length_ptr, like_ptr, N, BI: tl.constexpr):
    """Copy N contiguous runs.

    from, to [N] int64: addresses of each run's first element on both sides; length [N] int64 in elements of like's type
    (1, 2 or 4 bytes; both addresses must be multiples of it); runs must not overlap.
    Grid: any; program p takes runs p, p + grid, ... Tiling: BI elements, UB 2 tiles.
    """
    lane = tl.arange(0, BI)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        source = tl.load(from_ptr + n).to(tl.pointer_type(like_ptr.dtype.element_ty))
        target = tl.load(to_ptr + n).to(tl.pointer_type(like_ptr.dtype.element_ty))
        length = tl.load(length_ptr + n)
        for start in range(0, length, BI):
            mask = start + lane < length
            tl.store(target + (start + lane), tl.load(source + (start + lane), mask=mask), mask=mask)


COPY_RUNS = Kernel(copy_runs)
