"""The allocator over window memory: exact bounds, reuse, coalescing, and pages that go back."""

import gc
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import cam_kernels as native

KIB, MIB = 1024, 1024 * 1024


def make(limit: int, retain: int = 1 << 30) -> native.Arena:
    fd = os.memfd_create("arena-test")
    try:
        os.ftruncate(fd, native.control_bytes(1) + limit)
        return native.Arena(fd, 1, limit, retain)
    finally:
        os.close(fd)


@pytest.fixture
def arena() -> native.Arena:
    return make(8 * MIB)


def test_memory_is_writable_and_found_by_address(arena: native.Arena) -> None:
    array = np.from_dlpack(arena.empty((3, 5), "float32"))
    array[:] = 7
    assert (array == 7).all()
    assert arena.offset_of(array.ctypes.data, array.nbytes) >= native.control_bytes(1)
    assert arena.offset_of(array.ctypes.data, 9 * MIB) == -1
    outside = np.zeros(4)
    assert arena.offset_of(outside.ctypes.data, outside.nbytes) == -1


def test_memory_lives_as_long_as_its_last_view(arena: native.Arena) -> None:
    array = np.from_dlpack(arena.empty((1000,), "int64"))
    view = array[10:20]
    del array
    gc.collect()
    assert arena.stats()["blocks"] == 1
    del view
    gc.collect()
    assert arena.stats() | {"resident": 0, "peak": 0} == {
        "allocated": 0, "peak": 0, "resident": 0, "limit": 8 * MIB, "blocks": 0,
    }  # fmt: skip


def test_memory_outlives_the_arena_object() -> None:
    arena = make(MIB)
    array = np.from_dlpack(arena.empty((100,), "int32"))
    del arena
    gc.collect()
    array[:] = 3
    assert array.sum() == 300


def test_a_full_arena_says_what_it_has(arena: native.Arena) -> None:
    held = arena.empty((7 * MIB,), "uint8")
    with pytest.raises(native.OutOfMemory) as caught:
        arena.empty((2 * MIB,), "uint8")
    fields = caught.value.args[0]
    assert fields["requested"] == 2 * MIB
    assert fields["limit"] == 8 * MIB
    assert fields["allocated"] >= 7 * MIB
    del held
    gc.collect()
    arena.empty((8 * MIB,), "uint8")


def test_free_neighbours_become_one_block(arena: native.Arena) -> None:
    blocks = [arena.empty((MIB,), "uint8") for _ in range(8)]
    for index in (1, 3, 2, 5, 4, 0, 7, 6):
        blocks[index] = None  # type: ignore[call-overload]
    gc.collect()
    arena.empty((8 * MIB,), "uint8")


def test_trim_gives_pages_back_and_keeps_what_is_in_use() -> None:
    arena = make(64 * MIB)
    kept = np.from_dlpack(arena.empty((MIB,), "uint8"))
    kept[:] = 9
    dropped = arena.empty((32 * MIB,), "uint8")
    assert arena.stats()["resident"] >= 33 * MIB
    del dropped
    gc.collect()
    assert arena.stats()["resident"] >= 33 * MIB, "freed pages are kept for reuse"
    arena.trim()
    assert arena.stats()["resident"] <= 2 * MIB
    assert (kept == 9).all()


def test_no_more_free_pages_are_kept_than_asked() -> None:
    arena = make(64 * MIB, retain=4 * MIB)
    block = arena.empty((32 * MIB,), "uint8")
    del block
    gc.collect()
    assert arena.stats()["resident"] <= 4 * MIB + 256 * KIB


def test_small_blocks_give_the_pages_back_that_they_shared() -> None:
    arena = make(64 * MIB, retain=0)
    blocks = [arena.empty((200 * KIB,), "uint8") for _ in range(100)]
    assert arena.stats()["resident"] >= 100 * 200 * KIB
    while blocks:
        del blocks[len(blocks) // 2]
        gc.collect()
    assert arena.stats()["resident"] == 0


@pytest.mark.parametrize("size", [8 * MIB, 101 * MIB])
def test_all_of_the_limit_can_be_had(size: int) -> None:
    arena = make(size)
    block = arena.empty((size - 4,), "uint8")
    with pytest.raises(native.OutOfMemory):
        arena.empty((65,), "uint8")
    del block
    gc.collect()
    assert arena.stats()["allocated"] == 0


@pytest.mark.parametrize("elements", [(1 << 62) - 1, 1 << 60, 3 * MIB])
def test_what_exceeds_the_limit_is_refused_however_large(arena: native.Arena, elements: int) -> None:
    with pytest.raises(native.OutOfMemory):
        arena.empty((elements,), "float32")
    assert arena.stats()["allocated"] == 0


@pytest.mark.parametrize("shape", [(-1,), (1 << 40, 1 << 40)])
def test_impossible_shapes_are_refused(arena: native.Arena, shape: tuple[int, ...]) -> None:
    with pytest.raises(native.BadInput):
        arena.empty(shape, "float32")


def test_unknown_dtypes_are_refused(arena: native.Arena) -> None:
    with pytest.raises(native.BadInput, match="float8"):
        arena.empty((1,), "float8")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3 * MIB), st.integers(0, 9)), max_size=40))
def test_blocks_never_overlap(requests: list[tuple[int, int]]) -> None:
    """Allocates and frees at random; each live block keeps the pattern written into it."""
    arena = make(16 * MIB, retain=2 * MIB)
    live: list[tuple[np.ndarray, int]] = []
    for number, (size, victim) in enumerate(requests):
        try:
            block = np.from_dlpack(arena.empty((size,), "uint8"))
        except native.OutOfMemory:
            assert sum(array.nbytes for array, _ in live) + size > 4 * MIB
        else:
            block[:] = number % 251
            live.append((block, number % 251))
            del block  # only `live` counts
        if live and victim < len(live):
            del live[victim]
    for array, pattern in live:
        assert (array == pattern).all()
    assert arena.stats()["blocks"] == len(live)


def test_a_limit_below_one_chunk_is_refused() -> None:
    with pytest.raises(native.BadInput, match="window_limit"):
        make(1000)
