"""What ranks run in the stress tests. Each rank compares with the golden itself; it returns what was
wrong.
"""

import gc
import time
from dataclasses import replace
from typing import Any

from torch import Tensor

import cam
from tests.conformance import golden
from tests.conformance.case import Case, expert_output, inputs
from tests.conformance.programs import make_buffer, received

TOKENS = 48


def _cases(group: Any, layout: str, quant: str | None = None) -> list[Case]:
    """Five routings over the same buffer, all at capacity, so that rounds differ and follow no short
    period.
    """
    base = Case((TOKENS,) * group.size, hidden=192, experts=10, topk=4, layout=layout, quant=quant)
    return [
        replace(base, seed=seed, routing=routing)
        for seed, routing in enumerate(("uniform", "skewed", "rank0", "mixed", "distinct"))
    ]


def _differences(case: Case, rank: int, recv: Any, out: Tensor | None) -> list[str]:
    wrong = []
    try:
        golden.check_received(received(recv), golden.received(case)[rank], rank)
        if out is not None:
            golden.same_bits(out, _outputs(case)[rank], f"rank {rank}: combine")
    except AssertionError as error:
        wrong.append(str(error))
    return wrong


_known: dict[Case, list[Tensor]] = {}


def _outputs(case: Case) -> list[Tensor]:
    if case not in _known:
        _known[case] = golden.outputs(case, golden.received(case))
    return _known[case]


def rounds(group: Any, count: int, layout: str, quant: str | None) -> list[str]:
    cases = _cases(group, layout, quant)
    buffer = make_buffer(group, cases[0], max_tokens=TOKENS)
    prepared = [(inputs(case, group.rank), case) for case in cases]
    wrong: list[str] = []
    for n in range(count):
        mine, case = prepared[n % len(prepared)]
        slow = n % group.size == group.rank
        if slow and n % 3 == 0:
            time.sleep(0.002)
        assert isinstance(mine.x, Tensor)
        x = mine.x.clone()
        recv, handle = buffer.dispatch(x, mine.topk_idx, mine.topk_weights)
        x.fill_(7)  # a call that has returned has read its arguments, and so have the peers
        if slow and n % 3 == 1:
            time.sleep(0.002)
        y = expert_output(case, group.rank, recv.x.shape[0])
        if n % 2:  # in window memory: read in place
            y = group.empty(tuple(y.shape), y.dtype).copy_(y)
        out = buffer.combine(y, handle)
        y.fill_(7)
        if slow and n % 3 == 2:  # late to read what it received: peers are in the next round already
            time.sleep(0.002)
        wrong += [f"round {n}: {text}" for text in _differences(case, group.rank, recv, out)]
        if len(wrong) > 5:
            break
    return wrong


def in_flight(group: Any, count: int, layout: str) -> list[str]:
    """All dispatched before any is combined; combined in another order; results read at the very end."""
    cases = (_cases(group, layout) * count)[:count]
    buffers = [make_buffer(group, cases[0]), make_buffer(group, cases[0])]
    sent = []
    for n, case in enumerate(cases):
        mine = inputs(case, group.rank)
        sent.append((case, *buffers[n % 2].dispatch(mine.x, mine.topk_idx, mine.topk_weights)))
    results = []
    for n in sorted(range(count), key=lambda n: (n * 7) % count):
        case, recv, handle = sent[n]
        out = buffers[n % 2].combine(expert_output(case, group.rank, recv.x.shape[0]), handle)
        results.append((case, recv, out))
    wrong = []
    for case, recv, out in results:
        wrong += _differences(case, group.rank, recv, out)
    return wrong


def asynchronous(group: Any, count: int, layout: str) -> list[str]:
    cases = _cases(group, layout)
    buffer = make_buffer(group, cases[0])
    wrong = []
    for n in range(count):
        case, later = cases[n % len(cases)], cases[(n + 1) % len(cases)]
        mine, other = inputs(case, group.rank), inputs(later, group.rank)
        pending = buffer.dispatch_async(mine.x, mine.topk_idx, mine.topk_weights)
        pending2 = buffer.dispatch_async(other.x, other.topk_idx, other.topk_weights)
        if n % group.size == group.rank:
            time.sleep(0.001)
        first, second = (pending, pending2) if n % 2 == 0 else (pending2, pending)
        answers = {id(first): first.wait(), id(second): second.wait()}
        (recv, handle), (recv2, handle2) = answers[id(pending)], answers[id(pending2)]
        y, y2 = (expert_output(c, group.rank, r.x.shape[0]) for c, r in ((case, recv), (later, recv2)))
        back2 = buffer.combine_async(y2, handle2)
        back = buffer.combine_async(y, handle)
        wrong += _differences(case, group.rank, recv, back.wait())
        wrong += _differences(later, group.rank, recv2, back2.wait())
        if len(wrong) > 5:
            break
    return wrong


def memory_after_rounds(group: Any, layout: str) -> tuple[int, int]:
    """Allocated window bytes after the first and after the 51st round, with nothing held."""
    case = _cases(group, layout)[3]
    buffer = cam.ep.Buffer(group, case.experts, layout=layout)
    mine = inputs(case, group.rank)
    seen = []
    for _ in range(51):
        recv, handle = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        buffer.combine(expert_output(case, group.rank, recv.x.shape[0]), handle)
        del recv, handle
        gc.collect()
        group.barrier()
        seen.append(int(group.memory()["allocated"]))
        group.barrier()
    return seen[0], seen[-1]
