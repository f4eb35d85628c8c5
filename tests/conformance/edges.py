"""What ranks run in test_edges.py."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cam
from tests.conformance import golden
from tests.conformance.case import Case, expert_output, inputs
from tests.conformance.programs import Seen, forward, make_buffer, received
from tests.launcher import RankEnv

WAYS = ("transposed", "sliced columns", "sliced rows", "expanded", "offset by one", "window slice", "window transposed")


def _lay(group: Any, x: Tensor, way: str) -> Tensor:
    """The same values as x, lying in memory as `way` says."""
    if way == "transposed":
        return x.T.contiguous().T
    if way == "sliced columns":
        return torch.nn.functional.pad(x, (1, 2))[:, 1:-2]
    if way == "sliced rows":
        return x.repeat_interleave(3, 0)[1::3] if x.shape[0] else x
    if way == "expanded":
        return x[:1].expand(x.shape)
    if way == "offset by one":  # elements on addresses that are no multiple of a vector
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)
    rows, columns = x.shape
    if way == "window slice":
        inside = group.empty((rows + 2, columns + 3), x.dtype)[1 : rows + 1, 2 : columns + 2]
    else:
        inside = group.empty((columns, rows), x.dtype).T
    inside.copy_(x)
    return inside


def oddly(group: Any, layout: str, way: str) -> list[str]:
    case = Case((5, 4), hidden=33, layout=layout, bias=True, idx_dtype=torch.int64)
    plain, buffer, seen = inputs(case, group.rank), make_buffer(group, case), []
    assert isinstance(plain.x, Tensor)
    assert plain.topk_weights is not None
    assert plain.bias is not None
    for lay in (lambda x: x.contiguous(), lambda x: _lay(group, x, way)):
        # `expanded` has other values: both passes start from them.
        start: list[Tensor] = [plain.x, plain.topk_idx, plain.topk_weights, plain.bias]
        if way == "expanded":
            start = [value[:1].expand(value.shape) for value in start]
        x, idx, weights, bias = map(lay, start)
        recv, handle = buffer.dispatch(x, idx, weights)
        y = expert_output(case, group.rank, recv.x.shape[0])
        y = lay(y[:1].expand(y.shape) if way == "expanded" else y)
        seen.append({**received(recv), "out": buffer.combine(y, handle, bias=bias)})
    wrong = []
    for name, want in seen[0].items():
        try:
            if isinstance(want, Tensor):
                golden.same_bits(seen[1][name], want, f"{way}: {name}")
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


def in_place(group: Any, layout: str) -> bool:
    buffer = cam.ep.Buffer(group, 4, layout=layout)
    x = torch.randn(6, 8)
    recv, handle = buffer.dispatch(x, torch.arange(6)[:, None] % 4)
    recv.x.mul_(2)
    return torch.equal(buffer.combine(recv.x, handle), x * 2)


def outlive(group: Any) -> list[str]:
    case = Case((20, 20), hidden=64, topk=4)
    mine, kept = inputs(case, group.rank), []
    for n in range(6):
        buffer = make_buffer(group, case)
        recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        out = buffer.combine(expert_output(case, group.rank, recv.x.shape[0]), handle)
        # A view of a part keeps all of it.
        kept.append((recv.x[3:], recv.x[3:].clone(), out[:, 5], out[:, 5].clone()))
        handle.release()
        handle.release()
        del buffer, recv, handle, out
        if n % 2:
            gc.collect()
    wrong = []
    for n, (rows, rows_then, column, column_then) in enumerate(kept):
        if not torch.equal(rows, rows_then) or not torch.equal(column, column_then):
            wrong.append(f"what round {n} gave has changed")
    return wrong


def too_little_memory(group: Any) -> tuple[BaseException | None, bool]:
    buffer = cam.ep.Buffer(group, 2)
    tokens, error = 2000, None
    try:  # everything to expert 1, which lives on rank 1
        buffer.dispatch(torch.ones(tokens, 512), torch.ones(tokens, 1, dtype=torch.int64))
    except cam.CamError as raised:
        error = raised
        error.__traceback__ = None
    x = torch.ones(4, 512)
    recv, handle = buffer.dispatch(x, torch.ones(4, 1, dtype=torch.int64))
    return error, torch.equal(buffer.combine(recv.x, handle), x)


def two_groups(env: RankEnv) -> list[str]:
    groups = [
        cam.init(store=dist.PrefixStore(name, env.store), rank=env.rank, world_size=env.world_size, name=name)
        for name in ("left", "right")
    ]
    wrong: list[str] = []

    def work(group: Any, seed: int) -> None:
        case = Case((12,) * env.world_size, hidden=64, topk=4, seed=seed)
        mine, buffer = inputs(case, env.rank), make_buffer(group, case)
        part = golden.received(case)[env.rank]
        out_want = golden.outputs(case, golden.received(case))[env.rank]
        for _ in range(60):
            recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
            out = buffer.combine(expert_output(case, env.rank, recv.x.shape[0]), handle)
            try:
                golden.check_received(received(recv), part, env.rank)
                golden.same_bits(out, out_want, "combine")
            except AssertionError as error:
                wrong.append(f"{group.name}: {error}")

    threads = [threading.Thread(target=work, args=(group, n)) for n, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.barrier()
        group.close()
    return wrong[:5]


def inference(group: Any, case: Case) -> Seen:
    with torch.inference_mode():
        seen = forward(group, case)
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in seen.items()}


X, IDX, W = torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
Call = Callable[[Any, Any], Any]  # of a buffer and a handle

_CALLS: dict[str, tuple[Call, list[str]]] = {
    "x of one dimension": (lambda b, _: b.dispatch(X[0], IDX, W), ["(8,)"]),
    "x of integers": (lambda b, _: b.dispatch(X.long(), IDX, W), ["int64"]),
    "no topk_idx": (lambda b, _: b.dispatch(X), ["topk_idx"]),
    "topk_idx of another length": (lambda b, _: b.dispatch(X, IDX[:2], W[:2]), ["(2, 2)", "3"]),
    "topk_idx of floats": (lambda b, _: b.dispatch(X, IDX.float(), W), ["float32", "int64", "int32"]),
    "expert too large": (lambda b, _: b.dispatch(X, IDX + 4, W), ["4"]),
    "expert far too large": (lambda b, _: b.dispatch(X, IDX + 2**40, W), [str(2**40)]),
    "expert below -1": (lambda b, _: b.dispatch(X, IDX - 2, W), ["-2"]),
    "int32 expert below -1": (lambda b, _: b.dispatch(X, (IDX - 2).int(), W), ["-2"]),
    "weights of another shape": (lambda b, _: b.dispatch(X, IDX, W[:, :1]), ["(3, 1)", "(3, 2)"]),
    "weights in half": (lambda b, _: b.dispatch(X, IDX, W.half()), ["float16", "float32"]),
    "mask of another length": (lambda b, _: b.dispatch(X, IDX, W, active_mask=torch.ones(4).bool()), ["4", "3"]),
    "mask of integers": (lambda b, _: b.dispatch(X, IDX, W, active_mask=torch.ones(3).int()), ["int32", "bool"]),
    "handle and topk_idx": (lambda b, h: b.dispatch(X, IDX, handle=h), ["topk_idx", "handle"]),
    "handle and other tokens": (lambda b, h: b.dispatch(X[:2], handle=h), ["2", "3"]),
    "scales of another length": (lambda b, _: b.dispatch((X, torch.ones(2)), IDX, W), ["2", "3"]),
    "y of another length": (lambda b, h: b.combine(torch.ones(77, 8), h), ["77"]),
    "y of one dimension": (lambda b, h: b.combine(torch.ones(77), h), ["77"]),
    "y of integers": (lambda b, h: b.combine(torch.ones(h.rows, 8).int(), h), ["int32"]),
    "bias of another dtype": (lambda b, h: b.combine(torch.ones(h.rows, 8), h, bias=X.half()), ["float16"]),
    "bias of another shape": (lambda b, h: b.combine(torch.ones(h.rows, 8), h, bias=X[:1]), ["(1, 8)"]),
    "row weights of another shape": (
        lambda b, h: b.combine(torch.ones(h.rows, 8), h, topk_weights=torch.ones(99)),
        ["99"],
    ),
    "a negative timeout": (lambda b, _: b.dispatch(X, IDX, W, timeout=-1.0), ["-1"]),
    "a handle of another layout": (
        lambda b, h: cam.ep.Buffer(b.group, 4, layout="rank").combine(torch.ones(h.rows, 8), h),
        ["expert", "rank"],
    ),
    "a handle of another alignment": (
        lambda b, h: cam.ep.Buffer(b.group, 4, expert_alignment=8).combine(torch.ones(h.rows, 8), h),
        ["handle"],
    ),
    "a released handle": (lambda b, h: (h.release(), b.combine(torch.ones(0, 8), h)), ["released"]),
}
#: What is wrong -> words of the message.
BAD_CALLS = {what: words for what, (_, words) in _CALLS.items()}


def bad_call(group: Any, what: str) -> tuple[str, bool]:
    buffer = cam.ep.Buffer(group, 4)
    _, handle = buffer.dispatch(X, IDX, W)
    try:
        _CALLS[what][0](buffer, handle)
        message = "accepted"
    except cam.InputError as error:
        message = str(error)
    recv, handle = buffer.dispatch(X, IDX, W)
    return message, torch.equal(buffer.combine(recv.x, handle), X * 2)


def asynchronous_error(group: Any) -> BaseException | None:
    buffer = cam.ep.Buffer(group, 4)
    pending = buffer.dispatch_async(X, IDX + 9, W)
    try:
        pending.wait()
    except cam.CamError as error:
        return error
    return None


def refused_dtype(group: Any, dtype: torch.dtype) -> str:
    try:
        cam.ep.Buffer(group, 4).dispatch(X.to(dtype), IDX)
    except cam.InputError as error:
        return str(error)
    return "accepted"
