"""Shapes at the edge, tensors that lie oddly in memory, and limits."""

from dataclasses import replace

import pytest
import torch

import cam
from tests.conformance import edges, golden
from tests.conformance.backends import Backend, on_kinds, on_kinds_in_layouts
from tests.conformance.case import Case
from tests.conformance.checks import check
from tests.launcher import Ranks

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@in_layouts
@on_kinds
def test_nothing_to_select_from(backend: Backend, layout: str) -> None:
    """K = 0, with and without tokens: nothing is sent, every token gets its bias."""
    base = Case((3, 2), topk=0, layout=layout, routing="none", bias=True)
    check(backend, base, replace(base, tokens=(0, 2)), replace(base, weights=False))


@in_layouts
@on_kinds
def test_rows_of_no_bytes(backend: Backend, layout: str) -> None:
    """H = 0: routing, counts and weights still work."""
    base = Case((3, 2), hidden=0, out_hidden=4, layout=layout)
    check(backend, base, replace(base, quant="int8"), replace(base, quant="fp8"), replace(base, out_hidden=None))


@in_layouts
@on_kinds
def test_very_many_experts(backend: Backend, layout: str) -> None:
    """Counts that fill more than one message."""
    check(backend, Case((4, 3, 5), experts=30_000, topk=6, layout=layout))


@in_layouts
@on_kinds
def test_many_tokens(backend: Backend, layout: str) -> None:
    check(backend, Case((3000, 1700), hidden=8, experts=20, topk=6, layout=layout, routing="skewed"))


@on_kinds_in_layouts
@pytest.mark.parametrize("way", edges.WAYS)
def test_tensors_that_lie_oddly(backend: Backend, layout: str, way: str) -> None:
    """x, y, topk_idx, topk_weights and bias as expanded, transposed, sliced or offset views, some in window memory."""
    with backend.ranks(2) as ranks:
        for wrong in ranks.run(edges.oddly, layout, way):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_experts_may_work_in_place(backend: Backend, layout: str) -> None:
    """recv.x belongs to the receiver: it may be overwritten and given back."""
    with backend.ranks(2) as ranks:
        assert ranks.run(edges.in_place, layout) == [True, True]


@on_kinds
def test_results_outlive_the_buffer_the_handle_and_the_next_calls(backend: Backend) -> None:
    with backend.ranks(2) as ranks:
        assert ranks.run(edges.outlive) == [[], []]


@on_kinds
def test_too_little_window_memory(backend: Backend) -> None:
    """All ranks raise alike, with what was asked for and the knob; the group stays usable."""
    with backend.ranks(2, window_limit="1MiB") as ranks:
        for error, usable in ranks.run(edges.too_little_memory):
            assert isinstance(error, cam.OutOfWindowMemory), repr(error)
            assert error.rank == 1, "the rank that lacks it is named on every rank"
            assert error.limit == 1 << 20
            assert error.requested > 1 << 20
            assert "window_limit" in str(error)
            assert usable


def test_two_groups_in_the_same_processes_at_once() -> None:
    """Two threads of each rank, each with a group of its own (two-batch overlap)."""
    with Ranks(2, group=False) as ranks:
        for wrong in ranks.run(edges.two_groups):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_inference_mode(backend: Backend, layout: str) -> None:
    case = Case((5, 3), layout=layout, bias=True)
    with backend.ranks(2) as ranks:
        golden.check_forward(case, ranks.run(edges.inference, case))


@pytest.mark.parametrize("what", edges.BAD_CALLS)
@on_kinds
def test_bad_arguments_are_refused_before_anything_is_sent(backend: Backend, what: str) -> None:
    """InputError on each rank that errs, which names the value; then the group goes on as before."""
    with backend.ranks(2) as ranks:
        for message, usable in ranks.run(edges.bad_call, what):
            for word in edges.BAD_CALLS[what]:
                assert word in message, message
            assert usable


@on_kinds
def test_errors_of_asynchronous_calls_come_from_wait(backend: Backend) -> None:
    with backend.ranks(2) as ranks:
        for error in ranks.run(edges.asynchronous_error):
            assert isinstance(error, cam.InputError), repr(error)


@on_kinds
def test_dtypes_are_listed_when_one_is_refused(backend: Backend) -> None:
    with backend.ranks(1) as ranks:
        (message,) = ranks.run(edges.refused_dtype, torch.float64)
    for word in ("float64", "bfloat16", "float16", "float32"):
        assert word in message


def test_a_buffer_does_not_outlive_its_group() -> None:
    """Ops find their group by name; a new group of that name is another group."""
    with cam.init(name="edges-reused", threads=1) as group:
        buffer = cam.ep.Buffer(group, 2)
        x, idx = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int64)
        recv, handle = buffer.dispatch(x, idx)
    with cam.init(name="edges-reused", threads=1):
        with pytest.raises(cam.GroupAborted, match="closed"):
            buffer.dispatch(x, idx)
        with pytest.raises(cam.GroupAborted, match="closed"):
            buffer.combine(recv.x, handle)
