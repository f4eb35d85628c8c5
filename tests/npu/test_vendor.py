"""The vendor path on the CPU's implementation of the same published operations (adapters/umdk)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cam.npu import vendor
from cam.npu.routes import Routes
from tests.conformance import golden
from tests.conformance.case import Case, expert_output, inputs
from tests.launcher import Ranks

pytest.importorskip("umdk_cam_op_lib")


def forward(group: Any, cases: list[Case]) -> list[dict[str, Any]]:
    import umdk_cam_op_lib  # noqa: F401

    everything = []
    for case in cases:
        mine = inputs(case, group.rank)
        assert isinstance(mine.x, Tensor)
        path = vendor.Vendor(group.name, group.rank, group.size, case.experts)
        routes = Routes(mine.topk_idx, mine.topk_weights)
        rows, state = path.dispatch(mine.x, routes, case.quant)
        y = expert_output(case, group.rank, rows.x.shape[0])
        seen = {"installed": vendor.installed("CPU"), **vars(rows)}
        seen["out"] = path.combine(y, routes, *state)
        seen["out_again"] = path.combine(y, routes, *state, apply_weights=False)
        everything.append(seen)
    return everything


def test_vendor() -> None:
    base = Case((5, 16, 0, 8), hidden=64, experts=8, topk=3, routing="uniform")
    cases = [base, replace(base, quant="int8"), replace(base, weights=False)]
    with Ranks(4) as ranks:
        by_rank = ranks.run(forward, cases)
    for number, case in enumerate(cases):
        parts = golden.received(case)
        outs, plain = golden.outputs(case, parts), golden.outputs(case, parts, weighted=False)
        for rank, part in enumerate(parts):
            seen = by_rank[rank][number]
            assert seen["installed"]
            for field in ("x", "scales", "expert_counts", "source"):
                if getattr(part, field) is not None:
                    golden.same_bits(seen[field], getattr(part, field), f"rank {rank}: {field}")
            assert torch.equal(seen["source_counts"].sum(1), part.expert_counts)
            golden.same_bits(seen["out"], outs[rank], f"rank {rank}: combine")
            golden.same_bits(seen["out_again"], plain[rank], f"rank {rank}: combine without weights")
