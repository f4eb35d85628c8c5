"""The host side of all NPU paths, over Gloo, on CPU tensors, with the NPU's operations replaced by plain torch.

What the vendor's kernels compute is not tested by this; that CAM calls them in the right order, with the right
arguments, and gives back what the contract says, is.
"""

import itertools
import os
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cam
from cam.ep import npu as glue
from cam.errors import BackendUnavailable, InputError, NotReachable
from cam.npu.expert_parallel import NpuExpertParallel
from cam.npu.routes import Routes
from cam.npu.soc import soc
from tests.conformance import golden
from tests.conformance.case import Case, cotangent, expert_output, inputs, row_weights
from tests.launcher import RankEnv, Ranks
from tests.npu import doubles, torch_npu_wheel

if torch_npu_wheel.wheel() is None:
    pytest.skip(f"the torch_npu wheel is not here: {torch_npu_wheel.COMMAND}", allow_module_level=True)

A3 = soc("Ascend910_9392")
Seen = dict[str, Any]
_keys = itertools.count()


def key() -> str:
    return f"gloo{os.getpid()}-{next(_keys)}"


def open_paths(env: RankEnv, case: Case, name: str, max_tokens: int | None) -> NpuExpertParallel:
    doubles.install()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=env.store, rank=env.rank, world_size=env.world_size)
    pg = dist.group.WORLD
    doubles.GROUPS[name] = pg
    return NpuExpertParallel(
        A3,
        pg,
        env.rank,
        env.world_size,
        num_experts=case.experts,
        max_tokens=max_tokens,
        quant=case.quant,
        group_name=lambda: name,
        vendor_installed=False,
        environment={"HCCL_BUFFSIZE": "4000"},
    )


def routes_of(case: Case, rank: int) -> tuple[Tensor, Routes]:
    mine = inputs(case, rank)
    assert isinstance(mine.x, Tensor)
    experts = mine.topk_idx if mine.mask is None else torch.where(mine.mask[:, None], mine.topk_idx, -1)
    return mine.x, Routes(experts, mine.topk_weights)


def forward(env: RankEnv, cases: list[Case], name: str, max_tokens: int | None) -> list[Seen]:
    everything = []
    for case in cases:
        npu = open_paths(env, case, name, max_tokens)
        mine, made_by = inputs(case, env.rank), ("cam", case.experts, "expert", 1)
        assert isinstance(mine.x, Tensor)
        recv, handle = glue.dispatch(npu, mine.x, None, mine.topk_idx, mine.topk_weights, mine.mask, None, made_by)
        y = expert_output(case, env.rank, handle.rows)
        seen: Seen = {"path": npu.choice.path, **vars(recv)}
        seen["out"] = glue.combine(npu, y, handle, None, None, True, None)[0]
        row = row_weights(case, env.rank, len(y)) if npu.choice.path == "alltoall" else None
        bias = torch.ones_like(seen["out"])
        biased, seen["combined"] = glue.combine(npu, y, handle, row, bias, False, None)
        seen["out_again"] = glue.combine(npu, y, handle, None, None, False, None)[0]
        assert torch.equal(biased, seen["out_again"] + bias)
        handle.release()
        with pytest.raises(InputError, match="released"):
            glue.combine(npu, y, handle, None, None, True, None)
        everything.append(seen)
    return everything


def check(cases: list[Case], max_tokens: int | None, path: str) -> None:
    with Ranks(cases[0].world, group=False) as ranks:
        by_rank = ranks.run(forward, cases, key(), max_tokens)
    for number, case in enumerate(cases):
        parts = golden.received(case)
        outs, plain = golden.outputs(case, parts), golden.outputs(case, parts, weighted=False)
        combined = golden.reference.combined_weights(
            [row_weights(case, rank, part.x.shape[0]) for rank, part in enumerate(parts)], parts
        )
        for rank, part in enumerate(parts):
            seen = by_rank[rank][number]
            assert seen["path"] == path
            for field in ("x", "scales", "expert_counts"):
                if getattr(part, field) is not None:
                    golden.same_bits(seen[field], getattr(part, field), f"rank {rank}: {field}")
            assert torch.equal(seen["source_counts"].sum(1), part.expert_counts)
            golden.same_bits(seen["out"], outs[rank], f"rank {rank}: combine")
            golden.same_bits(seen["out_again"], plain[rank], f"rank {rank}: combine without weights")
            if path == "alltoall":
                golden.same_bits(seen["source"], part.source, f"rank {rank}: source")
                golden.same_bits(seen["combined"], combined[rank], f"rank {rank}: combined weights")
                if case.weights:
                    golden.same_bits(seen["topk_weights"], part.topk_weights, f"rank {rank}: weights")


@pytest.mark.parametrize("tokens", [(7, 0, 12), (5,), (4, 9)])
def test_alltoall(tokens: tuple[int, ...]) -> None:
    base = Case(tokens, hidden=40, experts=7, topk=3)
    check(
        [
            base,
            replace(base, dtype=torch.float32, masks=True),
            replace(base, quant="int8"),
            replace(base, weights=False, routing="none"),
            replace(base, routing="duplicates", idx_dtype=torch.int32),
            replace(base, routing="last", experts=2),
        ],
        None,
        "alltoall",
    )


@pytest.mark.parametrize("quant", [None, "int8"])
def test_mc2(quant: str | None) -> None:
    base = Case((5, 16, 1, 8), hidden=1024, experts=8, topk=3, routing="uniform", quant=quant)
    check([base, replace(base, weights=False, dtype=torch.float16, topk=8, routing="distinct")], 16, "mc2")


def gradients(env: RankEnv, case: Case, name: str) -> Seen:
    npu = open_paths(env, case, name, None)
    x, routes = routes_of(case, env.rank)
    x.requires_grad_()
    assert routes.weights is not None
    routes.weights.requires_grad_()
    rows, sent = npu.dispatch(x, routes)
    y = expert_output(case, env.rank, rows.x.shape[0]).requires_grad_()
    out = npu.combine(y, sent, apply_weights=True)
    ends = [out, rows.x]
    torch.autograd.backward(ends, [cotangent(out, case, env.rank, 5), cotangent(rows.x, case, env.rank, 7)])
    return {"x": x.grad, "y": y.grad, "weights": routes.weights.grad}


def test_alltoall_gradients() -> None:
    case = Case((6, 4, 3), hidden=24, experts=5, topk=3, dtype=torch.float32)
    with Ranks(3, group=False) as ranks:
        seen = ranks.run(gradients, case, key())
    parts = golden.received(case)
    used = golden._used_weights(case)
    ys = [expert_output(case, rank, part.x.shape[0]) for rank, part in enumerate(parts)]
    outs = golden.outputs(case, parts)
    grad_outs = [cotangent(outs[rank], case, rank, 5) for rank in range(3)]
    grad_ys, grad_weights, _ = golden.reference.combine_backward(grad_outs, ys, parts, used, layout="expert")
    grad_rows = [cotangent(part.x, case, rank, 7) for rank, part in enumerate(parts)]
    grad_xs, _ = golden.reference.dispatch_backward(grad_rows, None, parts, layout="expert")
    assert grad_weights is not None
    for rank in range(3):
        # The order of the sums is torch's here, not the contract's.
        torch.testing.assert_close(seen[rank]["x"], grad_xs[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(seen[rank]["y"], grad_ys[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(seen[rank]["weights"], grad_weights[rank], rtol=1e-4, atol=1e-4)


def refused(env: RankEnv, case: Case, name: str) -> list[str]:
    """What MC2 refuses before anything is sent."""
    npu, said = open_paths(env, case, name, 16), []
    x, routes = routes_of(case, env.rank)
    holes = Routes(torch.full_like(routes.experts, -1), routes.weights)
    for rows, to in ((x, holes), (x.clone().requires_grad_(), routes), (x[:, :512], routes), (x[:0], routes)):
        try:
            npu.dispatch(rows, replace(to, experts=to.experts[: rows.shape[0]]))
        except InputError as error:
            said.append(str(error))
    return said


def test_what_mc2_cannot_do_is_refused_with_a_way_out() -> None:
    case = Case((5, 6), hidden=1024, experts=8, topk=3, routing="uniform")
    with Ranks(2, group=False) as ranks:
        for said in ranks.run(refused, case, key()):
            assert len(said) == 4
            for text, wanted in zip(said, ("-1", "gradients", "hidden = 512", "tokens = 0"), strict=True):
                assert wanted in text
            assert all("max_tokens" in text for text in said)


@pytest.mark.parametrize(
    ("layout", "alignment", "process_group", "error", "wanted"),
    [
        ("rank", 1, object(), InputError, "layout='rank'"),
        ("expert", 8, object(), InputError, "expert_alignment=8"),
        ("expert", 1, None, NotReachable, r"cam.init\(process_group=...\)"),
    ],
)
def test_what_npus_do_not_have_is_refused(
    layout: str, alignment: int, process_group: object, error: type[Exception], wanted: str
) -> None:
    config = types.SimpleNamespace(ep_kernels="auto")
    group: Any = types.SimpleNamespace(name="cam", process_group=process_group, config=config)
    with pytest.raises(error, match=wanted):
        glue.open_path(group, torch.device("meta"), 8, layout, None, alignment, None)


def test_without_the_compilers_own_kernels_say_what_to_install() -> None:
    from cam_kernels.ascend import toolchain

    if toolchain.usable():
        pytest.skip("the Ascend compilers are here, in the environment of `make test-ascend`; runs in all others")
    with cam.init(name="no-compilers", ep_kernels="ascend") as group:
        buffer = cam.ep.Buffer(group, 4)
        with pytest.raises(BackendUnavailable, match="pip install"):
            buffer.dispatch(torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int64))
