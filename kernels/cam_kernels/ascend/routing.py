"""Host side of the dispatch layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cam_kernels.ascend.kernels.layout import ASSIGN_POSITIONS, COUNT_EXPERTS, SCAN_HISTOGRAMS
from cam_kernels.ascend.launch import Launcher
from cam_kernels.ascend.window import power_of_two

_SCAN_BLOCK = 128


@dataclass(frozen=True)
class Layout:
    """counts int32 [E]: rows of this rank per expert. position int32 [T, K]: place of (t, k) among them, or -1."""

    counts: torch.Tensor
    position: torch.Tensor


def dispatch_layout(
    launcher: Launcher, topk_idx: torch.Tensor, experts: int, active_mask: torch.Tensor | None = None
) -> Layout:
    """Count and place the rows of topk_idx [T, K] (int32 or int64, contiguous, -1 = not selected).

    active_mask [T] bool: tokens with False take no part. The grid is the launcher's cores; the result does not depend
    on it.
    """
    device, (tokens, topk) = topk_idx.device, topk_idx.shape
    lanes = max(8, power_of_two(experts))
    blocks = max(1, min(launcher.cores, tokens))
    rows = -(-tokens // blocks)
    masked = active_mask is not None
    active = torch.ones(1, dtype=torch.int8, device=device) if active_mask is None else active_mask.view(torch.int8)
    histogram = torch.empty(blocks, lanes, dtype=torch.int32, device=device)
    base = torch.empty_like(histogram)
    counts = torch.empty(lanes, dtype=torch.int32, device=device)
    position = torch.empty(tokens, topk, dtype=torch.int32, device=device)
    tile = min(lanes, _SCAN_BLOCK)
    launcher.launch(COUNT_EXPERTS, blocks, topk_idx, active, histogram, tokens, topk, rows, EP=lanes, MASKED=masked)
    launcher.launch(SCAN_HISTOGRAMS, lanes // tile, histogram, base, counts, blocks, EP=lanes, EB=tile)
    launcher.launch(
        ASSIGN_POSITIONS, blocks, topk_idx, active, base, position, tokens, topk, rows, KP=power_of_two(topk), EP=lanes,
        MASKED=masked,
    )  # fmt: skip
    return Layout(counts[:experts], position)
