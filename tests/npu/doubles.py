"""torch_npu's operations in plain torch, as the vendor documents them, so that the host side runs on CPU tensors.

The MC2 pair exchanges rows over the process group whose "HCCL name" a rank has registered here; it is as slow and plain
as can be. What these doubles say about the real kernels is only what their documentation says.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cam_kernels import reference
from tests.npu import torch_npu_wheel

OPS = [
    "npu_moe_token_permute",
    "npu_moe_token_unpermute",
    "npu_moe_init_routing_v2",
    "npu_moe_distribute_dispatch_v2",
    "npu_moe_distribute_combine_v2",
]
GROUPS: dict[str, Any] = {}
_installed: list[torch.library.Library] = []


def install() -> None:
    """Register them. Once per process; a second call does nothing."""
    path = torch_npu_wheel.wheel()
    if _installed or path is None:
        return
    library = torch_npu_wheel.define(OPS, path)
    for name in OPS:
        # No autograd of their own: where the real ones have it, plain torch gives it.
        library.impl(name, globals()[f"_{name.removeprefix('npu_')}"], "CompositeImplicitAutograd")
    _installed.append(library)


def _moe_token_permute(
    tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[Tensor, Tensor]:
    assert num_out_tokens is None
    assert not padded_mode
    order = indices.flatten().argsort(stable=True)
    return tokens[order // indices.shape[1]], order.argsort().to(torch.int32)


def _moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    assert probs is not None
    assert probs.dtype == torch.float32
    assert restore_shape is None
    assert not padded_mode
    rows = permuted_tokens[sorted_indices.long()].float().view(*probs.shape, permuted_tokens.shape[1])
    total = torch.zeros_like(rows[:, 0])
    for k in range(probs.shape[1]):
        total = total + probs[:, k, None] * rows[:, k]
    return total.to(permuted_tokens.dtype)


def _moe_init_routing_v2(x: Tensor, expert_idx: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = options["expert_num"]
    assert expert_idx.dtype == torch.int32
    assert options["active_num"] == expert_idx.numel()
    assert options["active_expert_range"] == [0, count]
    assert (options["expert_tokens_num_type"], options["expert_tokens_num_flag"]) == (1, True)
    assert (options["quant_mode"], options.get("row_idx_type", 0)) == (1, 0)
    permuted, sorted_indices = _moe_token_permute(x, expert_idx)
    values, scales = reference.quant_int8(permuted)
    return values, sorted_indices, torch.bincount(expert_idx.flatten(), minlength=count), scales


def _moe_distribute_dispatch_v2(
    x: Tensor, expert_ids: Tensor, group: str, world: int, rank: int, experts: int, **options: Any
) -> tuple[Tensor, ...]:
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (x, expert_ids), group=GROUPS[group])
    part = reference.dispatch(
        [each for each, _ in everyone],
        [ids for _, ids in everyone],
        None,
        experts,
        layout="expert",
        quant="int8" if options.get("quant_mode", 0) == 2 else None,
    )[rank]
    local, topk = experts // world, expert_ids.shape[1]
    capacity = options["global_bs"] * min(local, topk)
    rows = part.x.new_zeros(capacity, x.shape[1])
    rows[: len(part.x)] = part.x
    scales = torch.zeros(capacity)
    if part.scales is not None:
        scales[: len(part.x)] = part.scales
    assist = torch.full((capacity * 128,), -1, dtype=torch.int32)
    assist[: part.source.numel()] = part.source.flatten()
    mine = range(rank * local, (rank + 1) * local)
    counts = torch.tensor([int((ids == expert).sum()) for expert in mine for _, ids in everyone])
    nothing = torch.zeros(1)
    return rows, scales, assist, part.expert_counts, counts.cumsum(0).to(torch.int32), nothing.int(), nothing


def _moe_distribute_combine_v2(
    expand_x: Tensor,
    expert_ids: Tensor,
    assist: Tensor,
    recv_counts: Tensor,
    weights: Tensor,
    group: str,
    world: int,
    rank: int,
    experts: int,
    **options: Any,
) -> Tensor:
    rows = int(recv_counts[-1])
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (expand_x[:rows], assist[: rows * 3].view(-1, 3)), group=GROUPS[group])
    total = torch.zeros(expert_ids.shape[0], expand_x.shape[1])
    slots = torch.zeros(*expert_ids.shape, expand_x.shape[1])
    for values, source in everyone:
        mine = source[:, 0] == rank
        slots[source[mine, 1].long(), source[mine, 2].long()] = values[mine].float()
    for k in range(expert_ids.shape[1]):
        total = total + weights[:, k, None] * slots[:, k]
    return total.to(expand_x.dtype)
