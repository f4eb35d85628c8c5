"""Grouped int8 matmul with SwiGLU and requantisation: the expert's feed-forward net, in stages.

Algorithm: CAM's fused_deep_moe computes dispatch, both matmuls and combine in one launch, cube and vector cores
working on neighbouring tiles. Here the same arithmetic is cut where a core type ends, and int32 sums pass through
global memory between the stages:

    matmul_int8      cube     a1[r, 2I] = x[r, H] @ w1[expert of r]        int8 x int8 -> int32, exact
    swiglu_requant   vector   h = silu(gate) * up of the dequantised a1, per-token int8
    matmul_int8      cube     a2[r, H] = h[r, I] @ w2[expert of r]
    dequant_output   vector   y = a2 * token scale * channel scale

Gate is the first half of the columns, up the second. Integer sums are exact as long as K <= 133 000 (127 * 127 * K
< 2^31), so the result does not depend on tiling.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel
from cam_kernels.ascend.kernels.rounding import has_nan, row_scale, to_int8_row


@triton.jit
def matmul_int8(x_ptr, weight_ptr, end_ptr, out_ptr, G, N, K, BM: tl.constexpr, BN: tl.constexpr,
                BK: tl.constexpr):  # fmt: skip
    """out[r] = x[r] @ weight[g] for the rows r of every group g.

    x [R, K] int8, rows sorted by group; weight [G, K, N] int8; end [G] int32: the row after the group's last one
    (a running sum of row counts; groups may be empty); out [R, N] int32.
    Grid: any; the tiles (group, BM rows, BN columns) are dealt to programs in turn. Tiling: BM x BN sums in L0C, BK
    deep. Limits: BM * BN * 4 <= 128 KiB (L0C), (BM + BN) * BK <= 64 KiB each (L0A, L0B).
    """
    column_tiles = (N + BN - 1) // BN
    row_in_tile = tl.arange(0, BM)
    column_in_tile = tl.arange(0, BN)
    depth = tl.arange(0, BK)
    done = 0
    start = 0
    for g in range(G):
        end = tl.load(end_ptr + g)
        weight = weight_ptr + g.to(tl.int64) * K * N
        tiles = (end - start + BM - 1) // BM * column_tiles
        # The first tile of this group that is this program's turn.
        ahead = (tl.program_id(0) - done % tl.num_programs(0) + tl.num_programs(0)) % tl.num_programs(0)
        for tile in range(ahead, tiles, tl.num_programs(0)):
            row = start + tile // column_tiles * BM + row_in_tile
            column = tile % column_tiles * BN + column_in_tile
            total = tl.zeros([BM, BN], tl.int32)
            for k in range(0, K, BK):
                a = tl.load(x_ptr + row[:, None].to(tl.int64) * K + (k + depth)[None, :],
                            mask=(row < end)[:, None] & (k + depth < K)[None, :], other=0)  # fmt: skip
                b = tl.load(weight + (k + depth)[:, None].to(tl.int64) * N + column[None, :],
                            mask=(k + depth < K)[:, None] & (column < N)[None, :], other=0)  # fmt: skip
                total = tl.dot(a, b, total)
            tl.store(out_ptr + row[:, None].to(tl.int64) * N + column[None, :], total,
                     mask=(row < end)[:, None] & (column < N)[None, :])  # fmt: skip
        done += tiles
        start = end


@triton.jit
def _group_of(end_ptr, row, G):
    """Index of the group that a row belongs to: the number of groups that end at or before it."""
    group = 0
    for g in range(G):
        group += (tl.load(end_ptr + g) <= row).to(tl.int32)
    return group


@triton.jit
def _swiglu(sums_ptr, channel_ptr, token_scale, mid, inner, BI: tl.constexpr):
    """silu(gate) * up for columns [mid, mid + BI) of one row; 0 beyond `inner`."""
    lane = mid + tl.arange(0, BI)
    mask = lane < inner
    gate = tl.load(sums_ptr + lane, mask=mask, other=0).to(tl.float32)
    gate = gate * token_scale * tl.load(channel_ptr + lane, mask=mask, other=0.0)
    up = tl.load(sums_ptr + inner + lane, mask=mask, other=0).to(tl.float32)
    up = up * token_scale * tl.load(channel_ptr + inner + lane, mask=mask, other=0.0)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def swiglu_requant(sums_ptr, token_scale_ptr, channel_scale_ptr, end_ptr, q_ptr, scale_ptr, R, G, inner,
                   BI: tl.constexpr):  # fmt: skip
    """Dequantise the first matmul, apply SwiGLU and quantise per token for the second.

    sums [R, 2 * inner] int32; token_scale [R] fp32; channel_scale [G, 2 * inner] fp32; end [G] int32 as in matmul_int8;
    q [R, inner] int8; scale [R, 8] fp32 (all lanes equal). value = sums * token_scale * channel_scale, in this order.
    Grid: any; program p takes rows p, p + grid, ... Tiling: BI columns of each half; with inner > BI a row is computed
    twice rather than kept.
    """
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        token_scale = tl.load(token_scale_ptr + row)
        channel_ptr = channel_scale_ptr + _group_of(end_ptr, r, G).to(tl.int64) * 2 * inner
        sums = sums_ptr + row * 2 * inner
        amax = 0.0
        nan = 0.0
        for mid in range(0, inner, BI):
            value = _swiglu(sums, channel_ptr, token_scale, mid, inner, BI)
            amax = tl.maximum(amax, tl.max(tl.abs(value), axis=0))
            nan = tl.maximum(nan, has_nan(value))
        scale, divisor = row_scale(amax, nan)
        for mid in range(0, inner, BI):
            value = _swiglu(sums, channel_ptr, token_scale, mid, inner, BI)
            lane = mid + tl.arange(0, BI)
            tl.store(q_ptr + row * inner + lane, to_int8_row(value, divisor), mask=lane < inner)
        tl.store(scale_ptr + row * 8 + tl.arange(0, 8), tl.zeros([8], tl.float32) + scale)


@triton.jit
def dequant_output(sums_ptr, token_scale_ptr, channel_scale_ptr, end_ptr, y_ptr, R, G, N, BN: tl.constexpr):
    """y = round(sums * token_scale * channel_scale) to y's type.

    sums [R, N] int32; token_scale [R, 8] fp32 as swiglu_requant stores it (lane 0 is read); channel_scale [G, N] fp32;
    end [G] int32; y [R, N] bf16, fp16 or fp32. Grid: any, rows in turn. Tiling: BN columns.
    """
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        token_scale = tl.load(token_scale_ptr + row * 8)
        channel_ptr = channel_scale_ptr + _group_of(end_ptr, r, G).to(tl.int64) * N
        for n in range(0, N, BN):
            lane = n + tl.arange(0, BN)
            mask = lane < N
            value = tl.load(sums_ptr + row * N + lane, mask=mask, other=0).to(tl.float32) * token_scale
            value = value * tl.load(channel_ptr + lane, mask=mask, other=0.0)
            tl.store(y_ptr + row * N + lane, value.to(y_ptr.dtype.element_ty), mask=mask)


MATMUL_INT8 = Kernel(matmul_int8)
SWIGLU_REQUANT = Kernel(swiglu_requant)
DEQUANT_OUTPUT = Kernel(dequant_output)
