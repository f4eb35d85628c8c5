"""The golden against cases worked out by hand, and against autograd."""

import itertools

import pytest
import torch

from cam_kernels import reference

NAN = float("nan")


def rows(*values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


# --- quantisers ---------------------------------------------------------------------------------------------


def test_int8_scales_by_the_largest_magnitude() -> None:
    q, scale = reference.quant_int8(rows([127.0, -63.5, 1.0], [-254.0, 2.0, 1.0]))
    assert scale.tolist() == [1.0, 2.0]
    assert q.tolist() == [[127, -64, 1], [-127, 1, 0]]  # -63.5 and 0.5 go to the even neighbour


def test_int8_zero_row() -> None:
    q, scale = reference.quant_int8(torch.zeros(1, 3))
    assert q.tolist() == [[0, 0, 0]]
    assert scale.tolist() == [0.0]


def test_int8_never_leaves_its_range() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal
    x = torch.tensor([[tiny * 2**-23 * n, 0.0] for n in range(1, 300)])  # scales with one bit of precision
    q, _ = reference.quant_int8(x)
    assert q.min() >= 0
    assert q.max() == 127


def test_int8_error_is_half_a_step() -> None:
    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(0))
    q, scale = reference.quant_int8(x)
    assert ((reference.dequant_int8(q, scale) - x).abs() <= scale[:, None] * 0.5001).all()


def test_fp8_has_a_scale_per_128_channels() -> None:
    x = torch.zeros(1, 130)
    x[0, 0], x[0, 1], x[0, 129] = 448.0, -1.0, 4.0
    q, scale = reference.quant_fp8(x)
    assert torch.equal(scale, rows([1.0, 4.0 / 448.0]))
    assert (q.float()[0, 0], q.float()[0, 1], q.float()[0, 129]) == (448.0, -1.0, 448.0)


def test_fp8_floor_keeps_zero_rows_finite() -> None:
    q, scale = reference.quant_fp8(torch.zeros(1, 5))
    assert torch.equal(scale, torch.full((1, 1), 1e-4) / 448)
    assert not q.float().any()


@pytest.mark.parametrize("hidden", [0, 1, 127, 128, 129, 300])
def test_fp8_round_trip(hidden: int) -> None:
    x = torch.randn(7, hidden, generator=torch.Generator().manual_seed(1))
    q, scale = reference.quant_fp8(x)
    assert scale.shape == (7, -(-hidden // 128))
    assert torch.allclose(reference.dequant_fp8(q, scale), x, rtol=2**-3, atol=1e-2)


# --- routing ------------------------------------------------------------------------------------------------


def test_first_ranks_own_one_more_expert() -> None:
    assert reference.expert_ranges(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
    assert reference.expert_ranges(2, 3) == [range(1), range(1, 2), range(2, 2)]


@pytest.mark.parametrize(("experts", "world"), list(itertools.product([1, 5, 8, 64], [1, 2, 3, 8])))
def test_ranges_cover_all_experts_once(experts: int, world: int) -> None:
    ranges = reference.expert_ranges(experts, world)
    assert [e for r in ranges for e in r] == list(range(experts))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


# Two ranks, experts 0, 1 on rank 0 and 2 on rank 1. Rank 0 has tokens 10, 11; rank 1 has token 20.
XS = [rows([10.0], [11.0]), rows([20.0])]
IDX = [torch.tensor([[1, 2], [0, -1]]), torch.tensor([[2, 0]])]
WEIGHTS = [rows([0.5, 0.25], [2.0, 9.0]), rows([4.0, 8.0])]


def test_expert_layout() -> None:
    zero, one = reference.dispatch(XS, IDX, WEIGHTS, 3, layout="expert")
    assert zero.x.tolist() == [
        [11.0],
        [20.0],
        [10.0],
    ]  # expert 0: rank 0 token 1, rank 1 token 0; expert 1: rank 0
    assert zero.source.tolist() == [[0, 1, 0], [1, 0, 1], [0, 0, 0]]
    assert zero.expert_counts.tolist() == [2, 1]
    assert zero.topk_weights is not None
    assert zero.topk_weights.tolist() == [2.0, 8.0, 0.5]
    assert zero.topk_idx is None
    assert zero.route.tolist() == [[[0, 2], [1, 0]], [[0, 0], [-1, -1]]]
    assert one.x.tolist() == [[10.0], [20.0]]
    assert one.source.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert one.route.tolist() == [[[1, 1], [0, 1]]]


def test_expert_layout_padded() -> None:
    zero, one = reference.dispatch(XS, IDX, WEIGHTS, 3, layout="expert", expert_alignment=4)
    assert zero.x[:, 0].tolist() == [11, 20, 0, 0, 10, 0, 0, 0]
    assert zero.source[:, 0].tolist() == [0, 1, -1, -1, 0, -1, -1, -1]
    assert zero.topk_weights is not None
    assert zero.topk_weights.tolist() == [2, 8, 0, 0, 0.5, 0, 0, 0]
    assert zero.expert_counts.tolist() == [2, 1], "padding is not counted"
    assert zero.route.tolist() == [[[0, 4], [1, 0]], [[0, 0], [-1, -1]]]
    assert one.x[:, 0].tolist() == [10, 20, 0, 0]


def test_an_expert_without_rows_gets_no_padding() -> None:
    (only,) = reference.dispatch([rows([1.0])], [torch.tensor([[2]])], None, 3, layout="expert", expert_alignment=2)
    assert only.x.shape[0] == 2
    assert only.expert_counts.tolist() == [0, 0, 1]


def test_rank_layout() -> None:
    zero, one = reference.dispatch(XS, IDX, WEIGHTS, 3, layout="rank")
    assert zero.x.tolist() == [[10.0], [11.0], [20.0]]
    assert zero.source.tolist() == [[0, 0, -1], [0, 1, -1], [1, 0, -1]]
    assert zero.topk_idx is not None
    assert zero.topk_idx.tolist() == [[1, -1], [0, -1], [-1, 0]]
    assert zero.topk_weights is not None
    assert zero.topk_weights.tolist() == [[0.5, 0.0], [2.0, 0.0], [0.0, 8.0]]
    assert one.x.tolist() == [[10.0], [20.0]]
    assert one.topk_idx is not None
    assert one.topk_idx.tolist() == [[-1, 0], [0, -1]]
    assert one.route.tolist() == [[[1, 1], [0, 2]]]


def test_duplicate_experts() -> None:
    x, idx, w = [rows([3.0])], [torch.tensor([[1, 1]])], [rows([0.5, 0.25])]
    (by_expert,) = reference.dispatch(x, idx, w, 2, layout="expert")
    assert by_expert.source.tolist() == [[0, 0, 0], [0, 0, 1]]
    (by_rank,) = reference.dispatch(x, idx, w, 2, layout="rank")
    assert by_rank.source.tolist() == [[0, 0, -1]]
    assert by_rank.topk_idx is not None
    assert by_rank.topk_idx.tolist() == [[1, 1]]
    assert by_rank.expert_counts.tolist() == [0, 2]


def test_inactive_tokens_stay_at_home() -> None:
    mask = [torch.tensor([False, True]), None]
    zero, one = reference.dispatch(XS, IDX, WEIGHTS, 3, layout="expert", active_masks=mask)
    assert zero.x.tolist() == [[11.0], [20.0]]
    assert one.x.tolist() == [[20.0]]
    assert zero.route[0].tolist() == [[-1, -1], [-1, -1]]


def test_quantised_rows_carry_their_scales() -> None:
    x = [rows([127.0, 1.0], [254.0, 4.0])]
    (part,) = reference.dispatch(
        x, [torch.tensor([[1], [0]])], None, 2, layout="expert", quant="int8", expert_alignment=2
    )
    assert part.scales is not None
    assert part.x.tolist() == [[127, 2], [0, 0], [127, 1], [0, 0]]
    assert part.scales.tolist() == [2.0, 0.0, 1.0, 0.0]


def test_already_quantised_pairs_are_opaque() -> None:
    values = torch.arange(4, dtype=torch.int32).view(2, 2)
    scales = rows([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    (part,) = reference.dispatch([(values, scales)], [torch.tensor([[1], [0]])], None, 2, layout="rank")
    assert part.x.tolist() == [[0, 1], [2, 3]]
    assert part.scales is not None
    assert part.scales.tolist() == scales.tolist()


def test_zero_tokens_everywhere() -> None:
    x, idx = [torch.empty(0, 5)] * 2, [torch.empty(0, 3, dtype=torch.int64)] * 2
    for layout in ("expert", "rank"):
        parts = reference.dispatch(x, idx, None, 3, layout=layout)
        assert [part.x.shape for part in parts] == [(0, 5), (0, 5)]
        assert [part.source.shape for part in parts] == [(0, 3), (0, 3)]
        assert [part.expert_counts.tolist() for part in parts] == [[0, 0], [0]]
        assert [out.shape for out in reference.combine([part.x for part in parts], parts, layout=layout)] == [
            (0, 5)
        ] * 2


# --- combine ------------------------------------------------------------------------------------------------


def test_combine_in_the_expert_layout() -> None:
    parts = reference.dispatch(XS, IDX, WEIGHTS, 3, layout="expert")
    ys = [rows([1.0], [2.0], [3.0]), rows([10.0], [20.0])]
    out = reference.combine(ys, parts, WEIGHTS, layout="expert", bias=[rows([100.0], [200.0]), rows([300.0])])
    assert out[0].tolist() == [[0.5 * 3 + 0.25 * 10 + 100], [2.0 * 1 + 200]]
    assert out[1].tolist() == [[4.0 * 20 + 8.0 * 2 + 300]]
    unweighted = reference.combine(ys, parts, layout="expert")
    assert [o.tolist() for o in unweighted] == [[[13.0], [1.0]], [[22.0]]]


def test_combine_in_the_rank_layout_adds_each_rank_once() -> None:
    idx = [torch.tensor([[0, 1, 2]]), torch.tensor([[2, 2, -1]])]
    parts = reference.dispatch([rows([1.0]), rows([2.0])], idx, None, 3, layout="rank")
    out = reference.combine([rows([5.0]), rows([6.0], [7.0])], parts, layout="rank")
    assert [o.tolist() for o in out] == [[[11.0]], [[7.0]]]


def test_combine_rounds_once_and_in_order() -> None:
    # field bug 14: with a bfloat16 accumulator 1 + 2^-9 - 1 is 0
    idx, x = [torch.tensor([[0, 1, 2]])], [torch.ones(1, 1)]
    parts = reference.dispatch(x, idx, None, 3, layout="expert")
    y = rows([1.0], [2.0**-9], [-1.0], dtype=torch.bfloat16)
    assert reference.combine([y], parts, layout="expert")[0].item() == 2.0**-9
    # float32 is not enough for 1 + 2^-30 - 1, and the order 1 - 1 + 2^-30 would be: the order is k
    y = rows([1.0], [2.0**-30], [-1.0])
    assert reference.combine([y], parts, layout="expert")[0].item() == 0.0


def test_products_are_rounded_before_they_are_added() -> None:
    w = 1.0 + 2.0**-23  # w * w needs more than 24 bits: a fused multiply-add would keep the rest
    parts = reference.dispatch([torch.ones(1, 1)], [torch.tensor([[0, 1]])], None, 2, layout="expert")
    exact = torch.tensor(w) * torch.tensor(w)
    out = reference.combine([rows([-float(exact)], [w])], parts, [rows([1.0, w])], layout="expert")
    assert out[0].item() == 0.0


def test_nothing_selected_gives_zero_even_from_nan_rows() -> None:
    idx = [torch.tensor([[-1, -1], [0, -1]])]
    parts = reference.dispatch([torch.ones(2, 1)], idx, None, 1, layout="expert")
    out = reference.combine([rows([NAN])], parts, [torch.full((2, 2), NAN)], layout="expert")
    assert out[0][0].item() == 0.0


def test_combined_weights() -> None:
    parts = reference.dispatch(XS, IDX, None, 3, layout="expert")
    got = reference.combined_weights([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], parts)
    assert [g.tolist() for g in got] == [[[3.0, 4.0], [1.0, 0.0]], [[5.0, 2.0]]]
    parts = reference.dispatch(XS, IDX, None, 3, layout="rank")
    got = reference.combined_weights([rows([1, 2], [3, 4], [5, 6]), rows([7, 8], [9, 10])], parts)
    assert [g.tolist() for g in got] == [[[1.0, 8.0], [3.0, 0.0]], [[9.0, 6.0]]]


# --- gradients and the oracle -------------------------------------------------------------------------------


def case(seed: int, world: int = 3, experts: int = 5, k: int = 3) -> tuple[list[torch.Tensor], ...]:
    g = torch.Generator().manual_seed(seed)
    tokens = [seed % 4, 0, 5][:world]
    xs = [torch.randn(t, 4, generator=g) for t in tokens]
    idx = [torch.randint(-1, experts, (t, k), generator=g) for t in tokens]
    weights = [torch.rand(t, k, generator=g) for t in tokens]
    return xs, idx, weights


def expert(e: int, x: torch.Tensor) -> torch.Tensor:
    return x * (e + 1) + e


@pytest.mark.parametrize("seed", range(4))
def test_oracle_is_dispatch_experts_combine(seed: int) -> None:
    xs, idx, weights = case(seed)
    parts = reference.dispatch(xs, idx, weights, 5, layout="expert")
    ys = []
    for part, mine in zip(parts, reference.expert_ranges(5, 3), strict=True):
        per_row = torch.repeat_interleave(torch.tensor(list(mine), dtype=torch.float32), part.expert_counts)[:, None]
        ys.append(part.x * (per_row + 1) + per_row)
    got = reference.combine(ys, parts, weights, layout="expert")
    for out, expected in zip(got, reference.moe(xs, idx, weights, expert), strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.parametrize("seed", range(4))
def test_backward_formulas_are_the_gradients(layout: str, seed: int) -> None:
    xs, idx, weights = case(seed)
    for leaf in [*xs, *weights]:
        leaf.requires_grad_()
    parts = reference.dispatch(xs, idx, weights, 5, layout=layout)
    ys = [part.x * 2 for part in parts]
    outs = reference.combine(ys, parts, weights if layout == "expert" else None, layout=layout)
    used = weights if layout == "expert" else None

    g = torch.Generator().manual_seed(seed + 100)
    grad_outs = [torch.randn(out.shape, generator=g) for out in outs]
    grad_ys, grad_weights, _ = reference.combine_backward(
        grad_outs,
        [y.detach() for y in ys],
        parts,
        None if used is None else [w.detach() for w in used],
        layout=layout,
    )
    received_weights = [torch.randn(part.topk_weights.shape, generator=g) for part in parts]  # type: ignore[union-attr]
    masked = [
        torch.where(part.topk_idx >= 0, grad, 0.0) if part.topk_idx is not None else grad
        for part, grad in zip(parts, received_weights, strict=True)
    ]
    grad_xs, more = reference.dispatch_backward([gy * 2 for gy in grad_ys], masked, parts, layout=layout)

    torch.autograd.backward(
        [*outs, *(part.topk_weights for part in parts)],  # type: ignore[arg-type]
        [*grad_outs, *received_weights],
    )
    assert more is not None
    for rank in range(3):
        torch.testing.assert_close(grad_xs[rank], xs[rank].grad, rtol=1e-5, atol=1e-6)
        expected = more[rank] if grad_weights is None else more[rank] + grad_weights[rank]
        torch.testing.assert_close(expected, weights[rank].grad, rtol=1e-5, atol=1e-6)


def test_oracle_in_double() -> None:
    xs, idx, weights = case(1)
    exact = reference.moe([x.double() for x in xs], idx, [w.double() for w in weights], expert)
    assert {out.dtype for out in exact} == {torch.float64}
    for got, want in zip(reference.moe(xs, idx, weights, expert), exact, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


# --- the UMDK contract --------------------------------------------------------------------------------------


def test_umdk_layout() -> None:
    counts, position = reference.get_dispatch_layout(torch.tensor([[1, 0], [1, 1], [-1, 0]]), 3)
    assert counts.tolist() == [2, 3, 0]
    assert position.tolist() == [[0, 0], [1, 2], [-1, 1]]
    assert (counts.dtype, position.dtype) == (torch.int32, torch.int32)


def test_umdk_dispatch_and_combine() -> None:
    xs = [rows([10.0], [11.0]), rows([20.0])]
    idx = [torch.tensor([[1, 2], [0, 3]]), torch.tensor([[2, 0]])]
    weights = [rows([0.5, 0.25], [2.0, 1.0]), rows([4.0, 8.0])]
    zero, one = reference.moe_dispatch_prefill(xs, idx, 4, use_quant=False)
    assert zero[0].tolist() == [[11.0], [20.0], [10.0]]
    assert zero[2].tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 0]
    assert zero[3].tolist() == [1, 2, 3, 3]  # expert 0 from rank 0, rank 1; expert 1 from rank 0, rank 1
    assert zero[4].tolist() == [2, 1]
    assert one[0].tolist() == [[10.0], [20.0], [11.0]]
    assert one[3].tolist() == [1, 2, 3, 3]
    out = reference.moe_combine_prefill([zero[0], one[0]], idx, weights, 4)
    assert [o.tolist() for o in out] == [[[7.5], [33.0]], [[240.0]]]
