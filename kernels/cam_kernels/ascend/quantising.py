"""Host side of per-token int8 quantisation."""

from __future__ import annotations

import torch

from cam_kernels.ascend.kernels.quant import DEQUANT_ROWS, QUANT_ROWS
from cam_kernels.ascend.launch import Launcher
from cam_kernels.ascend.tiling import block


def quant_int8(launcher: Launcher, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, H] bf16, fp16 or fp32, contiguous -> q [R, H] int8, scale [R] fp32 (a strided view)."""
    rows, hidden = x.shape
    q = torch.empty(rows, hidden, dtype=torch.int8, device=x.device)
    scale = torch.empty(rows, 8, dtype=torch.float32, device=x.device)
    if x.numel():
        launcher.launch(QUANT_ROWS, launcher.cores, x, q, scale, rows, hidden, BH=block("quant_rows", hidden))
    return q, scale[:, 0]


def dequant_int8(launcher: Launcher, q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """q [R, H] int8, scale [R] fp32, both contiguous -> round(q * scale) [R, H] in `dtype` (bf16, fp16 or fp32)."""
    rows, hidden = q.shape
    x = torch.empty(rows, hidden, dtype=dtype, device=q.device)
    if q.numel():
        launcher.launch(DEQUANT_ROWS, launcher.cores, q, scale, x, rows, hidden, BH=block("dequant_rows", hidden))
    return x
