"""What ranks run in test_field_bugs.py."""

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

import cam
from tests.conformance import golden
from tests.conformance.case import Case, cotangent, expert_output, inputs
from tests.conformance.programs import Seen, apply_experts, expert_weights, forward, make_buffer, received


def wrong_rows(group: Any, layout: str) -> tuple[str, bool]:
    buffer = cam.ep.Buffer(group, 4, layout=layout)
    recv, handle = buffer.dispatch(torch.ones(3, 8), torch.tensor([[0, 1], [2, 3], [1, 2]]))
    try:
        buffer.combine(torch.ones(99, 8), handle)
        message = "accepted"
    except cam.InputError as error:
        message = str(error)
    out = buffer.combine(recv.x, handle)
    return message, bool((out == out[:, :1]).all()) and out[0, 0].item() in (1.0, 2.0)


def duplicate(group: Any, layout: str) -> tuple[Seen, Tensor]:
    buffer = cam.ep.Buffer(group, 4, layout=layout)
    recv, handle = buffer.dispatch(torch.tensor([[1.0]]), torch.tensor([[3, 3]]), torch.tensor([[0.5, 0.25]]))
    if layout == "expert":
        return received(recv), buffer.combine(recv.x * 3, handle)
    share = torch.where(recv.topk_idx >= 0, recv.topk_weights, 0.0).sum(1, keepdim=True)
    return received(recv), buffer.combine(recv.x * 3 * share, handle)


def tagged(group: Any, layout: str) -> list[str]:
    """Rank r sends 1 + 5 r rows, most of them to the last ranks; each carries rank * 1000 + token."""
    tokens = 1 + 5 * group.rank
    x = (group.rank * 1000 + torch.arange(tokens)).float()[:, None].repeat(1, 4)
    idx = torch.stack([torch.full((tokens,), 11), torch.arange(tokens) % 7], 1)
    buffer = cam.ep.Buffer(group, 12, layout=layout)
    recv, handle = buffer.dispatch(x, idx)
    want = recv.source[:, 0] * 1000 + recv.source[:, 1]
    wrong = []
    if not torch.equal(recv.x[:, 0], want.float()):
        wrong.append(f"received {recv.x[:, 0].tolist()}, not {want.tolist()}")
    out = buffer.combine(recv.x, handle)
    copies = out / x  # one per row that was sent; token 0 of rank 0 is 0 / 0
    if not torch.isin(copies[x > 0], torch.tensor([1.0, 2.0])).all():
        wrong.append(f"combined {out[:, 0].tolist()}")
    return wrong


def slow_reader(group: Any, rounds: int, layout: str) -> list[str]:
    case = Case((16,) * group.size, hidden=64, experts=9, topk=4, layout=layout)
    other = Case((16,) * group.size, hidden=64, experts=9, topk=4, layout=layout, seed=1, routing="skewed")
    buffer = make_buffer(group, case)
    prepared = [(c, inputs(c, group.rank), golden.outputs(c, golden.received(c))) for c in (case, other)]
    wrong = []
    for n in range(rounds):
        which, mine, outs = prepared[n % 2]
        recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        if group.rank == 1:
            time.sleep(0.001)
        y = expert_output(which, group.rank, recv.x.shape[0])
        out = buffer.combine(y, handle)
        if group.rank == 1:
            time.sleep(0.001)
        try:
            golden.check_received(received(recv), golden.received(which)[group.rank], group.rank)
            golden.same_bits(out, outs[group.rank], "combine")
        except AssertionError as error:
            wrong.append(f"round {n}: {error}")
    return wrong[:5]


def different_limits(group: Any) -> None:
    buffer = cam.ep.Buffer(group, 8, max_tokens=32 if group.rank == 1 else 16)
    buffer.dispatch(torch.ones(3, 8), torch.zeros(3, 2, dtype=torch.int64))


DIFFERENCES = (
    "num_experts",
    "layout",
    "quant",
    "hidden",
    "dtype",
    "topk",
    "weights",
    "operation",
    "alignment",
)


def different(group: Any, what: str) -> None:
    """Rank 1 calls with one parameter unlike rank 0's."""
    odd = group.rank == 1
    options: dict[str, Any] = {"layout": "expert"}
    if what == "layout" and odd:
        options["layout"] = "rank"
    if what == "quant" and odd:
        options["quant"] = "int8"
    if what == "alignment" and odd:
        options["expert_alignment"] = 8
    buffer = cam.ep.Buffer(group, 9 if what == "num_experts" and odd else 8, **options)
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    x = torch.ones(3, 16 if what == "hidden" and odd else 8, dtype=dtype)
    k = 3 if what == "topk" and odd else 2
    weights = None if what == "weights" and odd else torch.ones(3, k)
    idx = torch.zeros(3, k, dtype=torch.int64)
    if what == "operation":
        recv, handle = buffer.dispatch(x, idx, weights)
        if odd:
            buffer.dispatch(x, idx, weights)
        else:
            buffer.combine(recv.x, handle)
        return
    recv, handle = buffer.dispatch(x, idx, weights)
    buffer.combine(recv.x, handle)


def too_many_tokens(group: Any) -> str:
    buffer = cam.ep.Buffer(group, 8, max_tokens=16)
    idx = torch.zeros(17, 2, dtype=torch.int64)
    buffer.dispatch(torch.ones(16, 8), idx[:16])
    try:
        buffer.dispatch(torch.ones(17, 8), idx)
    except cam.InputError as error:
        return str(error)
    return "accepted"


def size_hints(group: Any) -> tuple[int, int]:
    buffer = cam.ep.Buffer(group, 8)
    return buffer.size_hint(1, 8, 2, torch.bfloat16), buffer.size_hint(2**20, 7168, 8, torch.bfloat16)


def beyond_2_gib(group: Any, case: Case) -> Seen:
    """The case, with the first 2 GiB of rank 1's window taken, so that all its rows lie behind them."""
    taken = group.empty((1 << 31 if group.rank == 1 else 0,), torch.uint8)
    seen = forward(group, case)
    copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in seen.items()}
    del taken
    return copies


def cancelling(group: Any) -> Tensor:
    """Expert e lives on rank e."""
    buffer = cam.ep.Buffer(group, 3)
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    recv, handle = buffer.dispatch(x, torch.tensor([[0, 1, 2]]))
    y = recv.x * (1.0, 2.0**-9, -1.0)[group.rank]
    out: Tensor = buffer.combine(y, handle)
    return out


def layer_value(group: Any, case: Case, change: float) -> float:
    """The loss of programs.layer with logits[2, 1] moved by `change`."""
    mine = inputs(case, group.rank)
    assert mine.topk_weights is not None
    logits, experts = mine.topk_weights.clone(), expert_weights(case)
    logits[2, 1] += change
    buffer = make_buffer(group, case)
    recv, handle = buffer.dispatch(mine.x, mine.topk_idx, logits.softmax(-1))
    out = buffer.combine(apply_experts(recv, experts, buffer.expert_range().start, case), handle)
    return float((out.double() * cotangent(out, case, group.rank, 6).double()).sum())


def ranges(group: Any, experts: int) -> list[range]:
    buffer = cam.ep.Buffer(group, experts)
    assert buffer.expert_range() == buffer.expert_range(group.rank)
    return [buffer.expert_range(rank) for rank in range(group.size)]


def killed_in_a_loop(group: Any, layout: str) -> None:
    case = Case((6,) * group.size, layout=layout)
    mine, buffer = inputs(case, group.rank), make_buffer(group, case)
    for n in range(10_000):
        recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        if n == 30 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        buffer.combine(expert_output(case, group.rank, recv.x.shape[0]), handle)


def late(group: Any, who: int) -> tuple[BaseException | None, BaseException | None]:
    """Rank `who` never calls the second dispatch; the others call twice more."""
    buffer = cam.ep.Buffer(group, 4)
    x, idx = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64)
    buffer.dispatch(x, idx)
    if group.rank == who:
        return None, None
    errors: list[BaseException | None] = [None, None]
    for n in range(2):
        try:
            buffer.dispatch(x, idx, timeout=0.3)
        except cam.CamError as error:
            errors[n] = error
    return errors[0], errors[1]


def zero_splits(group: Any, layout: str) -> list[str]:
    """Rows go to ranks 1 and 3 only; ranks 0 and 2 have no tokens at all in the second half."""
    wrong = []
    for tokens in ((4, 4, 4, 4), (0, 5, 0, 3)):
        n = tokens[group.rank]
        x = torch.full((n, 8), float(group.rank + 1))
        idx = torch.where(torch.arange(n) % 3 == 0, 1, 3)[:, None]
        buffer = cam.ep.Buffer(group, 4, layout=layout)
        recv, handle = buffer.dispatch(x, idx)
        out = buffer.combine(recv.x, handle)
        if group.rank in (0, 2) and recv.x.shape[0] != 0:
            wrong.append(f"rank {group.rank} received {recv.x.shape[0]} rows")
        if not torch.equal(out, x):
            wrong.append(f"{out.tolist()}, not {x.tolist()}")
    return wrong
