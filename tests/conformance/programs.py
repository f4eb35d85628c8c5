"""What ranks run in the conformance tests: the public API, once per Case."""

from typing import Any

import torch
from torch import Tensor

import cam
from tests.conformance.case import Case, cotangent, expert_output, inputs, row_weights

Seen = dict[str, Any]


def make_buffer(group: Any, case: Case, **options: Any) -> Any:
    return cam.ep.Buffer(
        group, case.experts, layout=case.layout, quant=case.quant, expert_alignment=case.alignment, **options
    )


def received(recv: Any) -> Seen:
    """The fields of what dispatch returned."""
    return {
        "x": recv.x,
        "scales": recv.scales,
        "expert_counts": recv.expert_counts,
        "expert_counts_list": recv.expert_counts_list,
        "source": recv.source,
        "topk_idx": recv.topk_idx,
        "topk_weights": recv.topk_weights,
    }


def forward(group: Any, case: Case) -> Seen:
    """Dispatch, and combine in all its variants."""
    mine = inputs(case, group.rank)
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, active_mask=mine.mask)
    seen = received(recv)
    rows = recv.x.shape[0]
    y = expert_output(case, group.rank, rows)
    seen["out"] = buffer.combine(y, handle, bias=mine.bias)
    weights = row_weights(case, group.rank, rows)
    seen["out_again"], seen["combined_weights"] = buffer.combine(
        y, handle, topk_weights=weights, bias=mine.bias, apply_weights=False
    )
    return seen


def forward_many(group: Any, cases: list[Case]) -> list[Seen]:
    return [forward(group, case) for case in cases]


def refusals(group: Any, cases: list[Case]) -> list[str]:
    """What the InputError says that each case must end with."""
    said = []
    for case in cases:
        try:
            forward(group, case)
            said.append("accepted")
        except cam.InputError as error:
            said.append(str(error))
    return said


def window_forward(group: Any, case: Case) -> Seen:
    """As forward, with x and y in window memory: the case in which nothing is copied on the way."""
    mine = inputs(case, group.rank)
    assert isinstance(mine.x, Tensor)
    x = group.empty(tuple(mine.x.shape), mine.x.dtype)
    x.copy_(mine.x)
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(x, mine.topk_idx, mine.topk_weights, active_mask=mine.mask)
    seen = received(recv)
    y = expert_output(case, group.rank, recv.x.shape[0])
    in_window = group.empty(tuple(y.shape), y.dtype)
    in_window.copy_(y)
    seen["out"] = buffer.combine(in_window, handle, bias=mine.bias)
    return seen


def repeated(group: Any, case: Case, other: Case) -> tuple[Seen, Seen]:
    """A dispatch, then the x of `other` along the same routes; combines for both, the later one first."""
    mine = inputs(case, group.rank)
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, active_mask=mine.mask)
    recv2, handle2 = buffer.dispatch(inputs(other, group.rank).x, handle=handle)
    first, second = received(recv), received(recv2)
    second["out"] = buffer.combine(expert_output(other, group.rank, recv2.x.shape[0]), handle2)
    first["out"] = buffer.combine(expert_output(case, group.rank, recv.x.shape[0]), handle)
    return first, second


def backward(group: Any, case: Case) -> Seen:
    """Gradients of dispatch and of combine, each fed with a gradient of its own."""
    rank = group.rank
    mine = inputs(case, rank)
    assert isinstance(mine.x, Tensor)
    x = mine.x.requires_grad_()
    weights = None if mine.topk_weights is None else mine.topk_weights.requires_grad_()
    bias = None if mine.bias is None else mine.bias.requires_grad_()
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(x, mine.topk_idx, weights, active_mask=mine.mask)
    y = expert_output(case, rank, recv.x.shape[0]).requires_grad_()
    row = row_weights(case, rank, recv.x.shape[0]).requires_grad_()
    out, combined = buffer.combine(y, handle, topk_weights=row, bias=bias)
    ends = [out, combined, recv.x]
    if recv.topk_weights is not None:
        ends.append(recv.topk_weights)
    torch.autograd.backward(ends, [cotangent(end, case, rank, 5 + i % 3) for i, end in enumerate(ends)])
    leaves = {"x": x, "y": y, "row": row, "weights": weights, "bias": bias}
    return {name: None if leaf is None else leaf.grad for name, leaf in leaves.items()}


def special_values(group: Any, layout: str, dtype: torch.dtype) -> bool:
    """Rows are moved, not computed with: every bit arrives."""
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45, 6e-8]]).to(dtype).repeat(2, 1)
    buffer = cam.ep.Buffer(group, 4, layout=layout)
    recv, handle = buffer.dispatch(x, torch.tensor([[0, 3], [2, 1]]))
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    arrived = bool((recv.x.view(integer) == x[0].view(integer)).all())
    out = buffer.combine(recv.x, handle)
    return arrived and out.isnan()[:, 0].all().item() is True and out.isinf()[:, 1:3].all().item() is True


def expert_weights(case: Case) -> Tensor:
    """[E, H, H] The same on every rank."""
    g = torch.Generator().manual_seed(case.seed + 99)
    return torch.randn(case.experts, case.hidden, case.hidden, generator=g) / case.hidden**0.5


def apply_experts(recv: Any, weights: Tensor, first: int, case: Case) -> Tensor:
    """tanh(row @ weight of its expert); in the rank layout each row is its weighted sum over the local
    experts.
    """
    if case.layout == "expert":
        parts = recv.x.split(recv.expert_counts_list)
        return torch.cat([torch.tanh(part @ weights[first + e]) for e, part in enumerate(parts)])
    total = torch.zeros_like(recv.x)
    for e in range(len(recv.expert_counts_list)):
        share = torch.where(recv.topk_idx == e, recv.topk_weights, 0.0).sum(1, keepdim=True)
        total = total + share * torch.tanh(recv.x @ weights[first + e])
    return total


def layer(group: Any, case: Case, checkpointed: bool) -> Seen:
    """A training step of a MoE layer whose router weights come from logits."""
    from torch.utils.checkpoint import checkpoint

    mine = inputs(case, group.rank)
    assert isinstance(mine.x, Tensor)
    assert mine.topk_weights is not None
    x, logits, experts = mine.x.requires_grad_(), mine.topk_weights.requires_grad_(), expert_weights(case)
    experts.requires_grad_()
    buffer = make_buffer(group, case)

    def step(x: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        recv, handle = buffer.dispatch(x, mine.topk_idx, logits.softmax(-1))
        y = apply_experts(recv, experts, buffer.expert_range().start, case)
        return buffer.combine(y, handle)

    out = checkpoint(step, x, logits, experts, use_reentrant=False) if checkpointed else step(x, logits, experts)
    out.backward(cotangent(out, case, group.rank, 6))
    return {"out": out, "x": x.grad, "logits": logits.grad, "experts": experts.grad}


def quantised_gradient(group: Any, quant: str) -> str:
    buffer = cam.ep.Buffer(group, 4, quant=quant)
    x = torch.ones(3, 8, requires_grad=True)
    idx = torch.zeros(3, 1, dtype=torch.int64)
    with torch.no_grad():
        buffer.dispatch(x, idx)  # fine: nothing asks for a gradient
    try:
        buffer.dispatch(x, idx)
    except cam.InputError:
        return "refused"
    return "accepted"


def two_in_flight(group: Any, layout: str) -> list[str]:
    buffer = cam.ep.Buffer(group, 6, layout=layout)
    idx = [torch.tensor([[0, 5], [3, 2]]), torch.tensor([[4, 4], [1, 0]])]
    x = [torch.full((2, 3), float(n + 1), requires_grad=True) for n in range(2)]
    dispatched = [buffer.dispatch(x[n], idx[n]) for n in range(2)]
    outs = [buffer.combine(recv.x * 2, handle) for recv, handle in reversed(dispatched)][::-1]
    copies = [[2, 2], [2, 2]]
    if layout == "rank":  # a token that goes twice to one rank is one row there
        copies = [[len({expert // 3 for expert in row}) for row in i.tolist()] for i in idx]
    errors = []
    outs[0].sum().backward()
    outs[1].sum().backward()
    for n in range(2):
        want = 2 * torch.tensor(copies[n]).float().reshape(-1, 1).expand(2, 3)
        if not torch.equal(outs[n], x[n].detach() * want):
            errors.append(f"out {n}: {outs[n].tolist()}, not {(x[n] * want).tolist()}")
        if x[n].grad is None or not torch.equal(x[n].grad, want):
            errors.append(f"grad {n}: {x[n].grad}, not {want}")
    return errors


def bfloat16_layer(group: Any, case: Case) -> Tensor:
    """Experts with float32 matmuls between a bfloat16 (or quantised) dispatch and a bfloat16 combine."""
    from cam_kernels.reference import dequant_fp8, dequant_int8

    mine = inputs(case, group.rank)
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    dequant = {None: lambda q, _: q.float(), "int8": dequant_int8, "fp8": dequant_fp8}[case.quant]
    rows, experts, first = dequant(recv.x, recv.scales), expert_weights(case), buffer.expert_range().start
    if case.layout == "expert":
        parts = rows.split(recv.expert_counts_list)
        y = torch.cat([part @ experts[first + e] for e, part in enumerate(parts)])
    else:
        y = torch.zeros_like(rows)
        for e in range(len(recv.expert_counts_list)):
            share = torch.where(recv.topk_idx == e, recv.topk_weights, 0.0).sum(1, keepdim=True)
            y += share * (rows @ experts[first + e])
    out: Tensor = buffer.combine(y.bfloat16(), handle)
    return out
