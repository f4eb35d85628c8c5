"""Notify: every rank tells every rank how many rows it has for each expert, and all derive the same plan from it.

Algorithm: CAM's notify (counts and a 32-byte flag per peer, two window halves by epoch), with the counts of ALL experts
pushed to every peer instead of each peer pulling its own slice. One exchange then is enough for a sender to know the
FINAL row of everything it sends, and a receiver how much it gets.

Window layout, one half (addresses in the `*_peers` tables point at the half of the current epoch, epoch % 2):

    row of source s      int32 [ROW]    at s * ROW         ROW = HEADER + EP
    flag of source s     int32 [8]      at s * 8 of the flag area

A row is: header (HEADER words: T, K, H, blocks, experts, alignment, dtype code, layout code), then the counts.
Flag protocol: rows to all peers, full barrier, then all 8 lanes of the own flag at every peer = epoch. Epochs only
grow, so a flag has arrived when it is >= the epoch awaited; nothing is ever reset.
A half is written again two epochs later: by then its reader has sent something of the epoch in between, and it sends
that only after reading.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel

HEADER = 8
FLAG_LANES = 8  # 32 bytes: the granule of a GM <-> UB copy, and so the smallest thing that is written in one piece


@triton.jit
def push_counts(row_ptr, row_peers_ptr, flag_peers_ptr, rank, W, epoch, ROW: tl.constexpr):
    """Write this rank's row into every peer's window (the own one included), then the flags.

    row [ROW] int32; row_peers, flag_peers [W] int64: address of the row area and of the flag area in each window.
    Grid: any; program p serves peers p, p + grid, ... Tiling: one row in UB. ROW: power of two, <= 2048.
    """
    lane = tl.arange(0, ROW)
    row = tl.load(row_ptr + lane)
    for peer in range(tl.program_id(0), W, tl.num_programs(0)):
        there = tl.load(row_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + rank * ROW + lane, row)
    tl.debug_barrier()
    for peer in range(tl.program_id(0), W, tl.num_programs(0)):
        flags = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flags + rank * 8 + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def wait_flags(flags_ptr, arrived_ptr, N, epoch, polls, FP: tl.constexpr):
    """Wait until N flags of the own window have reached `epoch`, for at most `polls` looks.

    flags [N, 8] int32 in the own window; arrived [N, 8] int32: 1 in every lane of a flag that has arrived, else 0.
    Grid: ceil(N / FP); each program polls FP flags by one vector load (GM -> UB, which sees what a peer wrote; a scalar
    load would read the data cache for ever). The bound keeps the launch finite: the host looks at `arrived`, at the
    clock and at the peers' lives, and launches again.
    """
    lane = tl.program_id(0) * (FP * 8) + tl.arange(0, FP * 8)
    mask = lane < N * 8
    pending = tl.sum((tl.load(flags_ptr + lane, mask=mask, other=epoch) < epoch).to(tl.int32), axis=0)
    looks = 1
    while (pending > 0) & (looks < polls):
        # Ends the pipe's work on the last copy before the next; for LLVM, memory is read anew.
        tl.debug_barrier()
        pending = tl.sum((tl.load(flags_ptr + lane, mask=mask, other=epoch) < epoch).to(tl.int32), axis=0)
        looks += 1
    tl.debug_barrier()
    seen = tl.load(flags_ptr + lane, mask=mask, other=epoch)
    tl.store(arrived_ptr + lane, (seen >= epoch).to(tl.int32), mask=mask)


@triton.jit
def plan_rows(rows_ptr, first_row_ptr, expert_rows_ptr, running_ptr, total_ptr, rank, W, E, alignment,
              ROW: tl.constexpr, HEADER: tl.constexpr, EL: tl.constexpr):  # fmt: skip
    """From all ranks' counts, where everything goes.

    rows [W, ROW] int32: the row area of the own window.
    first_row [E] int32: row, at the owner of expert e, of this rank's first row for e.
    expert_rows [E] int32: rows routed to e by all ranks (no padding).
    running [E, W] int32: for expert e and source s, the row after the last one of (e, s) at the owner: with alignment 1
        the running sum, expert-major and source-minor, that CAM's recv_count is.
    total [W, 8] int32: rows that rank w receives, padding included (all lanes equal).
    Order of rows at an owner: local expert, source rank, (token, k); every expert padded to a multiple of `alignment`.
    Owner of an expert: contiguous ranges, the first E % W ranks own one more.
    Grid: W, program d plans rank d. Tiling: EL lanes of experts, power of two >= ceil(E / W), <= 512.
    """
    owner = tl.program_id(0)
    each = E // W
    extra = E % W
    first = owner * each + tl.minimum(owner, extra)
    mine = each + (owner < extra).to(tl.int32)
    lane = tl.arange(0, EL)
    mask = lane < mine
    count = tl.zeros([EL], tl.int32)
    before = tl.zeros([EL], tl.int32)
    for source in range(W):
        here = tl.load(rows_ptr + source * ROW + HEADER + first + lane, mask=mask, other=0)
        if source < rank:
            before += here
        count += here
    start = tl.zeros([EL], tl.int32)
    rows = 0
    for e in range(mine):
        # A scalar division: the compiler turns a division of int32 vectors into one of fp32.
        padded = (tl.sum(tl.where(lane == e, count, 0), axis=0) + alignment - 1) // alignment * alignment
        start += tl.where(lane > e, padded, 0)
        rows += padded
    tl.store(first_row_ptr + first + lane, start + before, mask=mask)
    tl.store(expert_rows_ptr + first + lane, count, mask=mask)
    tl.store(total_ptr + owner * 8 + tl.arange(0, 8), tl.full([8], 0, tl.int32) + rows)
    end = start
    for source in range(W):
        end += tl.load(rows_ptr + source * ROW + HEADER + first + lane, mask=mask, other=0)
        tl.store(running_ptr + (first + lane) * W + source, end, mask=mask)


@triton.jit
def raise_flag(flag_peers_ptr, index, W, value):
    """Set the 32-byte flag `index` to `value` in every window.

    flag_peers [W] int64: address of the flag area in each window. What the flag announces was done by earlier launches
    on the same stream, whose end is a stronger barrier than any inside a kernel. Grid: any, peers in turn.
    """
    for peer in range(tl.program_id(0), W, tl.num_programs(0)):
        flags = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flags + index * 8 + tl.arange(0, 8), tl.full([8], 0, tl.int32) + value)


PUSH_COUNTS = Kernel(push_counts)
WAIT_FLAGS = Kernel(wait_flags)
PLAN_ROWS = Kernel(plan_rows)
RAISE_FLAG = Kernel(raise_flag)
