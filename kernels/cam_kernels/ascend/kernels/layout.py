"""Dispatch layout: how many rows each expert gets from this rank, and the position of every row among them.

Algorithm: the counting sort that CAM's dispatch_layout uses (a histogram per core, an exclusive prefix over cores and
then one position per row), with one difference: CAM adds the histograms with atomics and a barrier between cores, here
each step is a launch of its own. No atomics means the same result in any order of cores, and on the CPU as well.

    count_experts      grid B   histogram[b, e] = rows of block b for expert e
    scan_histograms    grid EP/EB   base[b, e] = rows of the blocks before b; total[e]
    assign_positions   grid B   position[t, k] = base[b, e] + rows of block b before (t, k)

Positions follow (token, k), so the layout is stable. A slot with expert -1 and every slot of a masked token get
position -1. Duplicate experts in one token are separate rows.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel


@triton.jit
def count_experts(topk_ptr, active_ptr, histogram_ptr, T, K, rows, EP: tl.constexpr, MASKED: tl.constexpr):
    """histogram[b, e]: how often tokens [b * rows, (b + 1) * rows) selected expert e.

    topk [T, K] int32 or int64, -1 = not selected; active [T] int8, 0 = token takes no part (read only when MASKED);
    histogram [B, EP] int32, EP a power of two >= the number of experts.
    Grid: B blocks of `rows` tokens. Tiling: one slot at a time against EP lanes, so UB holds a few vectors of EP.
    """
    block = tl.program_id(0)
    e = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for t in range(block * rows, tl.minimum(block * rows + rows, T)):
        takes_part = 1
        if MASKED:
            takes_part = tl.load(active_ptr + t).to(tl.int32)
        if takes_part != 0:
            for k in range(K):
                expert = tl.load(topk_ptr + t.to(tl.int64) * K + k).to(tl.int32)
                counts += (e == expert).to(tl.int32)
    tl.store(histogram_ptr + block * EP + e, counts)


@triton.jit
def scan_histograms(histogram_ptr, base_ptr, total_ptr, B, EP: tl.constexpr, EB: tl.constexpr):
    """base[b, e] = sum of histogram[b', e] over b' < b; total[e] = the sum over all b.

    histogram, base [B, EP] int32; total [EP] int32. Grid: EP / EB programs, each with EB experts.
    """
    e = tl.program_id(0) * EB + tl.arange(0, EB)
    running = tl.zeros([EB], tl.int32)
    for b in range(B):
        here = tl.load(histogram_ptr + b * EP + e)
        tl.store(base_ptr + b * EP + e, running)
        running += here
    tl.store(total_ptr + e, running)


@triton.jit
def assign_positions(topk_ptr, active_ptr, base_ptr, position_ptr, T, K, rows, KP: tl.constexpr, EP: tl.constexpr,
                     MASKED: tl.constexpr):  # fmt: skip
    """position[t, k]: rank of the row (t, k) among this rank's rows for its expert, or -1.

    base [B, EP] int32 from scan_histograms; position [T, K] int32; KP a power of two >= K.
    Grid, tiling and the other arguments as in count_experts.
    """
    block = tl.program_id(0)
    lane = tl.arange(0, KP)
    e = tl.arange(0, EP)
    base = tl.load(base_ptr + block * EP + e)
    for t in range(block * rows, tl.minimum(block * rows + rows, T)):
        takes_part = 1
        if MASKED:
            takes_part = tl.load(active_ptr + t).to(tl.int32)
        positions = tl.full([KP], -1, tl.int32)
        if takes_part != 0:
            for k in range(K):
                expert = tl.load(topk_ptr + t.to(tl.int64) * K + k).to(tl.int32)
                chosen = (e == expert).to(tl.int32)
                position = tl.sum(chosen * base, axis=0)
                base += chosen
                if expert >= 0:
                    positions = tl.where(lane == k, position, positions)
        tl.store(position_ptr + t.to(tl.int64) * K + lane, positions, mask=lane < K)


COUNT_EXPERTS = Kernel(count_experts)
SCAN_HISTOGRAMS = Kernel(scan_histograms)
ASSIGN_POSITIONS = Kernel(assign_positions)
