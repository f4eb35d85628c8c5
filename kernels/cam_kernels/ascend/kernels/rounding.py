"""Rounding to integers inside kernels, and the scale of a quantised row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def round_half_even(value):
    """fp32 -> nearest integer as fp32, ties to even, for |value| < 2^22.

    1.5 * 2^23 has one unit in the last place, so adding it rounds in the adder's own mode, which is to nearest even on
    x86 and in Ascend's vector units by default (the latter not verified on hardware). No compiler in the path may
    reassociate floats: nothing is compiled with fast-math.
    """
    return (value + 12582912.0) - 12582912.0


@triton.jit
def has_nan(tile):
    """1.0 if the fp32 tile holds a NaN, else 0.0. Asked for itself, because what a vector maximum makes of a NaN is the
    unit's affair."""
    return tl.max(tl.where(tile == tile, 0.0, 1.0), axis=0)


@triton.jit
def row_scale(amax, nan):
    """amax = max |row| and nan = has_nan of the row, fp32 -> scale, and what to_int8_row divides by.

    scale = amax / 127, NaN for a row with a NaN, infinite for one with an infinity: the receiver sees it. The divisor
    is 0 where all values become 0: such rows, and those too small for a positive scale.
    """
    scale = tl.where(nan > 0.0, float("nan"), amax / 127.0)
    return scale, tl.where((scale > 0.0) & (scale < float("inf")), scale, 0.0)


@triton.jit
def to_int8_row(tile, divisor):
    """Values of a row, by the divisor of row_scale."""
    kept = tl.where(divisor > 0.0, tile / tl.where(divisor > 0.0, divisor, 1.0), 0.0)
    return to_int8(kept)


@triton.jit
def to_int8(value):
    """fp32 -> int8: nearest, ties to even, saturating at +-127. A scale of few bits (a row of denormals) passes 127."""
    return tl.minimum(tl.maximum(round_half_even(value), -127.0), 127.0).to(tl.int8)
