"""Combine: every token's rows come back and are summed in float32 in a fixed order, rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cam_kernels.reference.dispatch import Received


def combine(
    ys: Sequence[Tensor],
    received: Sequence[Received],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    layout: str,
    bias: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """ys[rank] [R, H'], one row per received row -> out[rank] [T, H'] in the dtype of ys.

    expert layout: out[t] = round(0 + w[t, 0] * y[row(t, 0)] + w[t, 1] * y[row(t, 1)] + ... + bias[t]), in
    float32 (in float64 for float64 rows), each product rounded before it is added; w = 1 without
    topk_weights.
    rank layout: out[t] = round(0 + y[row(t, r)] + ... + bias[t]) over the distinct ranks r of t, ascending.
    """
    rows, outs = Rows(ys), []
    for rank, part in enumerate(received):
        if layout == "expert":
            terms = _by_k(rows, part, None if topk_weights is None else topk_weights[rank])
        else:
            terms = _by_rank(rows, part, len(ys))
        out = accumulate(terms, part.route.shape[0], ys[rank])
        if bias is not None:
            out = out + bias[rank].to(out.dtype)
        outs.append(out.to(ys[rank].dtype))
    return outs


def combined_weights(weights: Sequence[Tensor], received: Sequence[Received]) -> list[Tensor]:
    """weights[rank] float32 [R] (expert layout) or [R, K] (rank layout): what each (token, k) finds in its
    row.

    -> [T, K] float32 for each rank; 0 where nothing was sent.
    """
    combined = []
    for part in received:
        out = torch.zeros(part.route.shape[:2], dtype=torch.float32)
        for rank, values in enumerate(weights):
            here = part.route[..., 0] == rank
            row, k = part.route[..., 1][here], here.nonzero()[:, 1]
            out[here] = values[row] if values.dim() == 1 else values[row, k]
        combined.append(out)
    return combined


def accumulate(terms: Sequence[tuple[Tensor, Tensor]], tokens: int, like: Tensor) -> Tensor:
    """Sum of (selected bool [T], values [T, H']) in the given order, unrounded: [T, H'] float32 (or
    float64).
    """
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    total = torch.zeros(tokens, like.shape[1], dtype=wide)
    for selected, values in terms:
        total = torch.where(selected[:, None], total + values, total)
    return total


class Rows:
    """The rows of all ranks, looked up by route."""

    def __init__(self, ys: Sequence[Tensor]) -> None:
        wide = torch.float64 if ys[0].dtype == torch.float64 else torch.float32
        sizes = torch.tensor([y.shape[0] for y in ys])
        self._first = sizes.cumsum(0) - sizes
        self._table = torch.cat([*ys, ys[0].new_zeros(1, ys[0].shape[1])]).to(wide)

    def at(self, route: Tensor) -> Tensor:
        """route int64 [T, 2] = (rank, row) -> [T, H'] in float32 (float64); zeros where rank is -1."""
        row = self._first[route[:, 0]] + route[:, 1]
        return self._table[torch.where(route[:, 0] >= 0, row, self._table.shape[0] - 1)]


def _by_k(rows: Rows, part: Received, weights: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    terms = []
    for k in range(part.route.shape[1]):
        values = rows.at(part.route[:, k])
        if weights is not None:
            values = weights[:, k, None].to(values.dtype) * values
        terms.append((part.route[:, k, 0] >= 0, values))
    return terms


def _by_rank(rows: Rows, part: Received, world: int) -> list[tuple[Tensor, Tensor]]:
    routes = [rank_route(part.route, rank) for rank in range(world)]
    return [(route[:, 0] >= 0, rows.at(route)) for route in routes]


def rank_route(route: Tensor, rank: int) -> Tensor:
    """route int64 [T, K, 2] of the rank layout -> int64 [T, 2]: (rank, row) of each token's one row there, or
    -1s.
    """
    out = torch.full((route.shape[0], 2), -1, dtype=torch.int64)
    for k in range(route.shape[1]):
        out = torch.where(route[:, k, :1] == rank, route[:, k], out)
    return out
