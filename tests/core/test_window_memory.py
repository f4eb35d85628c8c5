"""Window memory: every dtype, lives as long as its last view, goes back, has a limit that is told."""

import gc

import pytest
import torch

import cam

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_window_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    with cam.init(name="dtypes") as group:
        tensor = group.empty((3, 5, 7), dtype)
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (3, 5, 7), True)
        tensor.view(torch.uint8).fill_(1)
        assert group.arena.offset_of(tensor.data_ptr(), tensor.nbytes) > 0
        for shape in ((0,), (0, 7), (7, 0), ()):
            assert group.empty(shape, dtype).shape == shape


def test_a_dtype_of_no_native_size_is_refused() -> None:
    with cam.init(name="wide") as group, pytest.raises(cam.InputError, match="complex128"):
        group.empty((1,), torch.complex128)


def test_memory_lives_as_long_as_its_last_view() -> None:
    with cam.init(name="views", window_limit="64MiB") as group:
        tensor = group.empty((1 << 20,), torch.float32)
        assert group.memory()["allocated"] >= 4 << 20
        view = tensor[100:200].view(10, 10).t()
        view.fill_(3)
        del tensor
        gc.collect()
        assert group.memory()["blocks"] == 1
        others = [group.empty((1 << 18,), torch.float32).fill_(i) for i in range(20)]
        assert view.eq(3).all()
        del view, others
        gc.collect()
        assert (group.memory()["allocated"], group.memory()["blocks"]) == (0, 0)
        group.trim()
        assert group.memory()["resident"] == 0


def test_freed_memory_beyond_what_is_retained_goes_back() -> None:
    with cam.init(name="retain", window_limit="64MiB", window_retain="4MiB") as group:
        tensor = group.empty((32 << 20,), torch.uint8).fill_(1)
        assert group.memory()["resident"] >= 32 << 20
        del tensor
        gc.collect()
        assert group.memory()["resident"] <= 5 << 20


def test_a_full_window_names_actual_limit_and_knob() -> None:
    with cam.init(name="full", window_limit="8MiB") as group:
        kept = group.empty((5 << 20,), torch.uint8)
        with pytest.raises(cam.OutOfWindowMemory, match="window_limit") as caught:
            group.empty((4 << 20,), torch.uint8)
        error = caught.value
        assert (error.rank, error.requested, error.limit) == (0, 4 << 20, 8 << 20)
        assert error.allocated >= 5 << 20
        assert isinstance(error, MemoryError)
        del kept
        gc.collect()
        group.empty((4 << 20,), torch.uint8)


def test_tensors_outlive_their_group() -> None:
    group = cam.init(name="outlived", window_limit="8MiB")
    tensor = group.empty((1 << 20,), torch.uint8).fill_(7)
    group.close()
    del group
    gc.collect()
    assert tensor.eq(7).all()
    tensor.fill_(8)


def test_a_closed_group_says_so() -> None:
    group = cam.init(name="closed")
    group.close()
    group.close()
    for use in (
        group.barrier,
        group.memory,
        group.trim,
        lambda: group.empty((1,), torch.int8),
        lambda: group.submit(int),
        lambda: group.endpoint,
    ):
        with pytest.raises(cam.GroupAborted, match="has closed the group"):
            use()
