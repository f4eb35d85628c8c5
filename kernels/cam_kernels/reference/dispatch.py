"""Dispatch: which rank receives which rows, in which order."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cam_kernels.reference.quant import quant_fp8, quant_int8

#: A rank's tokens: [T, H], or (values [T, Hq], scales [T, S] or [T]) that are already quantised.
Tokens = Tensor | tuple[Tensor, Tensor]
#: Where a row comes from: (rank, token, k). k = -1: the whole token. All -1: nowhere, padding.
Source = tuple[int, int, int]
#: One selection: (expert, rank, token, k).
Choice = tuple[int, int, int, int]


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
    payloads = [_quantised(x, quant) for x in xs]
    scales = [scale for _, scale in payloads if scale is not None]
    chosen = sorted(
        (expert, rank, token, k)
        for rank, idx in enumerate(topk_idxs)
        for token, row in enumerate(idx.tolist())
        for k, expert in enumerate(row)
        if expert >= 0 and (active_masks is None or _active(active_masks[rank], token))
    )
    routes = [[[(-1, -1)] * idx.shape[1] for _ in range(idx.shape[0])] for idx in topk_idxs]
    parts = []
    for me, mine in enumerate(expert_ranges(num_experts, world)):
        here = [(expert - mine.start, rank, token, k) for expert, rank, token, k in chosen if expert in mine]
        counts = [len(group) for group in _by_expert(here, len(mine))]
        if layout == "expert":
            sources = _expert_rows(here, len(mine), expert_alignment)
        else:
            sources = sorted({(rank, token, -1) for _, rank, token, _ in here})
        row_of = {source: row for row, source in enumerate(sources)}
        for _, rank, token, k in here:
            routes[rank][token][k] = (me, row_of[rank, token, k if layout == "expert" else -1])
        idx = _local_idx(here, row_of, topk_idxs[me].shape[1]) if layout == "rank" else None
        parts.append(
            Received(
                x=_gather([values for values, _ in payloads], sources),
                scales=_gather(scales, sources) if scales else None,
                expert_counts=torch.tensor(counts, dtype=torch.int64),
                source=torch.tensor(sources, dtype=torch.int32).reshape(-1, 3),
                topk_idx=idx,
                topk_weights=None if topk_weights is None else _row_weights(topk_weights, sources, idx),
                route=torch.empty(0),
            )
        )
    return [
        replace(part, route=torch.tensor(route, dtype=torch.int64).reshape(*idx.shape, 2))
        for part, route, idx in zip(parts, routes, topk_idxs, strict=True)
    ]


def _by_expert(here: Sequence[Choice], experts: int) -> list[list[Source]]:
    """For each local expert, the (rank, token, k) that chose it, in order."""
    groups: list[list[Source]] = [[] for _ in range(experts)]
    for expert, rank, token, k in here:
        groups[expert].append((rank, token, k))
    return groups


def _expert_rows(here: Sequence[Choice], experts: int, alignment: int) -> list[Source]:
    rows: list[Source] = []
    for group in _by_expert(here, experts):
        rows += group + [(-1, -1, -1)] * (-len(group) % alignment)
    return rows


def _local_idx(here: Sequence[Choice], row_of: dict[Source, int], topk: int) -> Tensor:
    idx = torch.full((len(row_of), topk), -1, dtype=torch.int64)
    for expert, rank, token, k in here:
        idx[row_of[rank, token, -1], k] = expert
    return idx


def _row_weights(topk_weights: Sequence[Tensor], sources: Sequence[Source], idx: Tensor | None) -> Tensor:
    """[R] of the (token, k) that each row is of; with local experts idx [R, K]: of each (token, k) that is local."""
    if idx is not None:
        return torch.where(idx >= 0, _gather(topk_weights, sources), 0.0)
    topk = topk_weights[0].shape[1]
    flat = [(rank, token * topk + k if rank >= 0 else -1, -1) for rank, token, k in sources]
    return _gather([weights.reshape(-1) for weights in topk_weights], flat)


def _quantised(x: Tokens, quant: str | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(x, tuple):
        return x
    if quant == "int8":
        return quant_int8(x)
    return quant_fp8(x) if quant == "fp8" else (x, None)


def _active(mask: Tensor | None, token: int) -> bool:
    return mask is None or bool(mask[token])


def _gather(tables: Sequence[Tensor], sources: Sequence[Source]) -> Tensor:
    """tables[rank][token] for each source (rank, token, _); zeros for padding rows (rank -1)."""
    starts = [0]
    for table in tables:
        starts.append(starts[-1] + table.shape[0])
    if tables[0].dtype == torch.float8_e4m3fn:  # no cat and no indexing in every torch: as bytes
        return _gather([table.contiguous().view(torch.uint8) for table in tables], sources).view(tables[0].dtype)
    flat = torch.cat([*tables, tables[0].new_zeros(1, *tables[0].shape[1:])])
    rows = [starts[rank] + token if rank >= 0 else starts[-1] for rank, token, _ in sources]
    return flat[torch.tensor(rows, dtype=torch.int64)]
