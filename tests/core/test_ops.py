"""cam's torch.library ops: schemas, fake tensors, autograd, compilers and checkpointing, on real groups."""

from pathlib import Path

import pytest
import torch

from tests.core import op_programs
from tests.launcher import PerRank, Ranks

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@in_layouts
@pytest.mark.parametrize("world", [1, 2])
def test_opcheck(layout: str, world: int) -> None:
    with Ranks(world) as ranks:
        for checked, failed in ranks.run(op_programs.opcheck, layout):
            assert not failed, "\n".join(failed)
            assert "cam::ep_dispatch" in checked


def test_no_op_is_left_out() -> None:
    with Ranks(1) as ranks:
        ((registered, checked),) = ranks.run(op_programs.coverage)
    assert checked == registered


@in_layouts
@pytest.mark.parametrize("world", [1, 2])
def test_compiled_without_a_graph_break(layout: str, world: int) -> None:
    """fullgraph=True, forward and backward, with token counts that change from call to call."""
    sizes = [[5, 9], [9, 2], [4, 13], [12, 8]]
    with Ranks(world) as ranks:
        for wrong in ranks.run(op_programs.compiled, layout, "aot_eager", sizes):
            assert not wrong, "\n".join(wrong)


def test_compiled_by_inductor(tmp_path: Path) -> None:
    """Rank 0 has more experts than rank 1, and both use one cache of compiled code: each must find its own."""
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.compiled_by_inductor, str(tmp_path), deadline=150) == [[True, True]] * 2


@in_layouts
@pytest.mark.parametrize("quant", [None, "int8", "fp8"])
def test_compiled_inference(layout: str, quant: str | None) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.compiled_without_gradients, layout, quant) == [True, True]


@in_layouts
@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(layout: str, reentrant: bool) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.checkpointed, layout, reentrant) == [[], []]


@in_layouts
def test_gradcheck(layout: str) -> None:
    with Ranks(1) as ranks:
        assert ranks.run(op_programs.gradcheck, layout) == [True]


@in_layouts
def test_gradients_across_ranks_are_slopes(layout: str) -> None:
    """The sum of all ranks' losses, moved along one direction on all ranks at once, follows the gradients."""
    h = 1e-2
    with Ranks(3) as ranks:
        up, here, down = (ranks.run(op_programs.directional_derivative, layout, step) for step in (h, 0.0, -h))
    measured = (sum(loss for loss, _ in up) - sum(loss for loss, _ in down)) / (2 * h)
    assert measured == pytest.approx(sum(slope for _, slope in here), rel=1e-2)


@in_layouts
def test_a_rank_whose_experts_are_not_called_joins_the_backward_pass(layout: str) -> None:
    with Ranks(2, timeout_s=5) as ranks:
        first, second = ranks.run(op_programs.experts_not_called, layout)
    assert first == ([2.0], False)
    assert second == ([2.0], True)


@in_layouts
def test_gradients_of_a_repeated_dispatch(layout: str) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.repeated_gradient, layout) == [[0.0] * 4] * 2


@in_layouts
def test_a_repeated_dispatch_joins_the_backward_pass_without_its_experts(layout: str) -> None:
    with Ranks(2, timeout_s=5) as ranks:
        assert ranks.run(op_programs.repeated_without_experts, layout) == [[2.0], [2.0]]


@in_layouts
@pytest.mark.parametrize("repeat", [False, True], ids=["", "repeated"])
@pytest.mark.parametrize("other_work", [(0, 0), (1000, 0), (0, 1000)])
def test_asynchronous_calls_have_their_place_in_the_backward_pass(
    layout: str, other_work: tuple[int, int], repeat: bool
) -> None:
    with Ranks(2, timeout_s=5) as ranks:
        grads = ranks.run(op_programs.asynchronous_gradients, layout, PerRank(other_work), repeat)
    assert grads == [[[1.0], [2.0], [3.0], [4.0]]] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int8], ids=str)
def test_weights_of_opaque_rows_have_gradients(dtype: torch.dtype) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.opaque_rows_with_weight_gradients, dtype) == [[8.0], [8.0]]


def test_gradients_that_would_be_dropped_are_refused() -> None:
    with Ranks(2) as ranks:
        for opaque, scales in ranks.run(op_programs.gradients_for_what_has_none):
            assert "float64 values" in opaque
            assert "scales" in scales


@in_layouts
def test_gradients_at_any_stride(layout: str) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.gradients_at_any_stride, layout) == [[True] * 4] * 2


def test_the_default_dtype_changes_nothing() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.under_another_default_dtype) == [["torch.float32"] * 2] * 2


def test_a_released_handle_holds_nothing() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.release) == [(0, "this handle has been released")] * 2


@in_layouts
def test_compiled_with_graph_breaks(layout: str) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(op_programs.compiled_with_graph_breaks, layout) == [[True] * 3] * 2
