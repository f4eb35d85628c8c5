"""Random shapes and routings against the golden. Deterministic: hypothesis derives its examples from the
test.
"""

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conformance import golden, programs
from tests.conformance.backends import CPU, Backend, on_families, on_kinds
from tests.conformance.case import PAIRS, ROUTINGS, Case
from tests.conformance.checks import check, check_repeated
from tests.launcher import Ranks

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
bounded = settings(
    derandomize=True, database=None, deadline=None, print_blob=False, suppress_health_check=list(HealthCheck)
)


@st.composite
def cases(draw: st.DrawFn, *, differentiable: bool = False) -> Case:
    layout = draw(st.sampled_from(["expert", "rank"]))
    world = draw(st.sampled_from([1, 2, 3, 4]))
    kind = "plain" if differentiable else draw(st.sampled_from(["plain", "plain", "int8", "fp8", "pair"]))
    pair = draw(st.sampled_from(PAIRS)) if kind == "pair" else None
    wide = [1, 7, 32, 96, 128, 130] if differentiable else [1, 7, 32, 96, 128, 130, 384, 3072]
    hidden = draw(st.sampled_from(wide))
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, 20), min_size=world, max_size=world))),
        hidden=hidden,
        experts=draw(st.sampled_from([1, 2, 3, 5, 8, 10, 64, 257])),
        topk=draw(st.sampled_from([1, 2, 3, 4, 8, 16, 20])),
        layout=layout,
        dtype=draw(st.sampled_from(DTYPES)),
        quant=kind if kind in ("int8", "fp8") else None,
        prequantised=pair,
        alignment=draw(st.sampled_from([1, 1, 2, 16, 128])) if layout == "expert" else 1,
        routing=draw(st.sampled_from(ROUTINGS)),
        weights=draw(st.booleans()),
        masks=draw(st.booleans()),
        bias=draw(st.booleans()),
        idx_dtype=draw(st.sampled_from([torch.int64, torch.int32])),
        strided=False if differentiable else draw(st.booleans()),
        out_hidden=None if differentiable else draw(st.sampled_from([None, 1, 24, 100])),
        out_dtype=None if differentiable else draw(st.sampled_from([None, *DTYPES])),
        special=False if differentiable else draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@on_families
@settings(bounded, max_examples=250)
@given(case=cases(), data=st.data())
def test_dispatch_and_combine(family: list[Backend], case: Case, data: st.DataObject) -> None:
    check(data.draw(st.sampled_from(family)), case)


@settings(bounded, max_examples=80)
@given(case=cases(differentiable=True), backend=st.sampled_from(CPU))
def test_gradients(case, backend) -> None:  # type: ignore[no-untyped-def]
    with Ranks(case.world, **backend.config) as ranks:
        golden.check_backward(case, ranks.run(programs.backward, case))


@on_kinds
@settings(bounded, max_examples=60)
@given(first=cases(), seed=st.integers(0, 1000), hidden=st.sampled_from([1, 31, 64, 500]))
def test_a_handle_repeated(backend: Backend, first: Case, seed: int, hidden: int) -> None:
    """The second x is of another width; it goes where the first went."""
    if first.prequantised is not None:
        first = replace(first, prequantised=None)
    check_repeated(backend, first, replace(first, hidden=hidden, out_hidden=first.out_hidden or first.hidden))


@on_kinds
@settings(bounded, max_examples=40)
@given(several=st.lists(cases(), min_size=2, max_size=6), world=st.sampled_from([2, 3]))
def test_buffers_of_all_kinds_on_one_group(backend: Backend, several: list[Case], world: int) -> None:
    """Sequences of different cases on one live group: nothing of one call is left for the next."""
    check(backend, *(replace(case, tokens=(case.tokens * 3)[:world]) for case in several))
