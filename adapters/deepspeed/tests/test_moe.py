"""deepspeed.moe.layer.MoE on cam.ep, beside DeepSpeed's own layer, through deepspeed.initialize and engine.backward."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.deepspeed.tests import rank_moe
from adapters.deepspeed.tests.environment import skip_without_deepspeed
from adapters.deepspeed.tests.rank_moe import Case
from tests.launcher import Ranks

skip_without_deepspeed()

#: DeepSpeed multiplies padded blocks, CAM exactly the rows: other heights, other order of additions in a matmul.
FP32 = {"rtol": 2e-5, "atol": 2e-6}
#: bf16 gradients are reduced in bf16.
BF16 = {"rtol": 3e-2, "atol": 3e-2}
RESULTS = ("out", "loss", "l_aux", "exp_counts", "x_grad")


def train(tmp_path: Path, case: Case, name: str) -> list[dict[str, Any]]:
    folder = tmp_path / name
    folder.mkdir()
    with Ranks(len(case.tokens), group=False) as ranks:
        return ranks.run(rank_moe.train_once, str(folder), case)


def assert_equal(mine: list[dict[str, Any]], truth: list[dict[str, Any]], bounds: dict[str, float]) -> None:
    for rank, (one, other) in enumerate(zip(mine, truth, strict=True)):
        for key in RESULTS:
            torch.testing.assert_close(
                one[key], other[key], **bounds, msg=lambda m, k=key, r=rank: f"rank {r} {k}: {m}"
            )
    # An expert's gradient is on the ranks that have it; every rank that has it must agree.
    everywhere = {name: gradient for each in truth for name, gradient in each["grads"].items()}
    for rank, each in enumerate(mine):
        for name, gradient in each["grads"].items():
            torch.testing.assert_close(
                gradient, everywhere[name], **bounds, msg=lambda m, n=name, r=rank: f"rank {r}, gradient of {n}: {m}"
            )


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [False, True], ids=["dropless", "dropping"])
def test_equals_deepspeeds_own_layer(tmp_path: Path, k: int, drop_tokens: bool) -> None:
    # DeepSpeed's capacity depends on a rank's own number of tokens where it drops, and for k = 1 always: its all-to-all
    # then needs the same number everywhere.
    tokens = (20, 20) if drop_tokens or k == 1 else (24, 17)
    case = Case(k=k, drop_tokens=drop_tokens, favourite=True, tokens=tokens)
    truth = train(tmp_path, replace(case, cam=False), "deepspeed")
    mine = train(tmp_path, case, "cam")
    assert_equal(mine, truth, FP32)
    if drop_tokens:  # else the comparison shows nothing about capacity
        assert max(int(each["exp_counts"].max()) for each in mine) > k * max(case.tokens) / case.experts


def test_dropped_tokens_get_nothing(tmp_path: Path) -> None:
    case = Case(k=1, drop_tokens=True, favourite=True, moe={"capacity_factor": 0.5})
    (first, _) = train(tmp_path, case, "cam")
    capacity = case.tokens[0] / case.experts * 0.5
    assert (first["out"][0] != 0).any(-1).sum() == capacity


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("drop_tokens", [False, True], ids=["dropless", "dropping"])
def test_ep_1_equals_ep_2(tmp_path: Path, k: int, drop_tokens: bool) -> None:
    """Losses, and gradients as the engine reduces them (DeepSpeed#5618, PR#4957: expert gradients 2 or 4 times)."""
    case = Case(k=k, drop_tokens=drop_tokens)
    assert_equal(train(tmp_path, case, "ep2"), train(tmp_path, replace(case, ep_size=1), "ep1"), FP32)


def test_ep_1_equals_ep_2_and_4(tmp_path: Path) -> None:
    case = Case(tokens=(9, 4, 12, 7), ep_size=4)
    truth = train(tmp_path, replace(case, ep_size=1), "ep1")
    assert_equal(train(tmp_path, case, "ep4"), truth, FP32)
    assert_equal(train(tmp_path, replace(case, ep_size=2), "ep2"), truth, FP32)


@pytest.mark.parametrize("stage", [1, 2])
def test_ep_1_equals_ep_2_with_zero(tmp_path: Path, stage: int) -> None:
    case = Case(dtype=torch.bfloat16, config={"zero_optimization": {"stage": stage}})
    assert_equal(train(tmp_path, case, "ep2"), train(tmp_path, replace(case, ep_size=1), "ep1"), BF16)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_backend_cam_changes_nothing(tmp_path: Path, tp_size: int) -> None:
    """DeepSpeed's collectives on cam, CAM's dispatch in the layer, in one process: the same bits as on gloo."""
    case = Case(tokens=(7, 7, 9, 9)[: 2 * tp_size], tp_size=tp_size, dtype=torch.bfloat16)
    on_cam, on_gloo = train(tmp_path, replace(case, backend="cam"), "cam"), train(tmp_path, case, "gloo")
    assert_equal(on_cam, on_gloo, {"rtol": 0, "atol": 0})


def test_bf16_equals_deepspeeds_own_layer(tmp_path: Path) -> None:
    case = Case(dtype=torch.bfloat16)
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, cam=False), "deepspeed"), BF16)


@pytest.mark.parametrize("k", [1, 2])
def test_a_rank_without_tokens(tmp_path: Path, k: int) -> None:
    """It takes part in everything, has l_aux 0, and the others get what they would get without it."""
    case = Case(k=k, tokens=(24, 0))
    mine = train(tmp_path, case, "ep2")
    assert_equal(mine, train(tmp_path, replace(case, ep_size=1), "ep1"), FP32)
    assert mine[1]["l_aux"] == 0
    assert mine[1]["exp_counts"].tolist() == [0] * case.experts
    alone = train(tmp_path, replace(case, tokens=(24,), ep_size=1, cam=False), "alone")
    torch.testing.assert_close(mine[0]["out"], alone[0]["out"], **FP32)
    for each in mine:
        for name, gradient in each["grads"].items():  # the engine averages over two ranks
            torch.testing.assert_close(gradient * 2, alone[0]["grads"][name], **FP32)


def test_a_rank_whose_experts_get_nothing(tmp_path: Path) -> None:
    case = Case(k=1, favourite=True, tokens=(8, 8))
    mine = train(tmp_path, case, "ep2")
    assert mine[0]["exp_counts"].tolist()[2:] == [0, 0]
    assert_equal(mine, train(tmp_path, replace(case, cam=False), "deepspeed"), FP32)
    for name, gradient in mine[1]["grads"].items():
        if "deepspeed_experts" in name:
            assert not gradient.any()


def test_the_engine_reads_the_layers_times(tmp_path: Path) -> None:
    case = Case(config={"wall_clock_breakdown": True})
    for each in train(tmp_path, case, "timed"):
        whole, first, second = each["seconds"]
        assert whole > first + second > 0
    for each in train(tmp_path, Case(), "not-timed"):
        assert each["seconds"] == (0, 0, 0)


@pytest.mark.parametrize("checkpoint", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, checkpoint: str) -> None:
    """Dispatch and combine run again inside the backward pass, in the same order on all ranks."""
    case = Case()
    mine = train(tmp_path, replace(case, checkpoint=checkpoint), "checkpointed")
    assert_equal(mine, train(tmp_path, case, "plain"), {"rtol": 0, "atol": 0})


def test_the_router_learns(tmp_path: Path) -> None:
    """DeepSpeed#8213: its gradient must come through the weights of combine, not from l_aux alone."""
    case = Case(k=2, moe={"use_residual": False})
    (mine, _), (truth, _) = train(tmp_path, case, "cam"), train(tmp_path, replace(case, cam=False), "deepspeed")
    gate = "moe.deepspeed_moe.gate.wg.weight"
    torch.testing.assert_close(mine["grads"][gate], truth["grads"][gate], **FP32)
    assert mine["grads"][gate].abs().max() > 0.1


def test_used_token_and_residual(tmp_path: Path) -> None:
    case = Case(k=1, fillers=True, moe={"use_residual": True, "noisy_gate_policy": "Jitter"})
    mine = train(tmp_path, case, "cam")
    assert_equal(mine, train(tmp_path, replace(case, cam=False), "deepspeed"), FP32)
    assert [int(each["exp_counts"].sum()) for each in mine] == [16, 11]


@pytest.mark.parametrize("drop_tokens", [False, True], ids=["dropless", "dropping"])
@pytest.mark.parametrize("ep_size", [1, 2])
def test_tensor_parallel_ranks_share_their_tokens(tmp_path: Path, ep_size: int, drop_tokens: bool) -> None:
    # 7 tokens do not divide by 2 ranks. DeepSpeed's capacity must: it rounds it up where it does not drop.
    tokens = (8, 8, 4, 4) if drop_tokens else (7, 7, 8, 8)
    case = Case(tp_size=2, ep_size=ep_size, tokens=tokens, drop_tokens=drop_tokens)
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, cam=False), "deepspeed"), FP32)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_tensor_parallel_experts_see_all_tokens(tmp_path: Path, ep_size: int) -> None:
    moe = {"enable_expert_tensor_parallelism": True}
    case = Case(tp_size=2, ep_size=ep_size, tokens=(8, 8, 8, 8), drop_tokens=True, moe=moe)
    assert_equal(train(tmp_path, case, "cam"), train(tmp_path, replace(case, cam=False), "deepspeed"), FP32)


def test_ranks_infer_independently(tmp_path: Path) -> None:
    """DeepSpeed#7141: with ep_size 1 nothing is shared, so ranks may call the model as often as they like."""
    with Ranks(2, group=False) as ranks:
        first, second = ranks.run(rank_moe.infer, str(tmp_path), Case(ep_size=1), [3, 1])
    assert len(first) == 3
    assert len(second) == 1


def test_a_rank_that_does_not_call_is_named(tmp_path: Path) -> None:
    """With ep_size 2 the ranks need each other: an error with a name, in time, instead of DeepSpeed#7141's hang."""
    case = Case(config={"cam": {"moe": True, "group": {"timeout_s": 2}}})
    with Ranks(2, group=False) as ranks:
        first, _ = ranks.run(rank_moe.infer, str(tmp_path), case, [2, 1], expect_errors=True)
    assert type(first).__name__ in ("Timeout", "PeerLost"), repr(first)
    assert "rank 1" in str(first)


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    with Ranks(1, group=False) as ranks:
        (message,) = ranks.run(
            rank_moe.refusal, str(tmp_path), Case(ep_size=1, tokens=(4,), config={"cam": {"moee": True}})
        )
    assert message.startswith("ConfigError")
    assert "'moee'" in message
    assert "'moe'" in message


def test_what_cannot_be_converted_is_refused_with_the_reason(tmp_path: Path) -> None:
    with Ranks(1, group=False) as ranks:
        (said,) = ranks.run(rank_moe.refusals, str(tmp_path))
    assert "use_tutel=False" in said["tutel"]
    assert "Derived" in said["derived"]
    assert "parameters are on meta" in said["elsewhere"]
    assert "before deepspeed.initialize" in said["late"]
    assert said["without"].startswith("ConfigError")
    assert "comm_backend" in said["without"]
    assert "call deepspeed.initialize first" in said["before"]


def test_groups_end_with_their_process_groups(tmp_path: Path) -> None:
    case = Case(tokens=(4, 4))
    with Ranks(2, group=False) as ranks:
        for during, after in ranks.run(rank_moe.groups_left, str(tmp_path), case):
            assert len(during) == 1
            assert after == []
