"""What a Buffer refuses, before anything is sent. Every error names the value and what is allowed."""

import torch
from torch import Tensor

from cam.ep.received import Handle
from cam.errors import InputError
from cam.ops.ep_autograd import ROW_DTYPES


def check_buffer(
    num_experts: int, layout: str, quant: str | None, expert_alignment: int, max_tokens: int | None
) -> None:
    """Parameters that no kernels serve."""
    if num_experts < 1:
        raise InputError(f"num_experts must be >= 1, got {num_experts}")
    if layout not in ("expert", "rank"):
        raise InputError(f"layout must be 'expert' or 'rank', got {layout!r}")
    if quant not in (None, "int8", "fp8"):
        raise InputError(f"quant must be None, 'int8' or 'fp8', got {quant!r}")
    if expert_alignment < 1:
        raise InputError(f"expert_alignment must be >= 1, got {expert_alignment}")
    if layout == "rank" and expert_alignment != 1:
        raise InputError(
            f"expert_alignment={expert_alignment} needs layout='expert': rows of the rank layout are not grouped "
            "by expert"
        )
    if max_tokens is not None and max_tokens < 0:
        raise InputError(f"max_tokens must be >= 0 or None, got {max_tokens}")


def check_rows(values: Tensor, scales: Tensor | None, quant: str | None) -> None:
    """x of a dispatch: values, and scales where they are already quantised."""
    if values.dim() != 2:
        raise InputError(f"x must be [tokens, hidden], got shape {tuple(values.shape)}")
    if scales is None:
        if values.dtype not in ROW_DTYPES:
            raise InputError(
                f"x must be bfloat16, float16 or float32, got {values.dtype}; rows that are already quantised are "
                "passed as (values, scales)"
            )
    else:
        if quant is not None:
            raise InputError(f"x is already quantised, but this buffer quantises (quant={quant!r}): use None")
        if scales.dim() not in (1, 2) or scales.shape[0] != values.shape[0]:
            raise InputError(
                f"scales must be [{values.shape[0]}, S] or [{values.shape[0]}] like the values' rows, got shape "
                f"{tuple(scales.shape)}"
            )
        opaque = values.requires_grad and values.dtype not in ROW_DTYPES
        if (opaque or scales.requires_grad) and torch.is_grad_enabled():
            raise InputError(
                f"{'scales' if scales.requires_grad else f'{values.dtype} values'} that are forwarded carry no "
                "gradient, but they require one: pass them detached"
            )
    if quant is not None and values.requires_grad and torch.is_grad_enabled():
        raise InputError(
            f"quantised rows (quant={quant!r}) carry no gradient, but x requires one: use quant=None, or pass "
            "x.detach()"
        )


def check_routing(tokens: int, topk_idx: Tensor, topk_weights: Tensor | None, active_mask: Tensor | None) -> None:
    """Where the tokens of a dispatch go."""
    if topk_idx.dim() != 2 or topk_idx.shape[0] != tokens:
        raise InputError(f"topk_idx must be [{tokens}, K] for x's {tokens} rows, got {tuple(topk_idx.shape)}")
    if topk_idx.dtype not in (torch.int64, torch.int32):
        raise InputError(f"topk_idx must be int64 or int32, got {topk_idx.dtype}")
    if topk_weights is not None:
        if topk_weights.shape != topk_idx.shape:
            raise InputError(
                f"topk_weights must have topk_idx's shape {tuple(topk_idx.shape)}, got {tuple(topk_weights.shape)}"
            )
        if topk_weights.dtype != torch.float32:
            raise InputError(f"topk_weights must be float32, got {topk_weights.dtype}")
    if active_mask is not None and (active_mask.shape != (tokens,) or active_mask.dtype != torch.bool):
        raise InputError(f"active_mask must be [{tokens}] bool, got {tuple(active_mask.shape)} {active_mask.dtype}")


def check_combine(
    y: Tensor,
    handle: Handle,
    route: Tensor,
    layout: str,
    bias: Tensor | None,
    apply_weights: bool | None,
    topk_weights: Tensor | None,
) -> None:
    """Arguments of a combine. route [T, K, ...]: the handle's, which is still open."""
    tokens, topk = route.shape[:2]
    if y.dim() != 2 or y.shape[0] != handle.rows:
        raise InputError(f"y must have the {handle.rows} rows that dispatch gave, got shape {tuple(y.shape)}")
    if y.dtype not in ROW_DTYPES:
        raise InputError(f"y must be bfloat16, float16 or float32, got {y.dtype}")
    if bias is not None and (bias.shape != (tokens, y.shape[1]) or bias.dtype != y.dtype):
        raise InputError(f"bias must be [{tokens}, {y.shape[1]}] {y.dtype}, got {tuple(bias.shape)} {bias.dtype}")
    if layout == "rank" and apply_weights:
        raise InputError("apply_weights=True needs layout='expert': rows of the rank layout are weighted already")
    if apply_weights and handle.topk_weights is None:
        raise InputError("apply_weights=True, but dispatch was given no topk_weights")
    if topk_weights is not None:
        shape = (handle.rows,) if layout == "expert" else (handle.rows, topk)
        if topk_weights.shape != shape or topk_weights.dtype != torch.float32:
            raise InputError(
                f"topk_weights must be {list(shape)} float32, one per received row, got "
                f"{tuple(topk_weights.shape)} {topk_weights.dtype}"
            )
