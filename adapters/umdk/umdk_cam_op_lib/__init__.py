"""torch.ops.umdk_cam_op_lib on CAM: the op contract that openEuler UMDK publishes for its CAM kernels, on CPU tensors.

    get_dispatch_layout   how many rows this rank sends each expert, and each (token, k)'s place among them
    moe_dispatch_prefill  rows to the experts' ranks, ordered by local expert, source rank, token
    moe_combine_prefill   their weighted sum, back at the tokens' rank

The contract is stateless: what a combine needs, the caller carries (expand_idx). `group_ep` is the name of an open CAM
group. Ops that the vendor's library has defined already are left to it.
"""

import torch
from torch import Tensor

import cam
from cam.errors import InputError
from cam.ops import ep as _ep  # noqa: F401  # registers torch.ops.cam.ep_*
from cam.ops.placement import expert_range

NAMESPACE = "umdk_cam_op_lib"
_GROUP_TIMEOUT = -1.0

_SCHEMAS = {
    "get_dispatch_layout": "(Tensor topk_idx, int num_experts, int num_ranks) -> (Tensor num_tokens_per_expert, "
    "Tensor send_token_idx)",
    "moe_dispatch_prefill": "(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor num_tokens_per_expert, "
    "Tensor send_token_idx_small, str group_ep, int rank, int num_ranks, bool use_quant) -> (Tensor recv_x, "
    "Tensor dynamic_scales_out, Tensor expand_idx_out, Tensor recv_count, Tensor recv_tokens_per_expert)",
    "moe_combine_prefill": "(Tensor x, Tensor topk_idx, Tensor topk_weights, Tensor src_idx, Tensor send_head, "
    "str group_ep, int rank, int num_ranks) -> Tensor",
}


def get_dispatch_layout(topk_idx: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """topk_idx int64 [T, K], -1 = not selected.

    Returns num_tokens_per_expert int32 [E], and send_token_idx int32 [T, K]: the place of (t, k) among this rank's rows
    for that expert, -1 where not selected.
    """
    _check_topk_idx(topk_idx)
    if num_ranks < 1 or num_experts < 1:
        raise InputError(f"num_experts and num_ranks must be >= 1, got {num_experts} and {num_ranks}")
    flat = topk_idx.flatten()
    if flat.numel() and not -1 <= int(flat.min()) <= int(flat.max()) < num_experts:
        raise InputError(
            f"topk_idx must lie in -1..{num_experts - 1}, got {int(flat.min())}..{int(flat.max())} (knob: num_experts)"
        )
    counts = torch.bincount(flat + 1, minlength=num_experts + 1)
    order = flat.argsort(stable=True)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.numel()) - first[flat[order] + 1]
    place[flat < 0] = -1
    return counts[1:].to(torch.int32), place.to(torch.int32).view(topk_idx.shape)


def moe_dispatch_prefill(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_tokens_per_expert: Tensor,
    send_token_idx_small: Tensor,
    group_ep: str,
    rank: int,
    num_ranks: int,
    use_quant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [T, H] bf16/fp16/fp32; num_tokens_per_expert and send_token_idx_small from get_dispatch_layout.

    topk_weights float32 [T, K] must fit topk_idx; the contract has no output for them, combine applies them.
    Returns recv_x [R, H] (int8 with use_quant), dynamic_scales_out float32 [R] (1 without use_quant), expand_idx_out
    int32 [R * 3] (source rank, token, k), recv_count int32 (running sum of received rows, local expert major, source
    rank minor), recv_tokens_per_expert int64 [local experts].
    """
    _check_group(group_ep, rank, num_ranks)
    _check_routing(topk_idx, topk_weights)
    num_experts = num_tokens_per_expert.shape[0]
    counts, place = get_dispatch_layout(topk_idx, num_experts, num_ranks)
    if not torch.equal(counts, num_tokens_per_expert.to(counts.dtype)):
        raise InputError("num_tokens_per_expert is not get_dispatch_layout's for this topk_idx")
    if not torch.equal(place, send_token_idx_small.to(place.dtype)):
        raise InputError("send_token_idx_small is not get_dispatch_layout's for this topk_idx")
    recv_x, scales, source, _, _, expert_counts, source_counts, _, _ = torch.ops.cam.ep_dispatch(
        x,
        None,
        topk_idx,
        None,
        None,
        group_ep,
        num_experts,
        len(expert_range(num_experts, num_ranks, rank)),
        num_ranks,
        "expert",
        "int8" if use_quant else "none",
        1,
        -1,
        _GROUP_TIMEOUT,
    )
    return (
        recv_x,
        scales if use_quant else torch.ones(recv_x.shape[0], dtype=torch.float32),
        source.flatten(),
        source_counts.flatten().cumsum(0).to(torch.int32),
        expert_counts,
    )


def moe_combine_prefill(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    src_idx: Tensor,
    send_head: Tensor,
    group_ep: str,
    rank: int,
    num_ranks: int,
) -> Tensor:
    """x [R, H]: the experts' rows; src_idx int32 [R * 3] and send_head: dispatch's expand_idx_out and recv_count.

    Returns [T, H]: sum over k ascending of topk_weights[t, k] * row in fp32, rounded once.
    """
    _check_group(group_ep, rank, num_ranks)
    _check_routing(topk_idx, topk_weights)
    rows = x.shape[0]
    if src_idx.numel() != rows * 3 or src_idx.dtype != torch.int32:
        raise InputError(f"src_idx must be int32 [{rows * 3}] for x's {rows} rows, got {tuple(src_idx.shape)}")
    if send_head.numel() and int(send_head[-1]) != rows:
        raise InputError(f"send_head ends with {int(send_head[-1])} rows, but x has {rows}")
    tokens, topk = topk_idx.shape
    route = torch.ops.cam.ep_route(src_idx.view(rows, 3), tokens, topk, group_ep, _GROUP_TIMEOUT)
    out, _ = torch.ops.cam.ep_combine(
        x,
        route,
        torch.empty(0, dtype=torch.int64),
        topk_weights,
        None,
        None,
        None,
        group_ep,
        "expert",
        1,
        _GROUP_TIMEOUT,
    )
    return out


def _check_topk_idx(topk_idx: Tensor) -> None:
    if topk_idx.dim() != 2 or topk_idx.dtype != torch.int64:
        raise InputError(f"topk_idx must be int64 [T, K], got {topk_idx.dtype} {tuple(topk_idx.shape)}")


def _check_routing(topk_idx: Tensor, topk_weights: Tensor) -> None:
    _check_topk_idx(topk_idx)
    if topk_weights.shape != topk_idx.shape or topk_weights.dtype != torch.float32:
        raise InputError(
            f"topk_weights must be float32 {tuple(topk_idx.shape)} like topk_idx, got {topk_weights.dtype} "
            f"{tuple(topk_weights.shape)}"
        )


def _check_group(group_ep: str, rank: int, num_ranks: int) -> None:
    group = cam.group(group_ep)
    if (rank, num_ranks) != (group.rank, group.size):
        raise InputError(
            f"rank={rank}, num_ranks={num_ranks}, but this process is rank {group.rank} of {group.size} in group "
            f"{group_ep!r}"
        )


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    implementations = {
        "get_dispatch_layout": get_dispatch_layout,
        "moe_dispatch_prefill": moe_dispatch_prefill,
        "moe_combine_prefill": moe_combine_prefill,
    }
    for name, implementation in implementations.items():
        if hasattr(getattr(torch.ops, NAMESPACE), name):
            continue  # the vendor's library is loaded
        library.define(name + _SCHEMAS[name])
        library.impl(name, implementation, "CPU")
    return library


_library = _register()
