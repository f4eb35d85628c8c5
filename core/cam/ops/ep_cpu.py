"""The expert-parallel ops on CPU tensors: addresses into the native kernels, window memory back as tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from cam import registry
from cam.errors import InputError
from cam.ops.placement import expert_range
from cam.ops.untraced import untraced

#: Row types that the kernels compute with; all others travel as bytes.
_ROW_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def _rows(x: Tensor) -> Tensor:
    """Rows whose elements are contiguous; the rows themselves may lie anywhere."""
    return x if x.numel() == 0 or x.stride(-1) == 1 else x.contiguous()


def _row_arguments(x: Tensor) -> dict[str, Any]:
    dtype = _ROW_DTYPES.get(x.dtype, "opaque")
    hidden = x.shape[1] * (x.element_size() if dtype == "opaque" else 1)
    return {"x": x.data_ptr(), "x_stride": x.stride(0) * x.element_size(), "hidden": hidden, "dtype": dtype}


#: Stands for the address of an empty tensor, which has none: the kernels take 0 for an argument that was not given.
_NOTHING = torch.zeros(8, dtype=torch.float32, device="cpu")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr() or _NOTHING.data_ptr()


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _scale_bytes(scales: Tensor | None) -> int:
    if scales is None:
        return 0
    return scales.element_size() * (scales.shape[1] if scales.dim() == 2 else 1)


def _tensor(array: Any) -> Tensor:
    # Given the capsule itself, torch does not ask for the device first: a third of the time.
    tensor: Tensor = from_dlpack(array.__dlpack__())
    return tensor


def _or_empty(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype) if array is None else _tensor(array)


def _values(array: Any, like: Tensor, quant: str) -> Tensor:
    values = _tensor(array)
    if quant == "fp8":
        return values.view(torch.float8_e4m3fn)
    return values if quant != "none" or values.dtype == like.dtype else values.view(like.dtype)


def _scales(array: Any, like: Tensor | None, quant: str, rows: int) -> Tensor:
    if array is None:  # none, or of no bytes
        if like is not None:
            return like.new_empty((rows, *like.shape[1:]))
        return torch.empty((rows, 0) if quant == "fp8" else 0, dtype=torch.float32)
    scales = _tensor(array)
    if like is None:
        return scales
    scales = scales.view(like.dtype)
    return scales.view(-1) if like.dim() == 1 else scales


def dispatch(
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
    members = registry.group(group)
    if (local_experts, ranks) != (len(expert_range(num_experts, members.size, members.rank)), members.size):
        raise InputError(
            f"{local_experts} local experts of {num_experts} over {ranks} ranks are not rank {members.rank}'s in group "
            f"{group!r} of {members.size}"
        )
    x, topk_idx = _rows(x), topk_idx.contiguous()
    scales, topk_weights, active_mask = (
        _contiguous(scales),
        _contiguous(topk_weights),
        _contiguous(active_mask),
    )
    call = partial(
        members.endpoint.ep_dispatch,
        **_row_arguments(x),
        scales=_address(scales),
        scale_bytes=_scale_bytes(scales),
        topk_idx=topk_idx.data_ptr(),
        topk_idx_int64=topk_idx.dtype == torch.int64,
        tokens=topk_idx.shape[0],
        topk=topk_idx.shape[1],
        topk_weights=_address(topk_weights),
        active=_address(active_mask),
        num_experts=num_experts,
        layout=layout,
        quant=quant,
        alignment=alignment,
        max_tokens=max_tokens,
    )
    values, row_scales, source, row_idx, weights, expert_counts, source_counts, route = members.call(
        "dispatch", call, timeout=None if timeout < 0 else timeout
    )
    rows_out = _values(values, x, quant)
    return (
        rows_out,
        _scales(row_scales, scales, quant, rows_out.shape[0]),
        _tensor(source),
        _or_empty(row_idx, torch.int64),
        _or_empty(weights, torch.float32),
        _tensor(expert_counts),
        _tensor(source_counts),
        _tensor(route),
        torch.empty(0, dtype=torch.float32),
    )


def combine(
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
    members = registry.group(group)
    y, route = y.contiguous(), route.contiguous()
    topk_weights, bias, row_weights = _contiguous(topk_weights), _contiguous(bias), _contiguous(row_weights)
    call = partial(
        members.endpoint.ep_combine,
        y=y.data_ptr(),
        rows=y.shape[0],
        hidden=y.shape[1],
        dtype=_ROW_DTYPES[y.dtype],
        layout=layout,
        route=route.data_ptr(),
        tokens=route.shape[0],
        topk=route.shape[1],
        weights=_address(topk_weights),
        bias=_address(bias),
        row_values=_address(row_weights),
    )
    out, values = members.call("combine", call, timeout=None if timeout < 0 else timeout)
    return _tensor(out), _or_empty(values, torch.float32)


def scatter(
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
    members = registry.group(group)
    x, route, expert_counts = _rows(x), route.contiguous(), expert_counts.contiguous()
    scales, topk_weights = _contiguous(scales), _contiguous(topk_weights)
    dot_with, token_values = _contiguous(dot_with), _contiguous(token_values)
    call = partial(
        members.endpoint.ep_scatter,
        **_row_arguments(x),
        scales=_address(scales),
        scale_bytes=_scale_bytes(scales),
        quant=quant,
        layout=layout,
        route=route.data_ptr(),
        tokens=route.shape[0],
        topk=route.shape[1],
        rows=rows,
        expert_counts=expert_counts.data_ptr(),
        # Only the expert layout has padding.
        local_experts=expert_counts.shape[0] if layout == "expert" else 0,
        alignment=alignment,
        weights=_address(topk_weights),
        dot_with=_address(dot_with),
        token_values=_address(token_values),
    )
    values, row_scales, dots, row_values = members.call("scatter", call, timeout=None if timeout < 0 else timeout)
    rows_out = _values(values, x, quant)
    return (
        rows_out,
        _scales(row_scales, scales, quant, rows_out.shape[0]),
        _or_empty(dots, torch.float32),
        _or_empty(row_values, torch.float32),
        torch.empty(0, dtype=torch.float32),
    )


def route(source: Tensor, tokens: int, topk: int, group: str, timeout: float) -> Tensor:
    members = registry.group(group)
    source = source.contiguous()
    call = partial(members.endpoint.ep_route, source=source.data_ptr(), rows=source.shape[0], tokens=tokens, topk=topk)
    return _tensor(members.call("route", call, timeout=None if timeout < 0 else timeout))


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "ep_dispatch": untraced(dispatch),
    "ep_combine": untraced(combine),
    "ep_scatter": untraced(scatter),
    "ep_route": untraced(route),
}
