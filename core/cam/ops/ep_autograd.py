"""Gradients of the expert-parallel ops. Each backward is one collective, which every rank enters alike:

    dispatch -> combine without weights: the gradients of a token's rows, summed; row weights travel back along
    combine  -> scatter: each row gets its token's gradient times its weight; the weight's gradient is the dot product
                of the token's gradient with the expert's row
    scatter  -> combine without weights

What a backward calls depends only on what the program asked for (weights given, weights need gradients), never on how
many rows a rank has.
"""

from typing import Any

import torch
from torch import Tensor

from cam.errors import CamError

#: Rows that carry gradients: those that can be added up.
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _combine(
    rows: Tensor, row_weights: Tensor | None, route: Tensor, expert_counts: Tensor, ctx: Any
) -> tuple[Tensor, Tensor]:
    out, weights = torch.ops.cam.ep_combine(
        rows,
        route,
        expert_counts,
        None,
        None,
        row_weights,
        None,
        ctx.group,
        ctx.layout,
        ctx.alignment,
        ctx.timeout,
    )
    return out, weights


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, _, _, topk_weights, _, ctx.group, _, _, _, ctx.layout, ctx.quant, ctx.alignment, _, ctx.timeout = inputs
    ctx.weighted = topk_weights is not None
    ctx.floating = ctx.quant == "none" and x.dtype in ROW_DTYPES  # float8 "is floating point", and may yet be opaque
    ctx.save_for_backward(output[7], output[5], output[2])


def _dispatch_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    route, expert_counts, source = ctx.saved_tensors
    grad_x, grad_weights = grads[0], grads[4]
    if not ctx.floating or grad_x is None:  # quantised rows carry no gradient; their weights may
        grad_x = source.new_empty((source.shape[0], 0), dtype=torch.float32)
    out, weights = _combine(grad_x, grad_weights if ctx.weighted else None, route, expert_counts, ctx)
    return (
        out if ctx.floating and ctx.needs_input_grad[0] else None,
        None,
        None,
        weights if ctx.needs_input_grad[3] else None,
        *[None] * 10,
    )


def _combine_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (
        y,
        route,
        expert_counts,
        topk_weights,
        _,
        row_weights,
        anchor,
        ctx.group,
        ctx.layout,
        ctx.alignment,
        ctx.timeout,
    ) = inputs
    ctx.rows = y.shape[0]
    ctx.with_row_weights = row_weights is not None
    ctx.with_anchor = anchor is not None
    ctx.weight_gradient = ctx.needs_input_grad[3]
    ctx.save_for_backward(route, expert_counts, topk_weights, y if ctx.weight_gradient else None)


def _combine_backward(ctx: Any, grad_out: Tensor, grad_row_weights: Tensor) -> tuple[Tensor | None, ...]:
    route, expert_counts, topk_weights, y = ctx.saved_tensors
    grad_y, _, dots, row_values, _ = torch.ops.cam.ep_scatter(
        grad_out,
        None,
        route,
        expert_counts,
        topk_weights,
        y,
        grad_row_weights if ctx.with_row_weights else None,
        None,
        ctx.rows,
        ctx.group,
        ctx.layout,
        "none",
        ctx.alignment,
        ctx.timeout,
    )
    needs = ctx.needs_input_grad
    return (
        grad_y if needs[0] else None,
        None,
        None,
        dots if needs[3] else None,
        grad_out if needs[4] else None,
        row_values if needs[5] else None,
        grad_out.new_zeros(0, dtype=torch.float32) if needs[6] else None,
        *[None] * 4,
    )


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, route, expert_counts, *values, _, _, ctx.group, ctx.layout, ctx.quant, ctx.alignment, ctx.timeout = inputs
    ctx.plain = all(value is None for value in values)
    ctx.save_for_backward(route, expert_counts)


def _scatter_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.plain:
        raise CamError("the gradients of combine have no gradients themselves (no double backward through combine)")
    route, expert_counts = ctx.saved_tensors
    out, _ = _combine(grads[0], None, route, expert_counts, ctx)
    anchor = out.new_zeros(0, dtype=torch.float32) if ctx.needs_input_grad[7] else None
    return (out, *[None] * 6, anchor, *[None] * 6)


def register(library: torch.library.Library) -> None:
    """Attaches the formulas to the ops that `library` defines."""
    for name, backward, setup in (
        ("ep_dispatch", _dispatch_backward, _dispatch_setup),
        ("ep_combine", _combine_backward, _combine_setup),
        ("ep_scatter", _scatter_backward, _scatter_setup),
    ):
        torch.library.register_autograd(f"cam::{name}", backward, setup_context=setup, lib=library)
