"""What ranks run in test_ops.py."""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cam

EXPERTS, TOPK, HIDDEN = 5, 2, 16


def _inputs(group: Any, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed * 16 + group.rank)
    x = torch.randn(tokens, HIDDEN, generator=g)
    idx = torch.randint(-1, EXPERTS, (tokens, TOPK), generator=g)
    return x, idx, torch.rand(tokens, TOPK, generator=g)


def op_calls(group: Any, layout: str) -> dict[str, list[tuple[Any, ...]]]:
    """Sample arguments of every op of the namespace. The same ops in the same order on every rank."""
    x, idx, weights = _inputs(group, 6)
    name, wait = group.name, -1.0
    mask = torch.arange(6) % 3 > 0
    local = len(cam.ep.Buffer(group, EXPERTS).expert_range())
    alignment = 4 if layout == "expert" else 1

    def dispatch(x: Tensor, scales: Tensor | None, w: Tensor | None, m: Tensor | None, quant: str) -> tuple[Any, ...]:
        return x, scales, idx, w, m, name, EXPERTS, local, group.size, layout, quant, alignment, -1, wait

    pair = (torch.arange(6 * 8, dtype=torch.int8).view(6, 8), torch.rand(6, 2))
    leaf = x.clone().requires_grad_()
    calls: dict[str, list[tuple[Any, ...]]] = {
        "cam::ep_dispatch": [
            dispatch(leaf, None, weights.clone().requires_grad_(), None, "none"),
            dispatch(x.bfloat16(), None, None, mask, "none"),
            dispatch(x, None, weights, None, "int8"),
            dispatch(x, None, weights, None, "fp8"),
            dispatch(pair[0], pair[1], None, None, "none"),
        ]
    }
    sent = torch.ops.cam.ep_dispatch(*dispatch(x, None, weights, None, "none"))
    rows, recv_weights, counts, route = sent[0], sent[4], sent[5], sent[7]
    y = rows.detach().clone().requires_grad_()
    by_k = weights.clone().requires_grad_() if layout == "expert" else None
    bias, anchor = torch.randn(6, HIDDEN).requires_grad_(), torch.empty(0, requires_grad=True)
    last = (name, layout, alignment, wait)
    calls["cam::ep_combine"] = [
        (y, route, counts, by_k, bias, None, anchor, *last),
        (y, route, counts, None, None, recv_weights.detach().clone().requires_grad_(), None, *last),
    ]
    n = rows.shape[0]
    calls["cam::ep_scatter"] = [
        (leaf, None, route, counts, None, None, None, anchor, n, name, layout, "none", alignment, wait),
        (x, None, route, counts, None, None, None, None, n, name, layout, "int8", alignment, wait),
        (*pair, route, counts, None, None, None, None, n, name, layout, "none", alignment, wait),
        (
            x,
            None,
            route,
            counts,
            None if by_k is None else weights,
            rows,
            weights,
            None,
            n,
            name,
            layout,
            "none",
            alignment,
            wait,
        ),
    ]
    if layout == "expert":
        alignment = 1
        unpadded = torch.ops.cam.ep_dispatch(*dispatch(x, None, None, None, "none"))[2]
        calls["cam::ep_route"] = [(unpadded, 6, TOPK, name, wait)]
    return calls


def opcheck(group: Any, layout: str) -> tuple[list[str], list[str]]:
    """(names of the ops that were checked, what failed)."""
    checked, failed = [], []
    for name, samples in op_calls(group, layout).items():
        op = getattr(torch.ops.cam, name.split("::")[1]).default
        for n, arguments in enumerate(samples):
            outcome = torch.library.opcheck(op, arguments, raise_exception=False)
            failed += [f"{name} sample {n} {test}: {what}" for test, what in outcome.items() if what != "SUCCESS"]
        checked.append(name)
    return checked, failed


def coverage(group: Any) -> tuple[list[str], list[str]]:
    """(all ops of the namespace, those with sample arguments)."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split(".")[0] for name in names if name.startswith("cam::")}), sorted(op_calls(group, "expert"))


def moe(buffer: Any, weights: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A MoE layer that a compiler can trace: expert e adds e and scales; both layouts."""

    def step(x: Tensor, idx: Tensor, logits: Tensor) -> Tensor:
        recv, handle = buffer.dispatch(x, idx, logits.softmax(-1))
        if buffer.layout == "expert":
            y = torch.tanh(recv.x) * weights
        else:
            y = torch.tanh(recv.x) * weights * recv.topk_weights.sum(1, keepdim=True)
        out: Tensor = buffer.combine(y, handle)
        return out * 2

    return step


def compiled(group: Any, layout: str, backend: str, sizes: list[list[int]]) -> list[str]:
    """Compares compiled and eager, forward and backward, for several token counts; returns what differs."""
    torch._dynamo.reset()
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    experts = torch.linspace(-1, 1, HIDDEN, requires_grad=True)
    eager = moe(buffer, experts)
    fast = torch.compile(eager, backend=backend, fullgraph=True)
    wrong = []
    for n, tokens in enumerate(sizes):
        results = []
        for step in (eager, fast):
            x, idx, logits = _inputs(group, tokens[group.rank], n)
            x.requires_grad_()
            logits.requires_grad_()
            experts.grad = None
            out = step(x, idx, logits)
            (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
            results.append((out.detach(), x.grad, logits.grad, experts.grad))
        for name, want, got in zip(("out", "x", "logits", "experts"), *results, strict=True):
            if not torch.allclose(want, got, rtol=1e-4, atol=1e-4):
                wrong.append(f"{tokens}: {name} differs by {(want - got).abs().max()}")
    return wrong


def compiled_by_inductor(group: Any, cache: str) -> list[bool]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    # Without arithmetic between the ops there is no C++ to compile, which takes half a minute.
    # Twice: the second time finds what both ranks have compiled.
    return [compiled_without_gradients(group, "expert", None, "inductor") for _ in range(2)]


def compiled_without_gradients(group: Any, layout: str, quant: str | None, backend: str = "aot_eager") -> bool:
    torch._dynamo.reset()
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout, quant=quant)

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        recv, handle = buffer.dispatch(x, idx, weights)
        y = recv.x
        if quant is not None:
            y = (recv.x.float() * (recv.scales[:, None] if quant == "int8" else 2)).bfloat16()
        return buffer.combine(y, handle), recv.expert_counts

    fast = torch.compile(step, backend=backend, fullgraph=True)
    with torch.no_grad():
        arguments = _inputs(group, 7)
        return all(torch.equal(a, b) for a, b in zip(step(*arguments), fast(*arguments), strict=True))


def checkpointed(group: Any, layout: str, reentrant: bool) -> list[str]:
    """Two layers, each recomputed in backward: their collectives happen in the same order on every rank."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    experts = torch.linspace(-1, 1, HIDDEN, requires_grad=True)
    step, results = moe(buffer, experts), []
    for recompute in (False, True):
        x, idx, logits = _inputs(group, 3 * group.rank)  # rank 0 has no tokens
        x.requires_grad_()
        logits.requires_grad_()
        experts.grad = None
        out = x
        for _ in range(2):
            out = checkpoint(step, out, idx, logits, use_reentrant=reentrant) if recompute else step(out, idx, logits)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, logits.grad, experts.grad))
    names = ("out", "x", "logits", "experts")
    return [name for name, a, b in zip(names, *results, strict=True) if not torch.equal(a, b)]


def gradcheck(group: Any, layout: str) -> bool:
    """Both ops are linear in each argument: with a large step, float32 is accurate enough for torch's own gradcheck."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    x, idx, weights = _inputs(group, 3)
    bias = torch.randn(3, HIDDEN)

    def layer(x: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        recv, handle = buffer.dispatch(x, idx, weights)
        out, back = buffer.combine(recv.x * 2, handle, topk_weights=recv.topk_weights, bias=bias)
        return out, back

    leaves = tuple(leaf.requires_grad_() for leaf in (x, weights, bias))
    return torch.autograd.gradcheck(layer, leaves, eps=0.05, atol=1e-3, rtol=1e-3, fast_mode=False)


def directional_derivative(group: Any, layout: str, step: float) -> tuple[float, float]:
    """(this rank's loss with all ranks' inputs moved by `step` along a fixed direction, <gradient, direction> here)."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    g = torch.Generator().manual_seed(group.rank + 50)
    x, idx, logits = _inputs(group, 4 + group.rank, seed=3)
    directions = [torch.randn(leaf.shape, generator=g) for leaf in (x, logits)]
    leaves = [(leaf + step * along).requires_grad_() for leaf, along in zip((x, logits), directions, strict=True)]
    out = moe(buffer, torch.linspace(-1, 1, HIDDEN))(leaves[0], idx, leaves[1])
    weighted = out * torch.randn(out.shape, generator=g)
    weighted.sum().backward()
    slope = sum(
        float((leaf.grad.double() * along.double()).sum())
        for leaf, along in zip(leaves, directions, strict=True)
        if leaf.grad is not None
    )
    return float(weighted.double().sum()), slope


def experts_not_called(group: Any, layout: str) -> tuple[list[float], bool]:
    """Rank 1 gets no rows and does not call its experts: it still takes part in the backward pass."""
    buffer = cam.ep.Buffer(group, 2, layout=layout)
    x = torch.ones(3, 4, requires_grad=True)
    weight = torch.full((4,), 2.0, requires_grad=True)
    recv, handle = buffer.dispatch(x, torch.zeros(3, 1, dtype=torch.int64))
    y = recv.x * weight if recv.x.shape[0] else torch.empty(0, 4)
    out = buffer.combine(y, handle)
    out.sum().backward()
    assert x.grad is not None
    return x.grad.unique().tolist(), weight.grad is None


def repeated_gradient(group: Any, layout: str) -> list[float]:
    """x sent along an earlier routing has gradients of its own."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    x, idx, _ = _inputs(group, 4)
    _, handle = buffer.dispatch(x, idx)
    again = torch.randn(4, 3, requires_grad=True)
    recv, handle = buffer.dispatch(again, handle=handle)
    buffer.combine(recv.x * 3, handle).sum().backward()
    copies = (idx >= 0).sum(1)
    if layout == "rank":
        ranges = [buffer.expert_range(rank) for rank in range(group.size)]
        copies = torch.tensor([sum(any(e in r for e in row) for r in ranges) for row in idx.tolist()])
    assert again.grad is not None
    return (again.grad - 3 * copies[:, None]).abs().sum(1).tolist()


def repeated_without_experts(group: Any, layout: str) -> list[float]:
    """As experts_not_called, along an earlier routing that had no gradients."""
    buffer = cam.ep.Buffer(group, 2, layout=layout)
    _, handle = buffer.dispatch(torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64))
    x = torch.ones(3, 4, requires_grad=True)
    recv, handle = buffer.dispatch(x, handle=handle)
    y = recv.x * 2 if recv.x.shape[0] else torch.empty(0, 4)
    buffer.combine(y, handle).sum().backward()
    assert x.grad is not None
    return x.grad.unique().tolist()


def asynchronous_gradients(group: Any, layout: str, other_work: int, repeat: bool) -> list[list[float]]:
    """Several asynchronous calls in one graph, to experts that live on one rank each, after as many autograd nodes of
    this rank's own."""
    buffer = cam.ep.Buffer(group, 2, layout=layout)
    for _ in range(other_work):
        torch.ones(1, requires_grad=True).neg()
    leaves, outs = [], []
    for step in range(4):
        x = torch.ones(3, 4, requires_grad=True)
        leaves.append(x)
        recv, handle = buffer.dispatch_async(x, torch.full((3, 1), step % 2)).wait()
        if repeat:
            buffer.dispatch_async(torch.zeros(3, 4), handle=handle).wait()
        y = recv.x * (step + 1) if recv.x.shape[0] else torch.empty(0, 4)
        outs.append(buffer.combine_async(y, handle))
    torch.stack([out.wait() for out in outs]).sum().backward()
    return [x.grad.unique().tolist() for x in leaves if x.grad is not None]


def opaque_rows_with_weight_gradients(group: Any, dtype: torch.dtype) -> list[float]:
    """Rows that were quantised before have no gradients; their weights do."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout="rank")
    values, scales = torch.zeros(6, 8).to(dtype), torch.ones(6, 1)
    weights = torch.ones(6, TOPK, requires_grad=True)
    idx = torch.arange(6 * TOPK).view(6, TOPK) % EXPERTS
    recv, handle = buffer.dispatch((values, scales), idx, weights)
    assert recv.topk_weights is not None
    buffer.combine(recv.topk_weights.sum(1, keepdim=True).expand(-1, 8), handle).sum().backward()
    assert weights.grad is not None
    return weights.grad.unique().tolist()


def gradients_for_what_has_none(group: Any) -> list[str]:
    """Leaves whose gradient could only be dropped in silence."""
    buffer, idx = cam.ep.Buffer(group, EXPERTS), torch.zeros(2, 1, dtype=torch.int64)
    opaque = torch.zeros(2, 8, dtype=torch.float64, requires_grad=True)
    scales = torch.ones(2, 1, requires_grad=True)
    refused = []
    for pair in ((opaque, scales.detach()), (torch.zeros(2, 8), scales)):
        try:
            buffer.dispatch(pair, idx)
        except cam.InputError as error:
            refused.append(str(error))
        with torch.no_grad():
            buffer.dispatch(pair, idx)
    return refused


def gradients_at_any_stride(group: Any, layout: str) -> list[bool]:
    """The gradient of out is expanded (sum), transposed, or a slice; x is transposed."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)
    columns, idx, _ = _inputs(group, 6)
    factor = torch.rand(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    reduced = (
        (lambda out: out.sum(), torch.ones(6, HIDDEN)),
        (lambda out: out.mean(0).sum(), torch.full((6, HIDDEN), 1 / 6)),
        (lambda out: (out.t() * factor.t()).sum(), factor),
        (lambda out: out[:, ::2].sum(), (torch.arange(HIDDEN) % 2 == 0).float().expand(6, -1)),
    )
    equal = []
    for reduce, gradient in reduced:
        grads = []
        for loss in (reduce, lambda out, g=gradient: (out * g).sum()):
            x = columns.t().contiguous().t().requires_grad_()
            recv, handle = buffer.dispatch(x, idx)
            loss(buffer.combine(recv.x * 2, handle)).backward()
            assert x.grad is not None
            grads.append(x.grad)
        equal.append(torch.equal(*grads))
    return equal


def under_another_default_dtype(group: Any) -> list[str]:
    """The types of what has no input to take them from, while a model is loaded as bf16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        x, idx = torch.ones(2, 8, dtype=torch.float32), torch.zeros(2, 1, dtype=torch.int64)
        recv, handle = cam.ep.Buffer(group, EXPERTS, quant="int8").dispatch(x, idx)
        assert recv.scales is not None
        return [str(each.dtype) for each in (handle.anchor, recv.scales)]
    finally:
        torch.set_default_dtype(torch.float32)


def release(group: Any) -> tuple[int, str]:
    """(window blocks that a released handle holds, what it says when used)."""
    buffer = cam.ep.Buffer(group, EXPERTS)
    gc.collect()
    before = group.memory()["blocks"]
    recv, handle = buffer.dispatch(torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    del recv
    handle.release()
    handle.release()
    gc.collect()
    held = group.memory()["blocks"] - before
    try:
        buffer.combine(torch.ones(0, 8), handle)
    except cam.InputError as error:
        return held, str(error)
    return held, "no error"


def compiled_with_graph_breaks(group: Any, layout: str) -> list[bool]:
    """Dispatch, experts, combine, and the backward pass, with breaks between: the compiler sees each piece alone."""
    buffer = cam.ep.Buffer(group, EXPERTS, layout=layout)

    def step(x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        recv, handle = buffer.dispatch(x, idx, weights)
        torch._dynamo.graph_break()
        out = buffer.combine(recv.x * 2, handle)
        again, handle = buffer.dispatch(x, handle=handle)
        torch._dynamo.graph_break()
        out = out + buffer.combine(again.x * 3, handle)
        out.square().sum().backward()
        return out.detach()

    equal = []
    for tokens in (3 + group.rank, 6, 2):
        results = []
        for call in (step, torch.compile(step, backend="aot_eager")):
            x, idx, weights = _inputs(group, tokens)
            x, weights = x.requires_grad_(), weights.requires_grad_()
            results.append([call(x, idx, weights), x.grad, weights.grad])
        equal.append(all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True)))
    return equal
