"""UMDK CAM's published op contract on CPU: names, dtypes, orders and values (facts: openEuler UMDK)."""

import pytest
import torch

from cam_kernels import reference
from tests.conformance import golden, umdk
from tests.conformance.case import Case, all_inputs
from tests.launcher import Ranks

CASES = [
    Case((5,), hidden=64, experts=4, topk=2, routing="distinct"),
    Case((5, 9), hidden=1024, experts=8, topk=4, routing="distinct"),
    Case((5, 0, 3, 12), hidden=96, experts=16, topk=8, routing="skewed"),
    Case((6, 4), hidden=32, experts=2, topk=1, routing="rank0", dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"world{case.world}")
def test_get_dispatch_layout(case: Case) -> None:
    import umdk_cam_op_lib  # noqa: F401

    for mine in all_inputs(case):
        counts, position = torch.ops.umdk_cam_op_lib.get_dispatch_layout(mine.topk_idx, case.experts, case.world)
        want_counts, want_position = reference.get_dispatch_layout(mine.topk_idx, case.experts)
        golden.same_bits(counts, want_counts, "num_tokens_per_expert")
        golden.same_bits(position, want_position, "send_token_idx")


@pytest.mark.parametrize("use_quant", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"world{case.world}")
def test_dispatch_and_combine(case: Case, use_quant: bool) -> None:
    with Ranks(case.world) as ranks:
        everything = ranks.run(umdk.dispatch_and_combine, case, use_quant)
    ranks_in = all_inputs(case)
    xs = [mine.x for mine in ranks_in if isinstance(mine.x, torch.Tensor)]
    idx = [mine.topk_idx for mine in ranks_in]
    weights = [mine.topk_weights for mine in ranks_in if mine.topk_weights is not None]
    wanted = reference.moe_dispatch_prefill(xs, idx, case.experts, use_quant=use_quant)
    ys = [umdk.expert_output(case, rank, want[0].shape[0]) for rank, want in enumerate(wanted)]
    outs = reference.moe_combine_prefill(ys, idx, weights, case.experts)
    for rank, (seen, want) in enumerate(zip(everything, wanted, strict=True)):
        golden.same_bits(seen[0], want[0], f"rank {rank}: recv_x")
        assert seen[1].dtype == torch.float32
        if want[1] is not None:
            golden.same_bits(seen[1], want[1], f"rank {rank}: dynamic_scales_out")
        golden.same_bits(seen[2], want[2], f"rank {rank}: expand_idx_out")
        golden.same_bits(seen[3], want[3], f"rank {rank}: recv_count")
        golden.same_bits(seen[4], want[4], f"rank {rank}: recv_tokens_per_expert")
        golden.same_bits(seen[5], outs[rank], f"rank {rank}: combine")


def test_signatures_are_the_published_ones() -> None:
    import umdk_cam_op_lib  # noqa: F401

    published = {
        "get_dispatch_layout": ["topk_idx", "num_experts", "num_ranks"],
        "moe_dispatch_prefill": [
            "x",
            "topk_idx",
            "topk_weights",
            "num_tokens_per_expert",
            "send_token_idx_small",
            "group_ep",
            "rank",
            "num_ranks",
            "use_quant",
        ],
        "moe_combine_prefill": [
            "x",
            "topk_idx",
            "topk_weights",
            "src_idx",
            "send_head",
            "group_ep",
            "rank",
            "num_ranks",
        ],
    }
    for name, arguments in published.items():
        schema = getattr(torch.ops.umdk_cam_op_lib, name).default._schema
        assert [argument.name for argument in schema.arguments] == arguments


def test_errors_name_what_is_wrong() -> None:
    with Ranks(2) as ranks:
        for messages in ranks.run(umdk.errors):
            assert "no-such-group" in messages["unknown group"]
            assert "num_ranks" in messages["ranks"]
            assert "3" in messages["ranks"]


def test_scales_are_float32_whatever_the_default() -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(umdk.scales_without_quant)
    assert (first, second) == (("torch.float32", [1.0]), ("torch.float32", []))
