"""What ranks run in the end-to-end tests: whole dispatches and combines from Ascend IR over shared windows."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import torch

from cam_kernels.ascend.deep_moe import deep_moe
from cam_kernels.ascend.errors import ParametersDiffer, WaitExpired
from cam_kernels.ascend.expert_parallel import ExpertParallel
from cam_kernels.ascend.experts import ExpertWeights
from cam_kernels.ascend.kernels.notify import RAISE_FLAG, WAIT_FLAGS
from cam_kernels.ascend.launch import HivmLauncher, NativeLauncher
from cam_kernels.ascend.paging import PageShape, copy_heads, plan_pages
from cam_kernels.ascend.window import WindowLayout
from cam_kernels.reference import expert_ranges
from tests.ascend.windows import shared_window
from tests.conformance.case import Case, expert_output, inputs
from tests.launcher import RankEnv

Seen = dict[str, Any]


def make_launcher(form: str, cores: int = 3, threads: int = 1) -> NativeLauncher:
    """form: "linalg", or a target, for its final HIVM."""
    if form == "linalg":
        return NativeLauncher(cores=cores, threads=threads)
    return HivmLauncher(target=form, cores=cores, threads=threads)


def make_ranks(
    env: RankEnv,
    case: Case,
    key: str,
    *,
    cores: int = 3,
    threads: int = 1,
    timeout_s: float = 90.0,  # peers may be compiling
    form: str = "linalg",
) -> ExpertParallel:
    """A window that just holds the case, and the rank's side of it."""
    slots = sum(case.tokens) * case.topk
    layout = WindowLayout(
        world=case.world,
        experts=case.experts,
        topk=case.topk,
        hidden=max(case.hidden, case.out_hidden or 1),
        element_bytes=4,
        tokens=max(1, *case.tokens),
        rows=max(1, slots + case.experts * (case.alignment - 1)),
        blocks=2,
    )
    return ExpertParallel(
        make_launcher(form, cores, threads),
        shared_window(env, layout, key),
        env.rank,
        alignment=case.alignment,
        timeout_s=timeout_s,
    )


def forward(
    env: RankEnv, cases: list[Case], key: str, form: str = "linalg", cores: int = 3, threads: int = 1
) -> list[Seen]:
    """Dispatch and two combines of every case, as tests.conformance.programs.forward sees them."""
    everything = []
    for number, case in enumerate(cases):
        ranks = make_ranks(env, case, f"{key}/{number}", form=form, cores=cores, threads=threads)
        everything.append(forward_once(ranks, case, env.rank))
    return everything


def forward_once(ranks: ExpertParallel, case: Case, rank: int) -> Seen:
    mine = inputs(case, rank)
    x, scales = mine.x if isinstance(mine.x, tuple) else (mine.x, None)
    recv, handle = ranks.dispatch(
        x,
        mine.topk_idx,
        mine.topk_weights,
        scales=scales,
        active_mask=mine.mask,
        quantise=case.quant == "int8",
    )
    seen: Seen = {
        "x": recv.x.clone(),  # window memory, which a later case of the same window writes again
        "scales": recv.scales,
        "expert_counts": recv.expert_rows.long(),
        "expert_counts_list": recv.expert_rows.tolist(),
        "source": recv.source,
        "topk_idx": None,
        "topk_weights": recv.topk_weights if case.weights else None,
        "running": recv.running,
    }
    y = expert_output(case, rank, recv.x.shape[0])
    seen["out"] = ranks.combine(y, handle, bias=mine.bias)
    seen["out_again"] = ranks.combine(y, handle, bias=mine.bias, apply_weights=False)
    return seen


def many_epochs(env: RankEnv, case: Case, epochs: int, key: str) -> list[Seen]:
    """The same window again and again, with other data each time."""
    ranks = make_ranks(env, case, key)
    return [forward_once(ranks, _nth(case, number), env.rank) for number in range(epochs)]


def _nth(case: Case, number: int) -> Case:
    return replace(case, seed=case.seed + number)


def two_handles(env: RankEnv, case: Case, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two dispatches in flight, combined in the other order."""
    ranks = make_ranks(env, case, key)
    flights = []
    for number in (0, 1):
        mine = inputs(_nth(case, number), env.rank)
        recv, handle = ranks.dispatch(mine.x, mine.topk_idx, mine.topk_weights)  # type: ignore[arg-type]
        flights.append((recv, handle))
    second = ranks.combine(flights[1][0].x.clone(), flights[1][1])
    first = ranks.combine(flights[0][0].x.clone(), flights[0][1])
    return first, second


def differing(env: RankEnv, case: Case, key: str) -> str:
    """Rank 1 calls with another top-k: every rank is told which field and which rank."""
    ranks = make_ranks(env, case, key)
    mine = inputs(case, env.rank)
    idx = mine.topk_idx[:, :1].contiguous() if env.rank == 1 else mine.topk_idx
    try:
        ranks.dispatch(mine.x, idx)  # type: ignore[arg-type]
    except ParametersDiffer as error:
        return f"{error.field} {error.rank}"
    return "nothing"


def late(env: RankEnv, case: Case, phase: str, key: str) -> tuple[str, tuple[int, ...]] | None:
    """The last rank dies before it takes part in `phase`; the others must say so, by name, in time."""
    ranks = make_ranks(env, case, key, timeout_s=1.0)
    mine = inputs(case, env.rank)
    dies = env.rank == env.world_size - 1
    if dies and phase == "dispatch":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        recv, handle = ranks.dispatch(mine.x, mine.topk_idx)  # type: ignore[arg-type]
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.combine(recv.x.clone(), handle)
    except WaitExpired as error:
        return error.operation, error.late
    return None


def expert_weights(case: Case, expert: int) -> tuple[torch.Tensor, ...]:
    """int8 weights and scales of one global expert, the same on every rank: up, up_scale, down, down_scale."""
    g = torch.Generator().manual_seed(case.seed * 1000 + expert)
    hidden, inner = case.hidden, case.hidden // 2

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, generator=g, dtype=torch.int8)

    def scale(size: int, fan_in: int) -> torch.Tensor:
        return (0.5 + torch.rand(size, generator=g)) / (73.0 * fan_in**0.5)

    return whole(hidden, 2 * inner), scale(2 * inner, hidden), whole(inner, hidden), scale(hidden, inner)


def moe_layer(env: RankEnv, case: Case, form: str, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The staged fused_deep_moe."""
    ranks = make_ranks(env, case, key, form=form)
    mine = inputs(case, env.rank)
    assert isinstance(mine.x, torch.Tensor)
    assert mine.topk_weights is not None
    local = expert_ranges(case.experts, case.world)[env.rank]
    parts = [torch.stack(part) for part in zip(*(expert_weights(case, e) for e in local), strict=True)]
    return deep_moe(
        make_launcher(form), ranks, mine.x, mine.topk_idx, mine.topk_weights, ExpertWeights(*parts),
        active_mask=mine.mask,
    )  # fmt: skip


def page_push(env: RankEnv, source: PageShape, target: PageShape, key: str) -> torch.Tensor:
    """Rank 0 stores pages of its cache into rank 1's, which waits for the flag. Returns rank 1's cache."""
    layout = WindowLayout(env.world_size, 1, 1, target.elements * 4, 2, 4, 4, 1)
    window, launcher = shared_window(env, layout, key), NativeLauncher(cores=2)
    cache = window.own("dispatch_rows", 0, torch.int16, 4, target.elements)
    if env.rank == 0:
        pages = torch.arange(6 * source.elements, dtype=torch.int16).view(6, source.elements)
        there = int(window.peers("dispatch_rows", 0)[1])
        plan = plan_pages(source, target, heads=1, from_head=1, to_head=0)
        copy_heads(launcher, plan, pages.data_ptr(), there, torch.tensor([5, 2]), torch.tensor([0, 3]), 2)
        launcher.launch(RAISE_FLAG, 1, window.peers("notify_flags", 0)[1:2], 0, 1, 1)
    else:
        flag = window.own("notify_flags", 0, torch.int32, 1, 8)
        arrived, deadline = torch.zeros(1, 8, dtype=torch.int32), time.monotonic() + 30
        while not int(arrived[0, 0]):
            assert time.monotonic() < deadline
            launcher.launch(WAIT_FLAGS, 1, flag, arrived, 1, 1, 1000, FP=64)
    return cache.clone()
