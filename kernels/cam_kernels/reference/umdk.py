"""UMDK CAM's published op contract, as functions of all ranks' inputs (see adapters/umdk).

Experts divide by ranks there: rank r owns experts [r * E / ranks, (r + 1) * E / ranks).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cam_kernels.reference.combine import combine
from cam_kernels.reference.dispatch import Received, dispatch, expert_ranges


def get_dispatch_layout(topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """topk_idx int64 [T, K], -1 = not selected -> num_tokens_per_expert int32 [E], send_token_idx int32 [T,
    K].

    send_token_idx[t, k]: position of (t, k) among the rows that this rank sends to that expert; -1 if not
    selected.
    """
    counts = [0] * num_experts
    position = torch.full(topk_idx.shape, -1, dtype=torch.int32)
    for token, row in enumerate(topk_idx.tolist()):
        for k, expert in enumerate(row):
            if expert >= 0:
                position[token, k] = counts[expert]
                counts[expert] += 1
    return torch.tensor(counts, dtype=torch.int32), position


def moe_dispatch_prefill(
    xs: Sequence[Tensor], topk_idxs: Sequence[Tensor], num_experts: int, *, use_quant: bool
) -> list[tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]]:
    """-> for each rank: recv_x, dynamic_scales_out, expand_idx_out, recv_count, recv_tokens_per_expert.

    recv_x [R, H] (int8 with use_quant): by local expert, source rank, token. dynamic_scales_out float32 [R],
    None where the contract leaves it open (no quantisation). expand_idx_out int32 [R * 3]: (source rank,
    token, k) of each row.
    recv_count int32 [E]: running sum of received rows, local expert major, source rank minor.
    recv_tokens_per_expert int64 [E / ranks].
    """
    world = len(xs)
    results = []
    parts = dispatch(xs, topk_idxs, None, num_experts, layout="expert", quant="int8" if use_quant else None)
    for part, mine in zip(parts, expert_ranges(num_experts, world), strict=True):
        counts = [int((topk_idxs[rank] == expert).sum()) for expert in mine for rank in range(world)]
        running = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
        results.append((part.x, part.scales, part.source.flatten(), running, part.expert_counts))
    return results


def moe_combine_prefill(
    ys: Sequence[Tensor], topk_idxs: Sequence[Tensor], topk_weights: Sequence[Tensor], num_experts: int
) -> list[Tensor]:
    """ys[rank] [R, H], rows as moe_dispatch_prefill gave them -> [T, H]: weighted by topk_weights float32 [T,
    K].
    """
    # Only the routes matter here; the tokens that were dispatched do not.
    nothing = [torch.zeros(idx.shape[0], 1) for idx in topk_idxs]
    parts: list[Received] = dispatch(nothing, topk_idxs, None, num_experts, layout="expert")
    return combine(ys, parts, topk_weights, layout="expert")
