"""What ranks run in the tests of the UMDK contract."""

from typing import Any

import torch
from torch import Tensor

from tests.conformance.case import Case, expert_output, inputs


def dispatch_and_combine(group: Any, case: Case, use_quant: bool) -> list[Tensor]:
    import umdk_cam_op_lib  # noqa: F401

    ops, mine = torch.ops.umdk_cam_op_lib, inputs(case, group.rank)
    counts, position = ops.get_dispatch_layout(mine.topk_idx, case.experts, group.size)
    received = ops.moe_dispatch_prefill(
        mine.x,
        mine.topk_idx,
        mine.topk_weights,
        counts,
        position,
        group.name,
        group.rank,
        group.size,
        use_quant,
    )
    recv_x, _, expand_idx, recv_count, _ = received
    y = expert_output(case, group.rank, recv_x.shape[0])
    out = ops.moe_combine_prefill(
        y, mine.topk_idx, mine.topk_weights, expand_idx, recv_count, group.name, group.rank, group.size
    )
    return [*received, out]


def errors(group: Any) -> dict[str, str]:
    import umdk_cam_op_lib  # noqa: F401

    ops = torch.ops.umdk_cam_op_lib
    x, idx, weights = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    counts, position = ops.get_dispatch_layout(idx, 4, group.size)
    seen = {}
    for what, name, ranks in (("unknown group", "no-such-group", group.size), ("ranks", group.name, 3)):
        try:
            ops.moe_dispatch_prefill(x, idx, weights, counts, position, name, group.rank, ranks, False)
            seen[what] = "no error"
        except Exception as error:
            seen[what] = str(error)
    return seen


def scales_without_quant(group: Any) -> tuple[str, list[float]]:
    """The contract's float32 ones, while a model is loaded as bf16."""
    import umdk_cam_op_lib  # noqa: F401

    ops, idx, weights = torch.ops.umdk_cam_op_lib, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    counts, position = ops.get_dispatch_layout(idx, 4, group.size)
    torch.set_default_dtype(torch.bfloat16)
    try:
        scales = ops.moe_dispatch_prefill(
            torch.ones(2, 8), idx, weights, counts, position, group.name, group.rank, group.size, False
        )[1]
    finally:
        torch.set_default_dtype(torch.float32)
    return str(scales.dtype), scales.unique().tolist()
