"""Dispatch: every rank writes its rows straight to their final place in the owners' windows.

Algorithm: the one-sided dispatch of CAM's fused decode kernel (remote write by vector cores, quantised on the way),
with final rows from the plan of notify.py instead of worst-case slots per source, so the receiver copies nothing and
gets one contiguous result. CAM's throughput kernel writes locally and lets the receiver pull; here one remote write
replaces write, flag and remote read.

Window layout, one half by epoch % 2 (the `*_peers` tables point at it):

    row r            H elements of the payload type     at r * H
    meta of row r    int32 [8]                          at r * 8: source rank, token, k, weight (fp32 bits),
                                                        scale (fp32 bits), epoch, 0, 0
    flag of (source s, block b)   int32 [8]             at (s * blocks + b) * 8

Flag protocol: a block writes all its rows and their meta, then a full barrier, then its flag at every peer, also at
those it sent nothing to. A receiver is complete when the W * blocks flags have reached the epoch (notify.wait_flags).
The epoch in a row's meta says that the row was written in this epoch: rows without it are alignment padding.
Offsets are 64-bit: rows * H passes 2^31 for 300 000 rows of 7168.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel
from cam_kernels.ascend.kernels.rounding import has_nan, row_scale, to_int8_row


@triton.jit
def _owner(expert, E, W):
    """Rank that owns an expert: contiguous ranges, the first E % W ranks own one more."""
    each = E // W
    extra = E % W
    wide = extra * (each + 1)
    return tl.where(expert < wide, expert // (each + 1), extra + (expert - wide) // tl.maximum(each, 1))


@triton.jit
def push_rows(x_ptr, scale_ptr, topk_ptr, weight_ptr, position_ptr, first_row_ptr, row_peers_ptr, meta_peers_ptr,
              flag_peers_ptr, rank, T, K, H, E, W, epoch, BH: tl.constexpr, QUANT: tl.constexpr, SCALED: tl.constexpr,
              WEIGHTED: tl.constexpr):  # fmt: skip
    """Send every selected (token, k) to the owner of its expert.

    x [T, H] bf16, fp16, fp32 or (not with QUANT) int8; scale [T] fp32, of rows that are quantised already (read only
    when SCALED); topk [T, K] int32 or int64; weight [T, K] fp32 (read only when WEIGHTED, else 1);
    position [T, K] int32 from assign_positions, -1 = do not send; first_row [E] int32 from plan_rows.
    row_peers, meta_peers, flag_peers [W] int64: addresses of this epoch's areas in each window.
    QUANT: rows are sent as int8, scale = amax(|row|) / 127, value = round half even (x / scale); zero row: 0, scale 0;
    a NaN or infinity in a row becomes its scale, its values 0.
    Grid: `blocks`, equal on all ranks; block b takes tokens b, b + blocks, ... Tiling: BH elements of one token, loaded
    once and stored for each k. With H > BH a quantised row is read twice. UB: 2 or 3 tiles of BH (9 with QUANT, fp32).
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    lane = tl.arange(0, BH)
    word = tl.arange(0, 8)
    for t in range(block, T, blocks):
        token = t.to(tl.int64)
        scale = 0.0
        divisor = 1.0
        if QUANT:
            amax = 0.0
            nan = 0.0
            for h in range(0, H, BH):
                tile = tl.load(x_ptr + token * H + h + lane, mask=h + lane < H, other=0.0).to(tl.float32)
                amax = tl.maximum(amax, tl.max(tl.abs(tile), axis=0))
                nan = tl.maximum(nan, has_nan(tile))
            scale, divisor = row_scale(amax, nan)
        if SCALED:
            scale = tl.load(scale_ptr + token)
        for h in range(0, H, BH):
            mask = h + lane < H
            tile = tl.load(x_ptr + token * H + h + lane, mask=mask, other=0)
            if QUANT:
                tile = to_int8_row(tile.to(tl.float32), divisor)
            for k in range(K):
                position = tl.load(position_ptr + token * K + k)
                if position >= 0:
                    expert = tl.load(topk_ptr + token * K + k).to(tl.int32)
                    row = (tl.load(first_row_ptr + expert) + position).to(tl.int64)
                    there = tl.load(row_peers_ptr + _owner(expert, E, W)).to(tl.pointer_type(tile.dtype))
                    tl.store(there + row * H + h + lane, tile, mask=mask)
        for k in range(K):
            position = tl.load(position_ptr + token * K + k)
            if position >= 0:
                expert = tl.load(topk_ptr + token * K + k).to(tl.int32)
                row = (tl.load(first_row_ptr + expert) + position).to(tl.int64)
                there = tl.load(meta_peers_ptr + _owner(expert, E, W)).to(tl.pointer_type(tl.int32))
                weight = 1.0
                if WEIGHTED:
                    weight = tl.load(weight_ptr + token * K + k)
                meta = tl.where(word == 0, rank, tl.where(word == 1, t, tl.where(word == 2, k, 0)))
                meta = tl.where(word == 5, epoch, meta)
                real = tl.where(word == 3, weight, tl.where(word == 4, scale, 0.0)).to(tl.int32, bitcast=True)
                tl.store(there + row * 8 + word, meta | real)
    tl.debug_barrier()
    for peer in range(W):
        flags = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flags + (rank * blocks + block).to(tl.int64) * 8 + word, tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def unpack_meta(meta_ptr, source_ptr, weight_ptr, scale_ptr, R, epoch, RP: tl.constexpr):
    """Split the meta of received rows into the tensors the caller gets.

    meta [R, 8] int32 in the own window; source [R, 3] int32 (rank, token, k), -1 for padding; weight, scale [R] fp32,
    0 for padding. Grid: any, programs take blocks of RP rows in turn. Run after wait_flags has seen every flag.
    """
    word = tl.arange(0, 8)
    for start in range(tl.program_id(0) * RP, R, tl.num_programs(0) * RP):
        row = start + tl.arange(0, RP)
        mask = row < R
        meta = tl.load(meta_ptr + row[:, None].to(tl.int64) * 8 + word[None, :], mask=mask[:, None], other=0)
        valid = tl.sum(tl.where(word[None, :] == 5, meta, 0), axis=1) == epoch
        for j in tl.static_range(3):
            value = tl.sum(tl.where(word[None, :] == j, meta, 0), axis=1)
            tl.store(source_ptr + row.to(tl.int64) * 3 + j, tl.where(valid, value, -1), mask=mask)
        weight = tl.sum(tl.where(word[None, :] == 3, meta, 0), axis=1)
        scale = tl.sum(tl.where(word[None, :] == 4, meta, 0), axis=1)
        tl.store(weight_ptr + row, tl.where(valid, weight, 0).to(tl.float32, bitcast=True), mask=mask)
        tl.store(scale_ptr + row, tl.where(valid, scale, 0).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def clear_padding(rows_ptr, source_ptr, R, H, BH: tl.constexpr):
    """Zero the padding rows (source rank -1) of a result with an expert alignment above 1.

    rows [R, H] in the own window; source [R, 3] int32 from unpack_meta. Grid: any; programs take rows in turn.
    """
    lane = tl.arange(0, BH)
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        if tl.load(source_ptr + row * 3) < 0:
            for h in range(0, H, BH):
                tl.store(rows_ptr + row * H + h + lane, tl.zeros([BH], rows_ptr.dtype.element_ty), mask=h + lane < H)


PUSH_ROWS = Kernel(push_rows)
UNPACK_META = Kernel(unpack_meta)
CLEAR_PADDING = Kernel(clear_padding)
