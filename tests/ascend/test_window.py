"""Window layouts, block sizes and launches: what fits, and what is said when it does not."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from cam_kernels.ascend import linalg
from cam_kernels.ascend.errors import CompileFailed, LaunchError, LimitExceeded
from cam_kernels.ascend.expert_parallel import ExpertParallel
from cam_kernels.ascend.kernels.quant import QUANT_ROWS
from cam_kernels.ascend.launch import NativeLauncher, NpuLauncher
from cam_kernels.ascend.tiling import UB_BYTES, block
from cam_kernels.ascend.window import AREA_ALIGNMENT, Window, WindowLayout
from cam_kernels.reference import expert_ranges

LAYOUT = WindowLayout(world=4, experts=10, topk=3, hidden=100, element_bytes=2, tokens=7, rows=50, blocks=3)
AREAS = ("notify_rows", "notify_flags", "dispatch_meta", "dispatch_flags", "combine_ready", "combine_flags")
AREAS += ("dispatch_rows", "combine_slots")


def test_areas_are_aligned_and_do_not_overlap() -> None:
    sizes = LAYOUT._sizes()
    assert set(sizes) == set(AREAS)
    spans = sorted((LAYOUT.offset(area, half), sizes[area]) for area in AREAS for half in (0, 1))
    assert all(start % AREA_ALIGNMENT == 0 for start, _ in spans)
    assert all(start + size <= after for (start, size), (after, _) in pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= LAYOUT.nbytes == 2 * LAYOUT.half_bytes
    assert LAYOUT.offset("dispatch_rows", 7) == LAYOUT.offset("dispatch_rows", 1)


@pytest.mark.parametrize(("experts", "world"), [(10, 4), (3, 5), (8, 8), (512, 7)])
def test_experts_live_where_the_reference_says(experts: int, world: int) -> None:
    layout = replace(LAYOUT, experts=experts, world=world)
    ranges = expert_ranges(experts, world)
    assert [layout.expert_range(rank) for rank in range(world)] == ranges
    assert all(expert in ranges[layout.owner(expert)] for expert in range(experts))


@pytest.mark.parametrize(
    ("field", "value"), [("experts", 513), ("topk", 17), ("hidden", 8193), ("world", 385), ("rows", 0), ("blocks", 0)]
)
def test_sizes_beyond_the_kernels_limits_are_refused(field: str, value: int) -> None:
    with pytest.raises(LimitExceeded, match=f"{field} = {value}, allowed is"):
        replace(LAYOUT, **{field: value})


def test_an_hccl_window_that_is_too_small_names_the_size() -> None:
    big = replace(LAYOUT, hidden=7168, tokens=512, rows=4096)
    needed = -(-big.nbytes // (1 << 20))
    big.require(needed)
    with pytest.raises(LimitExceeded, match=f"set HCCL_BUFFSIZE={needed}"):
        big.require(needed - 1)


def one_rank(**sizes: int) -> ExpertParallel:
    layout = WindowLayout(**{"world": 1, "experts": 4, "topk": 2, "hidden": 32, "element_bytes": 2, "tokens": 8,
                             "rows": 8, "blocks": 1, **sizes})  # fmt: skip
    memory = torch.zeros(layout.nbytes, dtype=torch.int8)
    return ExpertParallel(NativeLauncher(cores=1), Window(layout, memory, [memory.data_ptr()]), 0)


@pytest.mark.parametrize(
    ("tokens", "hidden", "topk", "dtype", "wanted"),
    [
        (9, 32, 2, torch.bfloat16, "holds 8 tokens"),
        (4, 33, 2, torch.bfloat16, r"\[T, 1..32\]"),
        (4, 32, 2, torch.float32, "64 bytes per row"),
        (4, 32, 3, torch.bfloat16, "of 2 slots"),
        (5, 32, 2, torch.bfloat16, "10 rows arrive at a rank, its window holds 8: raise rows"),
        (4, 32, 2, torch.float64, "torch.float64"),
    ],
)
def test_calls_that_do_not_fit_the_window_are_refused(
    tokens: int, hidden: int, topk: int, dtype: torch.dtype, wanted: str
) -> None:
    with pytest.raises(LimitExceeded, match=wanted):
        one_rank().dispatch(torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(tokens, topk, dtype=torch.int64))


def test_experts_that_do_not_exist_are_refused() -> None:
    with pytest.raises(LimitExceeded, match=r"topk_idx reaches from 0 to 4, experts are 4"):
        one_rank().dispatch(torch.zeros(2, 32).bfloat16(), torch.tensor([[0, 1], [4, 2]]))


def test_blocks_fill_the_unified_buffer_and_no_more() -> None:
    assert block("push_results", 100) == 128
    assert block("push_results", 7168) == 8192
    assert block("sum_results", 7168) == 4096
    assert block("swiglu_requant", 7168) * 92 <= UB_BYTES
    with pytest.raises(LimitExceeded, match="known are"):
        block("nothing", 1)


def test_wrong_arguments_are_named() -> None:
    launcher, x, q, scale = (
        NativeLauncher(),
        torch.zeros(2, 32),
        torch.zeros(2, 32, dtype=torch.int8),
        torch.zeros(2, 8),
    )
    with pytest.raises(LaunchError, match=r"x_ptr is torch.float64, allowed are"):
        launcher.launch(QUANT_ROWS, 1, x.double(), q, scale, 2, 32, BH=32)
    with pytest.raises(LaunchError, match="R = 4294967296 does not fit i32"):
        launcher.launch(QUANT_ROWS, 1, x, q, scale, 2**32, 32, BH=32)
    with pytest.raises(LaunchError, match=r"constants \['BH'\], given \['BX'\]"):
        launcher.launch(QUANT_ROWS, 1, x, q, scale, 2, 32, BX=32)
    with pytest.raises(LaunchError, match=r"contiguous CPU tensor"):
        launcher.launch(QUANT_ROWS, 1, x.t(), q, scale, 2, 32, BH=32)
    with pytest.raises(LaunchError, match="R is a str"):
        launcher.launch(QUANT_ROWS, 1, x, q, scale, "2", 32, BH=32)
    with pytest.raises(LaunchError, match="takes 5 arguments, given 4"):
        launcher.launch(QUANT_ROWS, 1, x, q, scale, 2, BH=32)
    with pytest.raises(LaunchError, match="npu device"):
        NpuLauncher(torch.device("cpu"), 48)


def test_a_kernel_that_triton_rejects_says_where() -> None:
    types = {"x_ptr": "i32", "q_ptr": "*i8", "scale_ptr": "*fp32", "R": "i32", "H": "i32"}
    with pytest.raises(CompileFailed, match=r"quant_rows failed in stage triton front end"):
        linalg.lower(QUANT_ROWS.variant(types, {"BH": 32}))
