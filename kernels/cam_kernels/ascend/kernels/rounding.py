"""Rounding to integers inside kernels."""

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
def to_int8(value):
    """fp32 -> int8: nearest, ties to even, saturating at +-127. A scale of few bits (a row of denormals) passes 127."""
    return tl.minimum(tl.maximum(round_half_even(value), -127.0), 127.0).to(tl.int8)
