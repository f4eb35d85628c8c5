"""DeepSpeed's own training on the backend cam, beside gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.deepspeed.tests import rank_training
from adapters.deepspeed.tests.environment import skip_without_deepspeed
from adapters.deepspeed.tests.rank_training import Case
from tests.launcher import Ranks

skip_without_deepspeed()

#: With more than two ranks the backends add in different orders, and Adam divides by small numbers.
FP32 = {"rtol": 1e-4, "atol": 1e-5}


def train(tmp_path: Path, case: Case, ranks: int, function: Any = rank_training.train) -> list[dict[str, Any]]:
    folder = tmp_path / str(case.backend)
    folder.mkdir()
    with Ranks(ranks, group=False) as pool:
        return pool.run(function, str(folder), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_equals_gloo_bit_for_bit_on_two_ranks(tmp_path: Path, stage: int, dtype: torch.dtype) -> None:
    """Two numbers have one sum, whoever adds them."""
    case = Case("cam", stage, dtype)
    for mine, truth in zip(train(tmp_path, case, 2), train(tmp_path, replace(case, backend="gloo"), 2), strict=True):
        assert (mine["backend"], truth["backend"]) == ("cam", "gloo")
        assert mine["losses"] == truth["losses"]
        for name, parameter in mine["parameters"].items():
            assert torch.equal(parameter, truth["parameters"][name]), name


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_moe_equals_gloo_bit_for_bit_on_two_ranks(tmp_path: Path, stage: int) -> None:
    dtype = torch.float32 if stage == 0 else torch.bfloat16
    case = Case("cam", stage, dtype, moe=True)
    for mine, truth in zip(train(tmp_path, case, 2), train(tmp_path, replace(case, backend="gloo"), 2), strict=True):
        assert mine["losses"] == truth["losses"]
        for name, parameter in mine["parameters"].items():
            assert torch.equal(parameter, truth["parameters"][name]), name


@pytest.mark.parametrize("stage", [1, 3])
def test_zero_equals_gloo_on_four_ranks(tmp_path: Path, stage: int) -> None:
    case = Case("cam", stage)
    for mine, truth in zip(train(tmp_path, case, 4), train(tmp_path, replace(case, backend="gloo"), 4), strict=True):
        torch.testing.assert_close(mine["losses"], truth["losses"], **FP32)
        torch.testing.assert_close(mine["parameters"], truth["parameters"], **FP32)


def test_the_default_backend_is_cam_after_one_call(tmp_path: Path) -> None:
    for each in train(tmp_path, Case(None, steps=1), 2, rank_training.train_by_default):
        assert each["backend"] == "cam"
