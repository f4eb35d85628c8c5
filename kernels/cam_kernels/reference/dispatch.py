"""Dispatch: which rank receives which rows, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cam_kernels.reference.quant import quant_fp8, quant_int8

#: A rank's tokens: [T, H], or (values [T, Hq], scales [T, S] or [T]) that are already quantised.
Tokens = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Received:
    """What one rank has after a dispatch: R rows that came in, and where its own T tokens went.

    x: [R, H]. scales: None | float32 [R] (int8) | float32 [R, ceil(H / 128)] (fp8) | as given.
    expert_counts: int64 [E_local]: how many (token, k) chose each local expert; padding is not counted.
    source: int32 [R, 3]: (rank, token, k); k = -1 in the rank layout, all -1 in a padding row.
    topk_idx: rank layout: int64 [R, K], local expert or -1; expert layout: None.
    topk_weights: rank layout: float32 [R, K], 0 where not local; expert layout: float32 [R]; None if none
    were given.
    route: int64 [T, K, 2]: (rank, row there) of this rank's own (token, k); (-1, -1) = not sent.
    """

    x: Tensor
    scales: Tensor | None
    expert_counts: Tensor
    source: Tensor
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    route: Tensor


def expert_ranges(num_experts: int, world: int) -> list[range]:
    """The experts of each rank: contiguous, and the first num_experts % world ranks own one more."""
    each, more = divmod(num_experts, world)
    starts = [rank * each + min(rank, more) for rank in range(world + 1)]
    return [range(starts[rank], starts[rank + 1]) for rank in range(world)]


def dispatch(
    xs: Sequence[Tokens],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
    num_experts: int,
    *,
    layout: str,
    quant: str | None = None,
    expert_alignment: int = 1,
    active_masks: Sequence[Tensor | None] | None = None,
) -> list[Received]:
    """xs[rank] [T, H] or (values, scales); topk_idxs[rank] int [T, K], -1 = not selected; topk_weights[rank]
    [T, K].

    layout "expert": one row per (token, k), ordered by local expert, source rank, token, k; the rows of each
    expert are padded with zero rows to a multiple of expert_alignment.
    layout "rank": one row per (token, rank owning at least one of its experts), ordered by source rank,
    token.
    """
    world = len(xs)
    masks: Sequence[Tensor | None] = active_masks if active_masks is not None else [None] * world
    payloads = [_quantised(x, quant) for x in xs]
    chosen = sorted(
        (expert, rank, token, k)
        for rank, idx in enumerate(topk_idxs)
        for token, row in enumerate(idx.tolist())
        for k, expert in enumerate(row)
        if expert >= 0 and _active(masks[rank], token)
    )
    routes = [torch.full((*idx.shape, 2), -1, dtype=torch.int64) for idx in topk_idxs]
    received = []
    for me, mine in enumerate(expert_ranges(num_experts, world)):
        here = [choice for choice in chosen if choice[0] in mine]
        counts = [sum(choice[0] == expert for choice in here) for expert in mine]
        sources, local_idx = [], None
        if layout == "expert":
            for expert, count in zip(mine, counts, strict=True):
                sources += [choice[1:] for choice in here if choice[0] == expert]
                sources += [(-1, -1, -1)] * (-count % expert_alignment)
            row_of = {source: row for row, source in enumerate(sources)}
            for _, rank, token, k in here:
                routes[rank][token, k] = torch.tensor([me, row_of[rank, token, k]])
        else:
            sources = [
                (rank, token, -1) for rank, token in sorted({(rank, token) for _, rank, token, _ in here})
            ]
            row_of = {source: row for row, source in enumerate(sources)}
            local_idx = torch.full((len(sources), topk_idxs[me].shape[1]), -1, dtype=torch.int64)
            for expert, rank, token, k in here:
                routes[rank][token, k] = torch.tensor([me, row_of[rank, token, -1]])
                local_idx[row_of[rank, token, -1], k] = expert - mine.start
        weights = None
        if topk_weights is not None and layout == "expert":
            weights = _gather(
                [w.reshape(-1, 1) for w in topk_weights], [_nth(s, topk_idxs) for s in sources]
            )[:, 0]
        elif topk_weights is not None and local_idx is not None:
            weights = torch.where(local_idx >= 0, _gather(topk_weights, sources), 0.0)
        first_scales = payloads[0][1]
        received.append(
            Received(
                x=_gather([values for values, _ in payloads], sources),
                scales=None
                if first_scales is None
                else _gather([s for _, s in payloads if s is not None], sources),
                expert_counts=torch.tensor(counts, dtype=torch.int64),
                source=torch.tensor(sources, dtype=torch.int32).reshape(-1, 3),
                topk_idx=local_idx,
                topk_weights=weights,
                route=routes[me],
            )
        )
    return received


def _quantised(x: Tokens, quant: str | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, tuple):
        return x
    if quant == "int8":
        return quant_int8(x)
    return quant_fp8(x) if quant == "fp8" else (x, None)


def _active(mask: Tensor | None, token: int) -> bool:
    return mask is None or bool(mask[token])


def _nth(source: tuple[int, int, int], topk_idxs: Sequence[Tensor]) -> tuple[int, int, int]:
    """The source of a row, with (token, k) as one index into the flattened [T * K] of its rank."""
    rank, token, k = source
    return (rank, token * topk_idxs[rank].shape[1] + k, -1) if rank >= 0 else source


def _gather(tables: Sequence[Tensor], sources: Sequence[tuple[int, int, int]]) -> Tensor:
    """tables[rank][token] for each source (rank, token, _); zeros for padding rows (rank -1)."""
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + table.shape[0])
    if tables[0].dtype == torch.float8_e4m3fn:  # no cat and no indexing in every torch: as bytes
        return _gather([table.contiguous().view(torch.uint8) for table in tables], sources).view(
            tables[0].dtype
        )
    flat = torch.cat([*tables, tables[0].new_zeros(1, *tables[0].shape[1:])])
    rows = [starts[rank] + token if rank >= 0 else starts[-1] for rank, token, _ in sources]
    return flat[torch.tensor(rows, dtype=torch.int64)]
