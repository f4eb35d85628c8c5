"""Expert parallelism as a user writes it over any all-to-all: what CAM is compared with.

dispatch: argsort by expert, counts exchange, gather, all_to_all of rows, regroup by expert.
combine: undo the regrouping, all_to_all back, undo the sort, weighted sum. Every tensor is fresh, as it is in
a model. The weighted sum is one batched matmul in the rows' dtype, the fastest way that plain torch offers.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from cam.bench.wires import Wire


@dataclass(frozen=True)
class Experts:
    """Which rank owns how many experts: contiguous, the first `experts % ranks` ranks own one more."""

    per_rank: tuple[int, ...]

    @classmethod
    def spread(cls, experts: int, ranks: int) -> "Experts":
        least, more = divmod(experts, ranks)
        return cls(tuple(least + (rank < more) for rank in range(ranks)))

    @cached_property
    def owners(self) -> torch.Tensor:
        """[E] int64: the rank of each expert."""
        return torch.arange(len(self.per_rank)).repeat_interleave(torch.tensor(self.per_rank))


@dataclass(frozen=True)
class Route:
    """What combine needs to go back.

    order: [T * K] position of each sent row in the flattened topk_idx. regroup: [R] received row of each row
    in expert order. splits / out_splits: rows sent to / received from each rank.
    """

    order: torch.Tensor
    regroup: torch.Tensor
    splits: list[int]
    out_splits: list[int]


def find_route(topk_idx: torch.Tensor, experts: Experts, rank: int, wire: Wire) -> Route:
    """Sorts by expert and exchanges the counts. topk_idx: [T, K] without -1."""
    flat = topk_idx.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.bincount(minlength=sum(experts.per_rank))
    world, local = len(experts.per_rank), experts.per_rank[rank]
    theirs = counts.new_empty(world * local)
    wire.all_to_all(theirs, counts, [local] * world, list(experts.per_rank))
    by_source = theirs.view(world, local)
    # Rows arrive by source, then expert; they are wanted by expert, then source.
    expert_of_row = torch.arange(local).repeat(world).repeat_interleave(theirs)
    return Route(
        order,
        expert_of_row.argsort(stable=True),
        counts.new_zeros(world).index_add_(0, experts.owners, counts).tolist(),
        by_source.sum(1).tolist(),
    )


def dispatch(
    x: torch.Tensor, topk_idx: torch.Tensor, experts: Experts, rank: int, wire: Wire
) -> tuple[torch.Tensor, Route]:
    """[T, H] -> [R, H] in the order of CAM's expert layout: local expert, source rank, token, k."""
    route = find_route(topk_idx, experts, rank, wire)
    sent = x.index_select(0, route.order // topk_idx.shape[1])
    received = x.new_empty(sum(route.out_splits), x.shape[1])
    wire.all_to_all(received, sent, route.out_splits, route.splits)
    return received.index_select(0, route.regroup), route


def send_back(y: torch.Tensor, route: Route, topk: int, wire: Wire) -> torch.Tensor:
    """[R, H] -> [T, K, H]: each (token, k)'s row at its token's rank."""
    ungrouped = torch.empty_like(y)
    ungrouped.index_copy_(0, route.regroup, y)
    returned = y.new_empty(len(route.order), y.shape[1])
    wire.all_to_all(returned, ungrouped, route.splits, route.out_splits)
    by_token = torch.empty_like(returned)
    by_token.index_copy_(0, route.order, returned)
    return by_token.view(-1, topk, y.shape[1])


def combine(y: torch.Tensor, topk_weights: torch.Tensor, route: Route, wire: Wire) -> torch.Tensor:
    """[R, H] -> [T, H]."""
    rows = send_back(y, route, topk_weights.shape[1], wire)
    return torch.bmm(topk_weights.to(y.dtype).unsqueeze(1), rows).squeeze(1)
