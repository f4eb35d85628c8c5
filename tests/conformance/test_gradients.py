"""Gradients of dispatch and combine against the reference's formulas (bits) and against autograd."""

from dataclasses import replace

import pytest
import torch

from cam_kernels import reference
from tests.conformance import golden, programs
from tests.conformance.backends import DEFAULT, Backend, on_backends_with_gradients
from tests.conformance.case import Case, all_inputs, generator
from tests.launcher import Ranks

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


def check(backend: Backend, *cases: Case) -> None:
    with Ranks(cases[0].world, **backend.config) as ranks:
        for case in cases:
            golden.check_backward(case, ranks.run(programs.backward, case))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@in_layouts
@on_backends_with_gradients
def test_gradients(backend: Backend, layout: str, dtype: torch.dtype, world: int) -> None:
    base = Case((5, 0, 9, 4)[:world], hidden=33, experts=6, topk=3, layout=layout, dtype=dtype, bias=True)
    check(backend, base, replace(base, masks=True, bias=False, seed=1))


@in_layouts
def test_gradients_without_weights(layout: str) -> None:
    check(DEFAULT, Case((5, 0, 9), layout=layout, weights=False))


def test_gradients_with_padding() -> None:
    check(DEFAULT, Case((5, 0, 9), alignment=8, bias=True))


@in_layouts
def test_gradients_of_duplicates_and_of_nothing(layout: str) -> None:
    base = Case((5, 3), layout=layout, topk=3)
    check(DEFAULT, *(replace(base, routing=routing) for routing in ("duplicates", "none", "rank0")))


@in_layouts
def test_no_rank_has_tokens(layout: str) -> None:
    check(DEFAULT, Case((0, 0), layout=layout, bias=True))


@in_layouts
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_a_layer_learns_as_if_it_were_local(layout: str, checkpointed: bool) -> None:
    """Router, dispatch, expert weights, combine: all gradients equal those of the oracle on one process."""
    case = Case((5, 0, 9), hidden=16, experts=5, topk=2, layout=layout, dtype=torch.float32, routing="distinct")
    with Ranks(case.world) as ranks:
        everything = ranks.run(programs.layer, case, checkpointed)

    experts = programs.expert_weights(case).requires_grad_()
    xs, logits = [], []
    for mine in all_inputs(case):
        assert isinstance(mine.x, torch.Tensor)
        assert mine.topk_weights is not None
        xs.append(mine.x.requires_grad_())
        logits.append(mine.topk_weights.requires_grad_())
    outs = reference.moe(
        xs,
        [mine.topk_idx for mine in all_inputs(case)],
        [logit.softmax(-1) for logit in logits],
        lambda e, rows: torch.tanh(rows @ experts[e]),
    )
    grads = [torch.randn(out.shape, generator=generator(case, rank, 6)) for rank, out in enumerate(outs)]
    torch.autograd.backward(outs, grads)
    for rank, seen in enumerate(everything):
        torch.testing.assert_close(seen["out"], outs[rank], rtol=1e-4, atol=1e-5)
        for name, leaf in (("x", xs[rank]), ("logits", logits[rank])):
            want = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad  # None: the rank has no tokens
            torch.testing.assert_close(seen[name], want, rtol=1e-4, atol=1e-5)
    mine = [slice(r.start, r.stop) for r in reference.expert_ranges(case.experts, case.world)]
    for rank, seen in enumerate(everything):
        assert experts.grad is not None
        torch.testing.assert_close(seen["experts"][mine[rank]], experts.grad[mine[rank]], rtol=1e-4, atol=1e-5)


def test_quantised_dispatch_refuses_gradients() -> None:
    with Ranks(2) as ranks:
        for quant in ("int8", "fp8"):
            assert ranks.run(programs.quantised_gradient, quant) == ["refused"] * 2


@in_layouts
def test_forward_twice_then_backward_in_any_order(layout: str) -> None:
    """Several dispatches in flight in one graph; the handle serves forward and backward
    (sgl-kernel-npu#801).
    """
    with Ranks(2) as ranks:
        for errors in ranks.run(programs.two_in_flight, layout):
            assert errors == []
