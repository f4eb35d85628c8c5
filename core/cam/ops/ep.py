"""The expert-parallel ops: their schemas and shapes. Used through cam.ep.Buffer.

All of them are collective over `group`. `timeout` is in seconds; negative = the group's. Outputs that a call does not
produce are empty tensors. Shapes follow from the arguments alone, never from the group: compilers cache graphs by their
arguments, and ranks share the cache (hence `local_experts` and `ranks`).

    ep_dispatch   rows to the ranks of their experts
                  -> x, scales, source, topk_idx, topk_weights, expert_counts, source_counts, route, anchor
    ep_combine    weighted sum of the experts' rows, at the tokens' rank -> out, combined row weights
    ep_scatter    rows along a known route (repeated dispatch, backward of combine)
                  -> x, scales, dots, row values, anchor
    ep_route      the route from the source triplets of received rows -> route

`anchor` is an empty tensor that carries the autograd graph from a dispatch, through its repetitions, to its combine, so
that every rank takes part in the backward pass even where no row came and the experts were not called.

torch.compile(fullgraph=True) traces them; torch 2.8 needs torch._dynamo.config.capture_dynamic_output_shape_ops = True,
because the number of received rows depends on the routing.
"""

import torch
from torch import Tensor

from cam.ops import ep_autograd, ep_cpu

_library = torch.library.Library("cam", "DEF")
_library.define(
    "ep_dispatch(Tensor x, Tensor? scales, Tensor topk_idx, Tensor? topk_weights, Tensor? active_mask, str group, "
    "int num_experts, int local_experts, int ranks, str layout, str quant, int alignment, int max_tokens, "
    "float timeout) -> "
    "(Tensor x, Tensor scales, Tensor source, Tensor topk_idx, Tensor topk_weights, Tensor expert_counts, "
    "Tensor source_counts, Tensor route, Tensor anchor)"
)
_library.define(
    "ep_combine(Tensor y, Tensor route, Tensor expert_counts, Tensor? topk_weights, Tensor? bias, Tensor? row_weights, "
    "Tensor? anchor, str group, str layout, int alignment, float timeout) -> (Tensor out, Tensor row_weights)"
)
_library.define(
    "ep_scatter(Tensor x, Tensor? scales, Tensor route, Tensor expert_counts, Tensor? topk_weights, Tensor? dot_with, "
    "Tensor? token_values, Tensor? anchor, SymInt rows, str group, str layout, str quant, int alignment, "
    "float timeout) -> (Tensor x, Tensor scales, Tensor dots, Tensor row_values, Tensor anchor)"
)
_library.define("ep_route(Tensor source, SymInt tokens, SymInt topk, str group, float timeout) -> Tensor")

for _name, _implementation in ep_cpu.IMPLEMENTATIONS.items():
    _library.impl(_name, _implementation, "CPU")


def fp8_groups(hidden: int) -> int:
    """Scales of an fp8 row: one per 128 channels."""
    return (hidden + 127) // 128


def quantised(x: Tensor, scales: Tensor | None, quant: str, rows: int | torch.SymInt) -> tuple[Tensor, Tensor]:
    """Empty tensors of the types and shapes that `rows` dispatched rows and their scales have."""
    hidden = x.shape[1]
    if quant == "int8":
        return x.new_empty((rows, hidden), dtype=torch.int8), x.new_empty((rows,), dtype=torch.float32)
    if quant == "fp8":
        groups = fp8_groups(hidden)
        return (
            x.new_empty((rows, hidden), dtype=torch.float8_e4m3fn),
            x.new_empty((rows, groups), dtype=torch.float32),
        )
    if scales is not None:
        return x.new_empty((rows, hidden)), scales.new_empty((rows, *scales.shape[1:]))
    return x.new_empty((rows, hidden)), x.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("cam::ep_dispatch", lib=_library)
def _(
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    active_mask: Tensor | None,
    group: str,
    num_experts: int,
    local_experts: int,
    ranks: int,
    layout: str,
    quant: str,
    alignment: int,
    max_tokens: int,
    timeout: float,
) -> tuple[Tensor, ...]:
    rows = torch.library.get_ctx().new_dynamic_size()
    tokens, topk = topk_idx.shape
    by_rank = layout == "rank"
    values, row_scales = quantised(x, scales, quant, rows)
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        weights = x.new_empty((rows, topk) if by_rank else (rows,), dtype=torch.float32)
    return (
        values,
        row_scales,
        x.new_empty((rows, 3), dtype=torch.int32),
        x.new_empty((rows, topk) if by_rank else (0,), dtype=torch.int64),
        weights,
        x.new_empty((local_experts,), dtype=torch.int64),
        x.new_empty((1 if by_rank else local_experts, ranks), dtype=torch.int64),
        x.new_empty((tokens, topk), dtype=torch.int64),
        x.new_empty(0, dtype=torch.float32),
    )


@torch.library.register_fake("cam::ep_combine", lib=_library)
def _(
    y: Tensor,
    route: Tensor,
    expert_counts: Tensor,
    topk_weights: Tensor | None,
    bias: Tensor | None,
    row_weights: Tensor | None,
    anchor: Tensor | None,
    group: str,
    layout: str,
    alignment: int,
    timeout: float,
) -> tuple[Tensor, Tensor]:
    out = y.new_empty((route.shape[0], y.shape[1]))
    return out, y.new_empty(0 if row_weights is None else route.shape, dtype=torch.float32)


@torch.library.register_fake("cam::ep_scatter", lib=_library)
def _(
    x: Tensor,
    scales: Tensor | None,
    route: Tensor,
    expert_counts: Tensor,
    topk_weights: Tensor | None,
    dot_with: Tensor | None,
    token_values: Tensor | None,
    anchor: Tensor | None,
    rows: int,
    group: str,
    layout: str,
    quant: str,
    alignment: int,
    timeout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    values, row_scales = quantised(x, scales, quant, rows)
    row_values = x.new_empty(0, dtype=torch.float32)
    if token_values is not None:
        row_values = x.new_empty((rows, route.shape[1]) if layout == "rank" else (rows,), dtype=torch.float32)
    dots = x.new_empty(0 if dot_with is None else route.shape, dtype=torch.float32)
    return values, row_scales, dots, row_values, x.new_empty(0, dtype=torch.float32)


@torch.library.register_fake("cam::ep_route", lib=_library)
def _(source: Tensor, tokens: int, topk: int, group: str, timeout: float) -> Tensor:
    return source.new_empty((tokens, topk), dtype=torch.int64)


ep_autograd.register(_library)
