"""Per-token int8 quantisation and its inverse.

scale = amax(|row|) / 127, value = round half even (x / scale), both in fp32; a zero row gives values 0 and scale 0, a
NaN or infinity in a row becomes its scale.
CAM's own kernels differ in the corner: one adds 1e-12 to amax, another gives NaN for a zero row.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel
from cam_kernels.ascend.kernels.rounding import has_nan, row_scale, to_int8_row


@triton.jit
def quant_rows(x_ptr, q_ptr, scale_ptr, R, H, BH: tl.constexpr):
    """x [R, H] bf16, fp16 or fp32 -> q [R, H] int8, scale [R, 8] fp32 (all lanes equal).

    The scale fills 32 bytes, so that programs on different cores never store into the same granule of memory.
    Grid: any; program p takes rows p, p + grid, ... Tiling: BH elements; with H > BH a row is read twice.
    UB: about 9 fp32 tiles of BH.
    """
    lane = tl.arange(0, BH)
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        amax = 0.0
        nan = 0.0
        for h in range(0, H, BH):
            tile = tl.load(x_ptr + row * H + h + lane, mask=h + lane < H, other=0.0).to(tl.float32)
            amax = tl.maximum(amax, tl.max(tl.abs(tile), axis=0))
            nan = tl.maximum(nan, has_nan(tile))
        scale, divisor = row_scale(amax, nan)
        for h in range(0, H, BH):
            mask = h + lane < H
            tile = tl.load(x_ptr + row * H + h + lane, mask=mask, other=0.0).to(tl.float32)
            tl.store(q_ptr + row * H + h + lane, to_int8_row(tile, divisor), mask=mask)
        tl.store(scale_ptr + row * 8 + tl.arange(0, 8), tl.zeros([8], tl.float32) + scale)


@triton.jit
def dequant_rows(q_ptr, scale_ptr, x_ptr, R, H, BH: tl.constexpr):
    """q [R, H] int8, scale [R] fp32 -> x [R, H] = round(q * scale) in x's type (bf16, fp16 or fp32).

    Grid: any; program p takes rows p, p + grid, ... Tiling: BH elements.
    """
    lane = tl.arange(0, BH)
    for r in range(tl.program_id(0), R, tl.num_programs(0)):
        row = r.to(tl.int64)
        scale = tl.load(scale_ptr + row)
        for h in range(0, H, BH):
            mask = h + lane < H
            tile = tl.load(q_ptr + row * H + h + lane, mask=mask, other=0).to(tl.float32) * scale
            tl.store(x_ptr + row * H + h + lane, tile.to(x_ptr.dtype.element_ty), mask=mask)


QUANT_ROWS = Kernel(quant_rows)
DEQUANT_ROWS = Kernel(dequant_rows)
