"""A whole MoE layer on int8 experts: what CAM's fused_deep_moe computes, in stages.

dispatch with int8 on the way -> grouped matmul, SwiGLU, requantisation, grouped matmul -> combine. The fused kernel
starts an expert's matmul while the rows of the next are still arriving; here each stage waits for the one before.
"""

from __future__ import annotations

from typing import cast

import torch

from cam_kernels.ascend.expert_parallel import ExpertParallel
from cam_kernels.ascend.experts import ExpertWeights, feed_forward
from cam_kernels.ascend.launch import Launcher


def deep_moe(
    launcher: Launcher,
    ranks: ExpertParallel,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: ExpertWeights,
    *,
    active_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H] bf16, fp16 or fp32 -> out [T, H'] in x's dtype, and rows per local expert int32 [E_local].

    weights: of this rank's experts. ranks: with alignment 1, on the same launcher. Collective.
    """
    received, handle = ranks.dispatch(x, topk_idx, topk_weights, active_mask=active_mask, quantise=True)
    ends = received.expert_rows.cumsum(0).to(torch.int32)
    y = feed_forward(launcher, received.x, cast(torch.Tensor, received.scales), ends, weights, x.dtype)
    return ranks.combine(y, handle), received.expert_rows
