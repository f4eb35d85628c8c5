"""Whole dispatches and combines: real processes, shared windows, kernels run from their Ascend IR, against the golden.

The cases and the golden are those of the conformance suite; what these kernels do not have (rank layout, fp8, float64)
is left out, as are cases beyond the limits that they declare.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.ascend import programs
from tests.conformance import golden
from tests.conformance.case import ROUTINGS, Case
from tests.launcher import RankDied, Ranks

TOKENS = (7, 0, 12, 1, 5, 16, 3, 9)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_keys = itertools.count()


def key() -> str:
    return f"window{next(_keys)}"


def check_seen(case: Case, everything: list[programs.Seen]) -> None:
    parts = golden.received(case)
    outs, plain = golden.outputs(case, parts), golden.outputs(case, parts, weighted=False)
    for rank, (seen, part) in enumerate(zip(everything, parts, strict=True)):
        golden.check_received(seen, part, rank)
        golden.same_bits(seen["out"], outs[rank], f"rank {rank}: combine")
        golden.same_bits(seen["out_again"], plain[rank], f"rank {rank}: combine without weights")


def check(*cases: Case, **options: int) -> None:
    with Ranks(cases[0].world, group=False, deadline=120) as ranks:
        by_rank = ranks.run(programs.forward, list(cases), key(), *options.values())
    for number, case in enumerate(cases):
        check_seen(case, [seen[number] for seen in by_rank])


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_worlds_and_dtypes(world: int) -> None:
    base = Case(TOKENS[:world], hidden=40, experts=10, topk=3, bias=True)
    check(*(replace(base, dtype=dtype) for dtype in DTYPES), replace(base, hidden=257, masks=True, bias=False, seed=1))


@pytest.mark.parametrize("hidden", [1, 7, 31, 32, 33, 128, 300])
def test_every_kind_of_hidden(hidden: int) -> None:
    base = Case((5, 4), hidden=hidden, bias=True)
    check(base, replace(base, dtype=torch.float32), replace(base, quant="int8"))


def test_wide_rows_in_several_tiles() -> None:
    """8192 elements do not fit one tile of the quantising and the summing kernel."""
    base = Case((5, 3), hidden=8192, experts=16, topk=8, routing="distinct")
    check(base, replace(base, quant="int8"), replace(base, hidden=7168))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(routing: str) -> None:
    base = Case(TOKENS[:4], topk=4, routing=routing)
    check(base, replace(base, experts=10, masks=True), replace(base, experts=3), replace(base, experts=1))


@pytest.mark.parametrize("alignment", [2, 8, 128])
def test_alignment(alignment: int) -> None:
    base = Case((6, 0, 11), experts=7, topk=3, alignment=alignment)
    check(base, replace(base, quant="int8"), replace(base, weights=False))


def test_rows_that_are_quantised_already() -> None:
    check(Case((6, 0, 11), hidden=36, prequantised="int8 [T]", out_hidden=64))


def test_index_types() -> None:
    check(Case((6, 4, 11), idx_dtype=torch.int32, bias=True))


def test_combine_takes_another_hidden_and_dtype() -> None:
    base = Case((6, 4, 11), bias=True)
    check(
        *(
            replace(base, out_hidden=h, out_dtype=d)
            for h, d in ((1, torch.float32), (20, torch.float16), (96, torch.bfloat16))
        )
    )


def test_the_limits_of_the_kernels() -> None:
    check(Case((9, 4), experts=512, topk=16, routing="distinct"))


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (5, 1), (4, 3)])
def test_the_number_of_cores_and_threads_changes_nothing(cores: int, threads: int) -> None:
    check(Case((20, 9), hidden=64, experts=9, topk=4, bias=True), cores=cores, threads=threads)


def test_both_halves_of_a_window_over_many_epochs() -> None:
    case = Case((6, 0, 11), hidden=24, topk=3)
    with Ranks(3, group=False) as ranks:
        by_rank = ranks.run(programs.many_epochs, case, 7, key())
    for number in range(7):
        check_seen(replace(case, seed=number), [seen[number] for seen in by_rank])


def test_two_dispatches_in_flight() -> None:
    case = Case((6, 5), hidden=24, topk=3)
    with Ranks(2, group=False) as ranks:
        by_rank = ranks.run(programs.two_handles, case, key())
    for number in (0, 1):
        which = replace(case, seed=number)
        parts = golden.received(which)
        wanted = golden.reference.combine([p.x for p in parts], parts, golden._used_weights(which), layout="expert")
        for rank in (0, 1):
            golden.same_bits(by_rank[rank][number], wanted[rank], f"rank {rank}, dispatch {number}")


def test_running_sums_are_those_of_the_umdk_contract() -> None:
    case = Case((6, 5), hidden=24, experts=8, topk=3, weights=False)
    with Ranks(2, group=False) as ranks:
        by_rank = ranks.run(programs.forward, [case], key())
    mine = [golden.all_inputs(case)[rank] for rank in (0, 1)]
    wanted = golden.reference.moe_dispatch_prefill(
        [m.x for m in mine], [m.topk_idx for m in mine], case.experts, use_quant=False
    )
    for rank in (0, 1):
        golden.same_bits(by_rank[rank][0]["running"].flatten(), wanted[rank][3], f"rank {rank}: recv_count")


def test_ranks_that_differ_are_named_before_any_row_is_sent() -> None:
    with Ranks(3, group=False) as ranks:
        assert ranks.run(programs.differing, Case((4, 4, 4), topk=3), key()) == ["topk 1", "topk 0", "topk 1"]


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_dead_rank_is_named(phase: str) -> None:
    case = Case((6, 6, 6), experts=6, topk=6, routing="distinct")
    with Ranks(3, group=False) as ranks:
        results = ranks.run(programs.late, case, phase, key(), expect_errors=True)
    assert isinstance(results[2], RankDied)
    assert results[:2] == [(phase, (2,)), (phase, (2,))]
