"""Gradients: the backward of dispatch is a combine, the backward of combine a dispatch along the same
routes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cam_kernels.reference.combine import Rows, combine, combined_weights, rank_route
from cam_kernels.reference.dispatch import Received


def dispatch_backward(
    grad_xs: Sequence[Tensor],
    grad_weights: Sequence[Tensor] | None,
    received: Sequence[Received],
    *,
    layout: str,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Gradient of recv.x [R, H] and recv.topk_weights ([R] or [R, K]) -> of x [T, H] and topk_weights [T, K].

    A token's gradient is the sum over the rows it was copied to: combine without weights, one rounding.
    """
    weights = None if grad_weights is None else combined_weights(grad_weights, received)
    return combine(grad_xs, received, layout=layout), weights


def combine_backward(
    grad_outs: Sequence[Tensor],
    ys: Sequence[Tensor],
    received: Sequence[Received],
    topk_weights: Sequence[Tensor] | None = None,
    *,
    layout: str,
) -> tuple[list[Tensor], list[Tensor] | None, list[Tensor]]:
    """Gradient of out [T, H'] -> of y [R, H'], topk_weights [T, K] (expert layout with weights), bias [T,
    H'].

    y[row(t, k)]: w[t, k] * grad_out[t] in float32, rounded once to y's dtype; padding rows: 0.
    topk_weights[t, k]: the float32 dot product of y[row(t, k)] and grad_out[t]; 0 where not sent.
    """
    rows, grad_ys = Rows(ys), [torch.zeros_like(y) for y in ys]
    grad_weights = []
    for rank, (part, grad) in enumerate(zip(received, grad_outs, strict=True)):
        ks = range(part.route.shape[1]) if layout == "expert" else range(len(ys))
        weight_columns = []
        for k in ks:
            route = part.route[:, k] if layout == "expert" else rank_route(part.route, k)
            values = grad.float()
            if topk_weights is not None and layout == "expert":
                values = topk_weights[rank][:, k, None] * values
                weight_columns.append((rows.at(route) * grad.float()).sum(1) * (route[:, 0] >= 0))
            for where, grad_y in enumerate(grad_ys):
                sent = route[:, 0] == where
                grad_y[route[sent, 1]] = values[sent].to(grad_y.dtype)
        if weight_columns:
            grad_weights.append(torch.stack(weight_columns, 1))
    return grad_ys, grad_weights or None, list(grad_outs)
