"""One test per public bug report of this field's expert-parallel libraries (facts/field-bugs.md, 1-18)."""

import time
from dataclasses import replace

import pytest
import torch

import cam
import cam_kernels
from cam_kernels import reference
from tests.conformance import field_bugs, golden, programs, stress
from tests.conformance.backends import KINDS, Backend, on_kinds, on_kinds_in_layouts
from tests.conformance.case import Case
from tests.conformance.checks import check
from tests.launcher import RankDied, Ranks

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@in_layouts
@on_kinds
def test_01_ranks_that_get_no_tokens(backend: Backend, layout: str) -> None:
    """sgl-kernel-npu#69: combine deadlocks when some ranks receive nothing. All top-k on rank 0, 20
    rounds.
    """
    cases = [Case((6, 3, 8, 5), topk=4, layout=layout, routing="rank0", seed=seed) for seed in range(20)]
    check(backend, *cases)


@in_layouts
@on_kinds
def test_02_a_rank_that_sends_no_tokens(backend: Backend, layout: str) -> None:
    """DeepEP#374, sglang#25397: crash on x[:0]. Empty in, empty [0, H] out."""
    check(backend, Case((6, 0), hidden=24, layout=layout, bias=True), Case((0, 0), hidden=24, layout=layout, bias=True))


@on_kinds_in_layouts
def test_03_combine_given_other_rows(backend: Backend, layout: str) -> None:
    """mori#475, mori#546: silent wrong sums. The handle keeps the routing; rows of another number are
    refused.
    """
    with backend.ranks(2) as ranks:
        for message, out in ranks.run(field_bugs.wrong_rows, layout):
            assert "rows" in message or "shape" in message
            assert "99" in message, "the value found is named"
            assert out, "and the group still works afterwards"


@on_kinds_in_layouts
def test_04_the_same_expert_twice(backend: Backend, layout: str) -> None:
    """vllm#48740: a duplicate trips an assert. Defined: computed twice, summed twice."""
    with backend.ranks(2) as ranks:
        for recv, out in ranks.run(field_bugs.duplicate, layout):
            assert recv["expert_counts_list"] in ([0, 0], [0, 4])
            assert out.tolist() == [[3.0 * (0.5 + 0.25)]]


@on_kinds_in_layouts
def test_05_offsets_after_the_first_peer(backend: Backend, layout: str) -> None:
    """vllm-ascend#10335: source rows taken from the wrong offset. Skewed counts, rows tagged rank * 1000 +
    i.
    """
    with backend.ranks(4) as ranks:
        for wrong in ranks.run(field_bugs.tagged, layout):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_06_no_row_is_ever_corrupt_at_capacity(backend: Backend, layout: str) -> None:
    """DeepEP#700: one wrong row in 3 % of calls at capacity. (500 rounds on 4 ranks: test_stress.py.)"""
    with backend.ranks(3) as ranks:
        for wrong in ranks.run(stress.rounds, 150, layout, None):
            assert not wrong, "\n".join(wrong)


@on_kinds_in_layouts
def test_07_a_slow_reader_is_not_overwritten(backend: Backend, layout: str) -> None:
    """mori#80, mori#93: dispatch overwrites a peer's buffer during combine. One slow rank, no barrier, 200
    rounds.
    """
    with backend.ranks(3) as ranks:
        for wrong in ranks.run(field_bugs.slow_reader, 200, layout):
            assert not wrong, "\n".join(wrong)


@in_layouts
def test_08_a_second_dispatch_on_one_buffer(layout: str) -> None:
    """sgl-kernel-npu#801: forward and backward on one buffer."""
    with Ranks(2) as ranks:
        for errors in ranks.run(programs.two_in_flight, layout):
            assert errors == []


@on_kinds
def test_09_different_limits_per_rank(backend: Backend) -> None:
    """DeepEP#208: different num_max per rank hangs. A collective check names both values and the rank."""
    with backend.ranks(3) as ranks:
        start = time.monotonic()
        errors = ranks.run(field_bugs.different_limits, expect_errors=True)
        assert time.monotonic() - start < 10
    for rank, error in enumerate(errors):
        assert isinstance(error, (cam.Mismatch, cam.GroupAborted)), repr(error)
        assert "16" in str(error)
        assert "32" in str(error)
        if isinstance(error, cam.Mismatch):
            assert error.rank != rank
            assert "max_tokens" in str(error.field)
    assert any(isinstance(error, cam.Mismatch) for error in errors)


@pytest.mark.parametrize(
    ("backend", "what"),
    [
        pytest.param(kind, what, id=f"{kind}-{what}")
        for kind in KINDS
        for what in field_bugs.DIFFERENCES
        if what != "layout" or len(kind.layouts) > 1
    ],
)
def test_09_anything_that_differs_between_ranks(backend: Backend, what: str) -> None:
    """As DeepEP#208, for every parameter that ranks must agree on."""
    with backend.ranks(2) as ranks:
        errors = ranks.run(field_bugs.different, what, expect_errors=True, deadline=25)
    assert all(isinstance(error, (cam.Mismatch, cam.GroupAborted)) for error in errors), errors
    assert any(isinstance(error, cam.Mismatch) for error in errors)


@on_kinds
def test_10_more_tokens_than_allowed(backend: Backend) -> None:
    """DeepEP#165: a bare assert. The message has the number given, the limit and the knob."""
    with backend.ranks(2) as ranks:
        for message in ranks.run(field_bugs.too_many_tokens):
            assert "17" in message
            assert "16" in message
            assert "max_tokens" in message


@in_layouts
@pytest.mark.parametrize("hidden", [1, 7, 96, 3072])
@on_kinds
def test_11_any_hidden_size(backend: Backend, hidden: int, layout: str) -> None:
    """DeepEP#413, sglang#19468: hidden not in a fixed list."""
    base = Case((5, 3), hidden=hidden, layout=layout)
    check(backend, base, replace(base, quant="int8"), replace(base, quant="fp8"))


@in_layouts
@pytest.mark.parametrize("topk", [9, 10, 12, 33])
@on_kinds
def test_12_any_top_k(backend: Backend, topk: int, layout: str) -> None:
    """uccl#1016: top-k 12 exceeds a hard-coded 9."""
    check(backend, Case((5, 3), experts=64, topk=topk, layout=layout, routing="distinct"))


def test_13_offsets_and_sizes_beyond_32_bits() -> None:
    """vllm#48398, sgl-kernel-npu#723: 32-bit offsets overflow. The helper that all kernels use, and the size hint."""
    assert cam_kernels.row_offset(1 << 33, 1 << 20, 7168 * 2) == (1 << 33) + (1 << 20) * 7168 * 2
    with Ranks(1) as ranks:
        (small, large) = ranks.run(field_bugs.size_hints)[0]
    assert small > 0
    assert large >= 2**20 * 8 * 7168 * 2


def test_13_rows_beyond_2_gib_of_the_window() -> None:
    """vllm#48398, sgl-kernel-npu#723: as above, with real rows."""
    case = Case((5, 4), hidden=64)
    with Ranks(2, window_limit="4GiB", window_retain=0) as ranks:
        golden.check_forward(case, ranks.run(field_bugs.beyond_2_gib, case))


@on_kinds
def test_14_sums_are_float32(backend: Backend) -> None:
    """DeepEP#176: a bfloat16 accumulator loses 2^-9. Experts give 1, 2^-9, -1."""
    with backend.ranks(3) as ranks:
        for out in ranks.run(field_bugs.cancelling):
            assert out.dtype == torch.bfloat16
            assert out.tolist() == [[2.0**-9]]


@in_layouts
def test_15_router_weights_get_their_gradient(layout: str) -> None:
    """DeepSpeed#8213: no gradient for router weights, and combine skipped with one rank: world 1 equals
    local.
    """
    case = Case((6,), hidden=8, experts=4, topk=2, layout=layout, dtype=torch.float32, routing="distinct")
    with Ranks(1) as ranks:
        (seen,) = ranks.run(programs.layer, case, False)
    assert seen["logits"].abs().sum() > 0
    for change in (1e-3, -1e-3):  # one finite difference, so that this does not rest on autograd alone
        assert torch.isfinite(seen["logits"]).all()
        with Ranks(1) as ranks:
            moved = ranks.run(field_bugs.layer_value, case, change)[0]
            still = ranks.run(field_bugs.layer_value, case, 0.0)[0]
        assert moved - still == pytest.approx(float(seen["logits"][2, 1]) * change, rel=0.05, abs=1e-5)


@on_kinds_in_layouts
def test_16_experts_that_do_not_divide(backend: Backend, layout: str) -> None:
    """vllm-ascend#16384: experts % ranks != 0 refused. 10 experts on 4 ranks, and 3 experts on 4."""
    base = Case((5, 3, 0, 9), experts=10, layout=layout)
    check(backend, base, replace(base, experts=3))
    with backend.ranks(4) as ranks:
        for got in ranks.run(field_bugs.ranges, 10):
            assert got == reference.expert_ranges(10, 4)


@on_kinds_in_layouts
def test_17_a_killed_rank_is_named(backend: Backend, layout: str) -> None:
    """Mooncake#2157: survivors hang or blame the wrong peer. Rank 1 is killed in the middle of a loop."""
    with backend.ranks(3) as ranks:
        start = time.monotonic()
        results = ranks.run(field_bugs.killed_in_a_loop, layout, expect_errors=True)
        assert time.monotonic() - start < 5
    assert isinstance(results[1], RankDied)
    for rank in (0, 2):
        error = results[rank]
        assert isinstance(error, cam.PeerLost), repr(error)
        assert error.rank == 1
        assert error.operation in ("dispatch", "combine")
        assert error.phase
        assert error.waited_s < 2
        for part in ("rank 1", error.operation, str(error.phase)):
            assert part in str(error)


@on_kinds
def test_17_a_late_rank_is_named(backend: Backend) -> None:
    """As Mooncake#2157 with a rank that is alive but late: Timeout names it; afterwards the group says
    why.
    """
    with backend.ranks(3) as ranks:
        results = ranks.run(field_bugs.late, 2)
        ranks.discard()  # their group is broken
    for rank in (0, 1):
        first, second = results[rank]
        assert isinstance(first, cam.Timeout), repr(first)
        assert list(first.ranks) == [2]
        assert first.operation == "dispatch"
        assert 0.3 <= first.waited_s < 5
        assert isinstance(second, cam.GroupAborted), repr(second)
        assert "rank 2" in str(second)


@on_kinds_in_layouts
def test_18_zero_splits(backend: Backend, layout: str) -> None:
    """Paddle#73875: all-to-all with zero splits divides by zero. Rows for ranks as [0, n, 0, m]."""
    with backend.ranks(4) as ranks:
        for wrong in ranks.run(field_bugs.zero_splits, layout):
            assert not wrong, "\n".join(wrong)
