"""AutoEP with comm_backend "cam", beside "comm" and beside one rank with all experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.deepspeed.tests import rank_autoep
from adapters.deepspeed.tests.environment import skip_without_deepspeed
from adapters.deepspeed.tests.rank_autoep import Case
from tests.launcher import Ranks

skip_without_deepspeed()

#: AutoEP pads each expert's rows, CAM does not: other heights, other order of additions in a matmul. Gradients are sums
#: of terms of size 1 to 10.
FP32 = {"rtol": 1e-4, "atol": 1e-4}
BF16 = {"rtol": 3e-2, "atol": 3e-2}


def train(tmp_path: Path, case: Case, name: str) -> list[dict[str, Any]]:
    folder = tmp_path / name
    folder.mkdir()
    with Ranks(len(case.tokens), group=False) as ranks:
        return ranks.run(rank_autoep.train_once, str(folder), case)


def assert_equal(mine: list[dict[str, Any]], truth: list[dict[str, Any]], bounds: dict[str, float]) -> None:
    for one, other in zip(mine, truth, strict=True):
        for key in ("out", "loss", "x_grad"):
            torch.testing.assert_close(one[key], other[key], **bounds, msg=lambda m, k=key: f"{k}: {m}")
        for name, (first, gradient) in one["grads"].items():
            there, whole = other["grads"][name]
            begin = first - there  # experts: this rank's part of what the other one has
            torch.testing.assert_close(
                gradient, whole[begin : begin + len(gradient)], **bounds, msg=lambda m, n=name: f"gradient of {n}: {m}"
            )


def test_equals_comm(tmp_path: Path) -> None:
    case = Case()
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, comm_backend="comm"), "comm"), FP32)


def test_equals_comm_where_scores_come_before_the_experts(tmp_path: Path) -> None:
    case = Case(autoep={"score_apply": "pre"})
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, comm_backend="comm"), "comm"), FP32)


def test_ep_1_equals_ep_2(tmp_path: Path) -> None:
    """Nothing is sent with ep_size 1: AutoEP computes on the spot, whatever comm_backend says."""
    truth = train(tmp_path, Case(comm_backend="comm", ep_size=1), "ep1")
    assert_equal(train(tmp_path, Case(), "ep2"), truth, FP32)


def test_a_rank_without_tokens(tmp_path: Path) -> None:
    case = Case(tokens=(12, 0))
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, comm_backend="comm"), "comm"), FP32)


@pytest.mark.parametrize("stage", [2, 3])
def test_bf16_with_zero(tmp_path: Path, stage: int) -> None:
    case = Case(dtype=torch.bfloat16, config={"zero_optimization": {"stage": stage}})
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, comm_backend="comm"), "comm"), BF16)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"combine_impl": "fused_weighted_sum"}, "combine_impl"),
        ({"comm_num_sm": 4}, "CAM_THREADS"),
        ({"async_split_plan": True}, "async_split_plan"),
        ({"comm_backend": "camm"}, "camm"),
    ],
)
def test_what_cannot_apply_is_refused(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    with Ranks(2, group=False) as ranks:
        for message in ranks.run(rank_autoep.refusal, str(tmp_path), Case(autoep=wrong)):
            assert "Error" in message
            assert says in message


def test_the_token_limit_holds(tmp_path: Path) -> None:
    case = Case(tokens=(9, 9), autoep={"comm_max_tokens_per_rank": 8})
    with Ranks(2, group=False) as ranks:
        for message in ranks.run(rank_autoep.too_many_tokens, str(tmp_path), case):
            assert "9" in message
            assert "8" in message
