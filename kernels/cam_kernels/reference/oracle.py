"""The whole of dispatch + experts + combine, without dispatching: each token visits its experts in turn."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cam_kernels.reference.combine import accumulate


def moe(
    xs: Sequence[Tensor],
    topk_idxs: Sequence[Tensor],
    topk_weights: Sequence[Tensor] | None,
    expert_fn: Callable[[int, Tensor], Tensor],
    *,
    active_masks: Sequence[Tensor | None] | None = None,
    bias: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """out[rank][t] = round(sum over k ascending of w[t, k] * expert_fn(expert[t, k], x[t]) (+ bias[t])),
    float32 sums.

    xs[rank] [T, H]; topk_idxs[rank] int [T, K], -1 = not selected; expert_fn(global expert, rows [n, H]) ->
    [n, H'].
    Differentiable with respect to everything. float64 inputs give a float64 result. Row-wise expert functions
    give exactly what dispatch + combine in the expert layout must give; the rank layout rounds once more per
    rank.
    """
    outs = []
    for rank, (x, idx) in enumerate(zip(xs, topk_idxs, strict=True)):
        mask = None if active_masks is None else active_masks[rank]
        active = torch.ones(x.shape[0], dtype=torch.bool) if mask is None else mask
        out_like = expert_fn(0, x[:0])
        terms = []
        for k in range(idx.shape[1]):
            selected = (idx[:, k] >= 0) & active
            values = torch.zeros(x.shape[0], out_like.shape[1], dtype=out_like.dtype)
            for expert in set(idx[selected, k].tolist()):
                chosen = selected & (idx[:, k] == expert)
                values = values.index_put((chosen.nonzero()[:, 0],), expert_fn(expert, x[chosen]))
            wide = values.double() if values.dtype == torch.float64 else values.float()
            if topk_weights is not None:
                wide = topk_weights[rank][:, k, None].to(wide.dtype) * wide
            terms.append((selected, wide))
        out = accumulate(terms, x.shape[0], out_like)
        if bias is not None:
            out = out + bias[rank].to(out.dtype)
        outs.append(out.to(out_like.dtype))
    return outs
