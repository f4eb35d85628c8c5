"""What a dispatch gives: the rows that came, and the handle that leads them back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from cam.errors import InputError


@dataclass(frozen=True, eq=False)
class Received:
    """The rows that a rank received. R rows, E_local experts on this rank, K selections a token, W ranks.

    x: [R, H] rows, window memory. scales: None; [R] float32 (int8); [R, ceil(H/128)] float32 (fp8); or as forwarded.

    Expert layout: rows ordered by local expert, then source rank, then token, then k, one per (token, k); each expert's
    rows padded with zero rows to a multiple of the buffer's expert_alignment.
    Rank layout: rows ordered by source rank, then token, one per token that selects at least one expert here.
    """

    x: Tensor
    scales: Tensor | None
    #: int64 [E_local]: (token, k) selections of each local expert; padding rows not counted.
    expert_counts: Tensor
    #: int32 [R, 3]: source rank, token there, k (rank layout: -1). Padding rows: -1, -1, -1.
    source: Tensor
    #: int64, expert layout [E_local, W]: rows of each expert from each rank; rank layout [1, W]: rows from each rank.
    source_counts: Tensor
    #: Rank layout: int64 [R, K], the local index of each selected expert that lives here, else -1. Else None.
    topk_idx: Tensor | None
    #: Expert layout: float32 [R]; rank layout: float32 [R, K], 0 where topk_idx is -1. None if no weights were given.
    topk_weights: Tensor | None

    @property
    def expert_counts_list(self) -> list[int]:
        """expert_counts as a list; they are in local memory, nothing is exchanged for it."""
        counts: list[int] = self.expert_counts.tolist()
        return counts


class Handle:
    """Leads rows back to their tokens: opaque, good for any number of combines and repeated dispatches, and for the
    backward pass. Holds no rows.

    release() drops what it holds; it may be called repeatedly, and need not be called at all.
    """

    __slots__ = ("anchor", "expert_counts", "made_by", "received", "route", "rows", "topk_weights")

    def __init__(
        self,
        route: Tensor,
        rows: int,
        expert_counts: Tensor,
        topk_weights: Tensor | None,
        anchor: Tensor,
        received: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
        made_by: tuple[str, int, str, int],
    ) -> None:
        self.route: Tensor | None = route
        self.rows = rows
        self.expert_counts = expert_counts
        self.topk_weights = topk_weights
        self.anchor = anchor
        #: source, source_counts, topk_idx, topk_weights of the rows, for a repeated dispatch.
        self.received = received
        #: The buffer's group, num_experts, layout and expert_alignment: with others it would lead elsewhere.
        self.made_by = made_by

    def continued(self, anchor: Tensor) -> "Handle":
        """The same routing, for rows whose gradients go through `anchor`."""
        if self.route is None:
            raise InputError("this handle has been released")
        return Handle(self.route, self.rows, self.expert_counts, self.topk_weights, anchor, self.received, self.made_by)

    def release(self) -> None:
        nothing = torch.empty(0)
        self.route = self.topk_weights = None
        self.expert_counts = self.anchor = nothing
        self.received = (nothing, nothing, None, None)
        self.rows = 0
