"""Dispatch and combine as an all-to-all around torch_npu's permutations: any batch size, and training.

    permute by expert      npu_moe_token_permute, or npu_moe_init_routing_v2 with int8 quantisation on the way
    counts, then rows      all_to_all_single over HCCL; the counts come to the host, which is the one wait
    group by local expert  a stable sort of what came by source rank
    combine                the same way back, then npu_moe_token_unpermute with the router's weights

Not run on hardware; runs in tests over Gloo, with the three npu_ operations replaced by plain torch.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from cam.npu.routes import Routes, Rows
from cam.ops.placement import expert_range


@dataclass(frozen=True)
class Exchange:
    """What an all-to-all moved, for the way back. `order` [R]: row i of the result came as row order[i]."""

    sorted_indices: Tensor
    order: Tensor
    sent: list[int]
    received: list[int]


class AllToAll:
    """One rank's side. process_group: of the ranks, of any backend that has all_to_all_single."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, world: int, num_experts: int) -> None:
        self._group, self._rank, self._world, self._num_experts = process_group, rank, world, num_experts
        self._ranges = [expert_range(num_experts, world, each) for each in range(world)]

    def dispatch(self, x: Tensor, routes: Routes, quant: str | None) -> tuple[Rows, Exchange]:
        """x [T, H] -> the rows of this rank's experts, by local expert, source rank, token, k."""
        # Slots that select nothing sort behind all experts and are not sent.
        experts = torch.where(routes.experts < 0, self._num_experts, routes.experts).to(torch.int32)
        if quant == "int8":
            permuted, sorted_indices, _, scales = torch.ops.npu.npu_moe_init_routing_v2(
                x,
                experts,
                active_num=experts.numel(),
                expert_num=self._num_experts + 1,
                expert_tokens_num_type=1,
                expert_tokens_num_flag=True,
                quant_mode=1,
                active_expert_range=[0, self._num_experts + 1],
                row_idx_type=0,
            )
        else:
            permuted, sorted_indices = torch.ops.npu.npu_moe_token_permute(x, experts)
            scales = None
        counts = torch.bincount(experts.flatten(), minlength=self._num_experts + 1)[:-1]
        theirs, sent, received = self._exchange_counts(counts)
        total = sum(sent)
        rows = self._move(permuted[:total], sent, received)
        slots = self._slots(sorted_indices, total, routes)
        facts = self._move(slots, sent, received)
        local = theirs.shape[1]
        expert_of_row = torch.arange(local, device=x.device).repeat(self._world).repeat_interleave(theirs.flatten())
        order = expert_of_row.argsort(stable=True)
        source = self._source(facts, received, routes)
        result = Rows(
            x=rows.index_select(0, order),
            scales=None if scales is None else self._move(scales[:total, None], sent, received)[:, 0][order],
            expert_counts=theirs.sum(0),
            source_counts=theirs.t().contiguous(),
            source=source[order],
            topk_weights=None if routes.weights is None else facts[:, 1].contiguous().view(torch.float32)[order],
        )
        return result, Exchange(sorted_indices, order, sent, received)

    def combine(self, y: Tensor, exchange: Exchange, weights: Tensor | None, slots: tuple[int, int]) -> Tensor:
        """y [R, H'] -> [T, H']: the sum over k of weights [T, K] (1 when None) times the slot's row.

        slots: (T, K) of the dispatch. Slots that were not sent count as zero rows.
        """
        back = self._back(y, exchange)
        tokens, topk = slots
        # The permuted form has a row for every slot; those that were not sent come last.
        full = torch.cat([back, back.new_zeros(tokens * topk - back.shape[0], back.shape[1])])
        if weights is None:
            weights = torch.ones(tokens, topk, dtype=torch.float32, device=y.device)
        result: Tensor = torch.ops.npu.npu_moe_token_unpermute(full, exchange.sorted_indices, probs=weights)
        return result

    def row_values(self, values: Tensor, exchange: Exchange, slots: tuple[int, int]) -> Tensor:
        """values fp32 [R] of received rows -> [T, K] at their tokens, 0 where nothing was sent."""
        back = self._back(values[:, None], exchange)[:, 0]
        full = torch.cat([back, back.new_zeros(slots[0] * slots[1] - back.shape[0])])
        return full.index_select(0, exchange.sorted_indices.long()).view(slots)

    def _back(self, rows: Tensor, exchange: Exchange) -> Tensor:
        arrived_order = rows.index_select(0, exchange.order.argsort())
        return self._move(arrived_order, exchange.received, exchange.sent)

    def _exchange_counts(self, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """counts [E] of rows this rank sends -> [W, E_local] rows that come, and the totals by rank of both."""
        lengths = [len(each) for each in self._ranges]
        local = lengths[self._rank]
        theirs = counts.new_empty(self._world * local)
        dist.all_to_all_single(theirs, counts, [local] * self._world, lengths, group=self._group)
        theirs = theirs.view(self._world, local)
        on_host = counts.tolist()
        sent = [sum(on_host[each.start : each.stop]) for each in self._ranges]
        return theirs, sent, theirs.sum(1).tolist()

    def _slots(self, sorted_indices: Tensor, total: int, routes: Routes) -> Tensor:
        """int32 [total, 2] for the rows in the order they are sent: slot t * K + k, and the bits of its weight."""
        slot = sorted_indices.argsort()[:total].to(torch.int32)
        if routes.weights is None:
            return torch.stack([slot, torch.zeros_like(slot)], 1)
        bits = routes.weights.detach().contiguous().view(torch.int32).flatten()
        return torch.stack([slot, bits[slot.long()]], 1)

    def _source(self, facts: Tensor, received: list[int], routes: Routes) -> Tensor:
        topk = routes.experts.shape[1]
        ranks = torch.arange(self._world, dtype=torch.int32, device=facts.device)
        rank = ranks.repeat_interleave(torch.tensor(received, device=facts.device))
        return torch.stack([rank, facts[:, 0] // topk, facts[:, 0] % topk], 1)

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result: Tensor = _Move.apply(rows, sent, received, self._group)  # type: ignore[no-untyped-call]
        return result


class _Move(torch.autograd.Function):
    """all_to_all_single of rows of any type; its gradient is the same move backwards."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group  # type: ignore[attr-defined]
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group)  # type: ignore[attr-defined]
        return back, None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    # As bytes: backends differ in the types they know.
    given = rows.contiguous().view(torch.uint8)
    taken = given.new_empty(sum(received), *given.shape[1:])
    dist.all_to_all_single(taken, given, received, sent, group=group)
    return taken.view(rows.dtype)
