"""Chips, limits, window sizes and the choice of a path: numbers only, no NPU."""

from pathlib import Path

import pytest
import torch

from cam.errors import BackendUnavailable, ConfigError, InputError
from cam.npu import status, vendor
from cam.npu.expert_parallel import choose
from cam.npu.mc2 import Mc2, configured_buffsize_mb
from cam.npu.soc import soc


@pytest.mark.parametrize(
    ("name", "generation"),
    [("Ascend910B3", "A2"), ("Ascend910_9392", "A3"), ("Ascend950PR_9579", "A5"), ("Ascend910_958b", "A5")],
)
def test_chips_are_known_by_name(name: str, generation: str) -> None:
    assert soc(name).generation == generation


@pytest.mark.parametrize("name", ["Ascend310P3", "Ascend910A", "NVIDIA H200"])
def test_an_unknown_chip_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"Ascend910B.*Ascend950"):
        soc(name)


def mc2(chip: str = "Ascend910_9392", max_tokens: int = 128, experts: int = 256, world: int = 16) -> Mc2:
    return Mc2(soc(chip), "group", 0, world, experts, max_tokens, None)


def test_window_sizes_follow_the_vendors_formulas() -> None:
    # 2 * (16 * 128 * 16 * 14848 + 9 * 128 * 14336) bytes; a row is 2 * 7168 + 64, rounded up to 512.
    assert mc2().buffsize_mb(8, 7168) == -(-2 * (16 * 128 * 16 * 14848 + 9 * 128 * 14336) // 2**20) == 960
    # 2 * (128 * 16 * min(16, 8) * 7168 * 2 + 2 MB)
    assert mc2("Ascend910B3").buffsize_mb(8, 7168) == 452
    # 56 * 512 + 2 * 16 * (128 * 14336 * 16 + 512)
    assert mc2("Ascend950PR_9579").buffsize_mb(8, 7168) == 897


@pytest.mark.parametrize(
    ("tokens", "topk", "hidden", "dtype", "wanted"),
    [
        (129, 8, 7168, torch.bfloat16, "tokens = 129, allowed is 1 to 128"),
        (0, 8, 7168, torch.bfloat16, "tokens = 0"),
        (8, 17, 7168, torch.bfloat16, "topk = 17"),
        (8, 8, 512, torch.bfloat16, "hidden = 512, allowed is 1024 to 8192"),
        (8, 8, 7168, torch.float32, "torch.float32"),
    ],
)
def test_calls_beyond_the_limits_are_refused(
    tokens: int, topk: int, hidden: int, dtype: torch.dtype, wanted: str
) -> None:
    with pytest.raises(InputError, match=wanted):
        mc2().check(tokens, topk, hidden, dtype, {"HCCL_BUFFSIZE": "9999"})


def test_a_hidden_size_that_the_chip_cannot_divide_is_refused() -> None:
    with pytest.raises(InputError, match="no multiple of 32"):
        mc2("Ascend910B3").check(8, 8, 1000, torch.bfloat16, {"HCCL_BUFFSIZE": "9999"})


def test_a_window_that_is_too_small_names_the_variable_and_its_value() -> None:
    with pytest.raises(ConfigError, match=r"HCCL_BUFFSIZE is 200. Set HCCL_BUFFSIZE=960"):
        mc2().check(8, 8, 7168, torch.bfloat16, {})
    with pytest.raises(ConfigError, match="'lots'"):
        configured_buffsize_mb({"HCCL_BUFFSIZE": "lots"})


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"max_tokens": 256}, "mc2"),
        ({"max_tokens": 512}, "mc2"),
        ({"max_tokens": 513}, "alltoall"),
        ({"max_tokens": 513, "vendor_installed": True}, "vendor"),
        ({"max_tokens": None, "vendor_installed": True}, "alltoall"),
        ({"max_tokens": 64, "num_experts": 60}, "alltoall"),
        ({"max_tokens": 64, "world": 1}, "alltoall"),
    ],
)
def test_the_path_depends_on_what_all_ranks_know(options: dict[str, object], path: str) -> None:
    given = {"num_experts": 64, "world": 8, "quant": None, "vendor_installed": False, **options}
    choice = choose(soc("Ascend910_9392"), **given)  # type: ignore[arg-type]
    assert choice.path == path
    assert all(choice.reasons.values())


def test_the_status_tells_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.5.0]\n")
    found = dict(status.lines({"HCCL_BUFFSIZE": "400", "ASCEND_HOME_PATH": str(tmp_path)}))
    assert "400 MB" in found["HCCL_BUFFSIZE"]
    assert "8.5.0" in found["CANN"]
    assert "not set up" in dict(status.lines({}))["CANN"]
    if not status.present():
        assert "no NPU" in found["NPU"]
        assert found["decode batches"] == "-"
    assert not vendor.installed("PrivateUse1")
