"""What the reference says about a Case, and the comparison with what a rank saw."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cam_kernels import reference
from tests.conformance.case import Case, all_inputs, cotangent, expert_output, row_weights

Seen = dict[str, Any]


def same_bits(got: Tensor, want: Tensor, what: str) -> None:
    """Equal dtype, shape and bits; NaN equals any NaN, since hardware chooses its sign and payload."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if got.numel() == 0:
        return
    got, want = got.detach().contiguous(), want.detach().contiguous()
    differ = bits(got) != bits(want)
    if got.is_floating_point():
        differ = differ & ~(got.float().isnan() & want.float().isnan())
    if differ.any():
        where = differ.nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{what}: {len(where)} of {got.numel()} elements differ, first at {first}: "
            f"{got[first].item()!r}, not {want[first].item()!r}"
        )


def bits(x: Tensor) -> Tensor:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.view(integer)


def _used_weights(case: Case) -> list[Tensor] | None:
    if not case.weights or case.layout == "rank":
        return None
    return [mine.topk_weights for mine in all_inputs(case) if mine.topk_weights is not None]


@cache
def received(case: Case) -> tuple[reference.Received, ...]:
    ranks = all_inputs(case)
    return tuple(
        reference.dispatch(
            [mine.x for mine in ranks],
            [mine.topk_idx for mine in ranks],
            [mine.topk_weights for mine in ranks if mine.topk_weights is not None] if case.weights else None,
            case.experts,
            layout=case.layout,
            quant=case.quant,
            expert_alignment=case.alignment,
            active_masks=[mine.mask for mine in ranks],
        )
    )


def outputs(
    case: Case, parts: Sequence[reference.Received], *, weighted: bool = True, biased: bool = True
) -> list[Tensor]:
    ys = [expert_output(case, rank, part.x.shape[0]) for rank, part in enumerate(parts)]
    bias = [mine.bias for mine in all_inputs(case) if mine.bias is not None] if case.bias and biased else None
    return reference.combine(ys, parts, _used_weights(case) if weighted else None, layout=case.layout, bias=bias)


def check_received(seen: Seen, part: reference.Received, rank: int) -> None:
    for name in ("x", "scales", "expert_counts", "source", "topk_idx", "topk_weights"):
        got, want = seen[name], getattr(part, name)
        if want is None:
            assert got is None, f"rank {rank}: {name} is {got!r}, not None"
        else:
            same_bits(got, want, f"rank {rank}: {name}")
    assert seen["expert_counts_list"] == part.expert_counts.tolist()
    assert all(type(count) is int for count in seen["expert_counts_list"])


def check_forward(case: Case, everything: Sequence[Seen]) -> None:
    """Against programs.forward (and window_forward)."""
    parts = received(case)
    outs, plain = outputs(case, parts), outputs(case, parts, weighted=False)
    combined = reference.combined_weights(
        [row_weights(case, rank, part.x.shape[0]) for rank, part in enumerate(parts)], parts
    )
    for rank, (seen, part) in enumerate(zip(everything, parts, strict=True)):
        check_received(seen, part, rank)
        same_bits(seen["out"], outs[rank], f"rank {rank}: combine")
        if "out_again" in seen:
            same_bits(seen["out_again"], plain[rank], f"rank {rank}: combine, apply_weights=False")
            same_bits(seen["combined_weights"], combined[rank], f"rank {rank}: combined weights")


def check_backward(case: Case, everything: Sequence[Seen]) -> None:
    """Against programs.backward."""
    world = range(case.world)
    parts, used = received(case), _used_weights(case)
    ys = [expert_output(case, rank, parts[rank].x.shape[0]) for rank in world]
    outs = outputs(case, parts)
    grad_outs = [cotangent(outs[rank], case, rank, 5) for rank in world]
    grad_ys, grad_weights, grad_bias = reference.combine_backward(grad_outs, ys, parts, used, layout=case.layout)
    grad_xs, received_weights = reference.dispatch_backward(
        [cotangent(part.x, case, rank, 7) for rank, part in enumerate(parts)],
        [_local(part, cotangent(part.topk_weights, case, rank, 5)) for rank, part in enumerate(parts)]  # type: ignore[arg-type]
        if case.weights
        else None,
        parts,
        layout=case.layout,
    )
    for rank, seen in enumerate(everything):
        same_bits(seen["x"], grad_xs[rank], f"rank {rank}: grad x")
        same_bits(seen["y"], grad_ys[rank], f"rank {rank}: grad y")
        if case.bias:
            same_bits(seen["bias"], grad_bias[rank], f"rank {rank}: grad bias")
        same_bits(seen["row"], _row_gradient(case, rank), f"rank {rank}: grad of row weights")
        if received_weights is not None:
            want = received_weights[rank]
            if grad_weights is not None:
                want = want + grad_weights[rank]
            # The order of a dot product over H is not specified.
            torch.testing.assert_close(seen["weights"], want, rtol=1e-4, atol=1e-3)


def _row_gradient(case: Case, rank: int) -> Tensor:
    """Of the weights of received rows: each finds the gradient of the (token, k) that it came from."""
    parts = received(case)
    want = torch.zeros_like(row_weights(case, rank, parts[rank].x.shape[0]))
    for source, part in enumerate(parts):
        grad = cotangent(torch.empty(part.route.shape[:2]), case, source, 6)
        here = part.route[..., 0] == rank
        row, k = part.route[..., 1][here], here.nonzero()[:, 1]
        want[row if want.dim() == 1 else (row, k)] = grad[here]
    return want


def _local(part: reference.Received, grad: Tensor) -> Tensor:
    return grad if part.topk_idx is None else torch.where(part.topk_idx >= 0, grad, 0.0)
