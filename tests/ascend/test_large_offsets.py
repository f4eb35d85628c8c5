"""Offsets beyond 2^31 elements, in sparse memory: only pages that are touched exist.

A 32-bit index anywhere on the way would wrap and store elsewhere, or crash.
"""

import mmap
import os

import pytest
import torch

from cam_kernels.ascend import paging
from cam_kernels.ascend.kernels.combine import PUSH_RESULTS, SUM_RESULTS
from cam_kernels.ascend.kernels.dispatch import PUSH_ROWS
from cam_kernels.ascend.launch import NativeLauncher

LAUNCHER = NativeLauncher(cores=2)
HIDDEN = 8192
FAR = 400_000  # row * HIDDEN = 3.3e9 elements


@pytest.fixture
def far_rows() -> torch.Tensor:
    """[FAR + 1, HIDDEN] bf16 zeros, 6.5 GB of address space and no memory."""
    return sparse()


def sparse() -> torch.Tensor:
    size = (FAR + 1) * HIDDEN * 2
    file = os.memfd_create("sparse")
    os.ftruncate(file, size)
    memory = mmap.mmap(file, size)
    os.close(file)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(FAR + 1, HIDDEN)


def address(tensor: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr()])


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_dispatch_stores_far_rows(far_rows: torch.Tensor) -> None:
    x, none = torch.randn(1, HIDDEN).bfloat16(), torch.zeros(1)
    meta, flags = torch.zeros(FAR + 1, 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    LAUNCHER.launch(
        PUSH_ROWS, 1, x, none, int32(0), none, int32(0), int32(FAR), address(far_rows), address(meta), address(flags),
        0, 1, 1, HIDDEN, 1, 1, 5, BH=8192, QUANT=False, SCALED=False, WEIGHTED=False,
    )  # fmt: skip
    assert torch.equal(far_rows[FAR], x[0])
    assert meta[FAR].tolist()[:3] == [0, 0, 0]
    assert flags.tolist() == [5] * 8


def test_combine_stores_far_rows(far_rows: torch.Tensor) -> None:
    target = sparse()
    far_rows[FAR] = torch.randn(HIDDEN).bfloat16()
    source = torch.full((FAR + 1, 3), -1, dtype=torch.int32)
    source[FAR] = int32(0, FAR, 0)
    flags = torch.zeros(FAR + 1, 8, dtype=torch.int32)
    LAUNCHER.launch(
        PUSH_RESULTS, 2, far_rows, source, address(target), address(flags), FAR + 1, HIDDEN, 1, 5, BH=8192
    )  # fmt: skip
    assert torch.equal(target[FAR], far_rows[FAR])
    assert flags[FAR].tolist() == [5] * 8


def test_combine_sums_far_rows(far_rows: torch.Tensor) -> None:
    out, none = sparse(), torch.zeros(1)
    far_rows[FAR] = torch.randn(HIDDEN).bfloat16()
    done = torch.ones(FAR + 1, 8, dtype=torch.int32)
    done[FAR] = 0
    flags, position = torch.full((FAR + 1, 8), 5, dtype=torch.int32), torch.zeros(FAR + 1, dtype=torch.int32)
    LAUNCHER.launch(
        SUM_RESULTS, 2, far_rows, flags, position, none, none.bfloat16(), out, done, FAR + 1, 1, HIDDEN, 5, 10,
        BH=4096, KP=1, WEIGHTED=False, BIASED=False,
    )  # fmt: skip
    assert torch.equal(out[FAR], far_rows[FAR])
    assert int(done.sum()) == done.numel()


def test_pages_far_into_a_cache(far_rows: torch.Tensor) -> None:
    shape = paging.PageShape(16, 4, 128)
    page = torch.randn(1, HIDDEN).bfloat16()
    plan = paging.plan_pages(shape, shape, heads=4)
    paging.copy_heads(LAUNCHER, plan, page.data_ptr(), far_rows.data_ptr(), int32(0), int32(FAR), 2)
    assert torch.equal(far_rows[FAR], page[0])
