"""Host side of the experts' feed-forward net on int8 rows: what CAM's fused_deep_moe computes, in stages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernels.grouped_matmul import DEQUANT_OUTPUT, MATMUL_INT8, SWIGLU_REQUANT
from cam_kernels.ascend.launch import Launcher
from cam_kernels.ascend.tiling import block

# 128 x 128 int32 sums are half of L0C (128 KiB), so that the next tile starts while this one is stored; 128 x 128 int8
# operands are a quarter of L0A and L0B (64 KiB each).
TILE_ROWS = TILE_COLUMNS = TILE_DEPTH = 128
# Sums of products of two int8 stay below 2^31 up to this depth.
MAX_DEPTH = (2**31 - 1) // (128 * 128)


@dataclass(frozen=True)
class ExpertWeights:
    """int8 weights of the local experts with their channel scales.

    up [G, H, 2 * I] int8, gate in the first I columns; up_scale [G, 2 * I] fp32; down [G, I, H'] int8;
    down_scale [G, H'] fp32.
    """

    up: torch.Tensor
    up_scale: torch.Tensor
    down: torch.Tensor
    down_scale: torch.Tensor

    def __post_init__(self) -> None:
        groups, hidden, double = self.up.shape
        inner, out = self.down.shape[1:]
        wanted = {
            "up": ((groups, hidden, 2 * inner), torch.int8),
            "up_scale": ((groups, double), torch.float32),
            "down": ((groups, inner, out), torch.int8),
            "down_scale": ((groups, out), torch.float32),
        }
        for name, (shape, dtype) in wanted.items():
            value: torch.Tensor = getattr(self, name)
            if tuple(value.shape) != shape or value.dtype != dtype or not value.is_contiguous():
                raise LimitExceeded(f"{name} is {value.dtype} {tuple(value.shape)}; needed: contiguous {dtype} {shape}")
        if max(hidden, inner) > MAX_DEPTH:
            raise LimitExceeded(f"hidden {hidden} or inner {inner} exceeds {MAX_DEPTH}: int32 sums could overflow")


def grouped_matmul(
    launcher: Launcher,
    x: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    *,
    rows: int = TILE_ROWS,
    columns: int = TILE_COLUMNS,
    depth: int = TILE_DEPTH,
) -> torch.Tensor:
    """x [R, K] int8, weight [G, K, N] int8, ends [G] int32 (row after each group's last) -> int32 [R, N], exact.

    Rows at and after ends[G - 1] stay zero. The tile sizes do not change the result.
    """
    groups, depth_total, width = weight.shape
    out = torch.zeros(x.shape[0], width, dtype=torch.int32, device=x.device)
    if x.shape[0]:
        launcher.launch(
            MATMUL_INT8, launcher.cores, x, weight, ends, out, groups, width, depth_total, BM=rows, BN=columns, BK=depth
        )
    return out


def feed_forward(
    launcher: Launcher,
    x: torch.Tensor,
    scales: torch.Tensor,
    ends: torch.Tensor,
    weights: ExpertWeights,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """down(SwiGLU(up(x))) of every row with the weights of its group -> [R, H'] out_dtype.

    x [R, H] int8 with scales [R] fp32: rows by group, as dispatch with quantise=True gives them. ends [G] int32: the
    row after each group's last one. The middle is requantised per token. out_dtype: bf16, fp16 or fp32.
    """
    rows, inner, width = x.shape[0], weights.down.shape[1], weights.down.shape[2]
    groups, device = weights.up.shape[0], x.device
    if x.dtype != torch.int8 or x.shape[1] != weights.up.shape[1] or ends.numel() != groups:
        raise LimitExceeded(
            f"x {x.dtype} {tuple(x.shape)} and {ends.numel()} groups do not fit up {tuple(weights.up.shape)}"
        )
    y = torch.empty(rows, width, dtype=out_dtype, device=device)
    if rows == 0:
        return y
    sums = grouped_matmul(launcher, x, weights.up, ends)
    middle = torch.empty(rows, inner, dtype=torch.int8, device=device)
    middle_scale = torch.empty(rows, 8, dtype=torch.float32, device=device)
    launcher.launch(
        SWIGLU_REQUANT, launcher.cores, sums, scales, weights.up_scale, ends, middle, middle_scale, rows, groups, inner,
        BI=block("swiglu_requant", inner),
    )  # fmt: skip
    sums = grouped_matmul(launcher, middle, weights.down, ends)
    launcher.launch(
        DEQUANT_OUTPUT, launcher.cores, sums, middle_scale, weights.down_scale, ends, y, rows, groups, width,
        BN=block("dequant_output", width),
    )  # fmt: skip
    return y
