"""The native mover, against plain slices: tables of rectangles, both directions, limits, other processes."""

import ctypes
import itertools
import os
import time

import numpy as np
import pytest

import cam_kernels as native

COLUMNS = 6
DONE, CANCELLED, LATE, FAILED = range(4)


def _mover(threads: int = 1, isa: str = "auto", threshold: int = 1 << 20) -> native.Mover:
    return native.Mover(threads, isa, threshold)


def _random(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def _arguments(table, mine, theirs):
    """mine, theirs: one array for each layer."""
    bases = [np.array([each.ctypes.data for each in side], np.int64) for side in (mine, theirs)]
    return (table, *bases), (table.ctypes.data, len(table), bases[0].ctypes.data, bases[1].ctypes.data, len(mine))


def _table(seed: int, pieces: int, room: int) -> np.ndarray:
    """Rectangles of odd sizes; on each side every piece has a stretch of its own."""
    rng = np.random.default_rng(seed)
    table = np.zeros((pieces, COLUMNS), np.int64)
    places = rng.permutation(pieces), rng.permutation(pieces)
    for index in range(pieces):
        rows = int(rng.integers(1, 5))
        nbytes = int(rng.integers(1, room // rows - 2))
        strides = [nbytes + int(rng.integers(0, room // rows - nbytes)) for _ in range(2)]
        table[index] = [places[0][index] * room, places[1][index] * room, nbytes, rows, *strides]
    return table


def _apply(table, mine, theirs, to_mine: bool) -> None:
    for (a, b, nbytes, rows, my_step, their_step), row in itertools.product(table.tolist(), range(5)):
        if row < rows:
            here = slice(a + row * my_step, a + row * my_step + nbytes)
            there = slice(b + row * their_step, b + row * their_step + nbytes)
            if to_mine:
                mine[here] = theirs[there]
            else:
                theirs[there] = mine[here]


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("threshold", [0, 1 << 40])
@pytest.mark.parametrize("to_mine", [True, False])
def test_rectangles_of_several_layers(isa, threads, threshold, to_mine):
    pieces, room, layers = 40, 3000, 3
    table = _table(1, pieces, room)
    mine = [_random(pieces * room, 10 + i) for i in range(layers)]
    theirs = [_random(pieces * room, 20 + i) for i in range(layers)]
    expected = [each.copy() for each in mine], [each.copy() for each in theirs]
    for here, there in zip(*expected, strict=True):
        _apply(table, here, there, to_mine)
    keep, arguments = _arguments(table, mine, theirs)
    assert _mover(threads, isa, threshold).copy(*arguments, to_mine, 0, 0) == (DONE, 0, 0)
    for found, right in zip((mine, theirs), expected, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(found, right, strict=True))
    del keep


@pytest.mark.parametrize("pid", ["self", "child"])
def test_memory_of_a_process_in_more_runs_than_one_call_takes(pid):
    pieces, room = 3000, 64  # a system call takes 1024 runs
    table = _table(2, pieces, room)
    mine, theirs = np.zeros(pieces * room, np.uint8), _random(pieces * room, 3)
    expected = mine.copy()
    _apply(table, expected, theirs, True)
    keep, arguments = _arguments(table, [mine], [theirs])
    if pid == "self":
        assert _mover().copy_process(os.getpid(), *arguments, True, 0, 0) == (DONE, 0, 0)
        assert np.array_equal(mine, expected)
        return
    ready, wait = os.pipe(), os.pipe()
    child = os.fork()  # has the same memory at the same addresses
    if child == 0:
        os.close(wait[1])
        theirs[:] = 7
        os.write(ready[1], b"x")
        os.read(wait[0], 1)  # until the parent closes its end, or dies
        os._exit(0)
    os.close(wait[0])
    try:
        os.read(ready[0], 1)
        assert _mover().copy_process(child, *arguments, True, 0, 0) == (DONE, 0, 0)
        assert set(np.unique(mine[expected != 0]).tolist()) <= {7}
        assert mine.any()
        mine[:] = 9
        assert _mover().copy_process(child, *arguments, False, 0, 0) == (DONE, 0, 0)
        back = np.zeros_like(mine)
        keep_back, again = _arguments(table, [back], [theirs])
        assert _mover().copy_process(child, *again, True, 0, 0) == (DONE, 0, 0)
        assert set(np.unique(back).tolist()) == {0, 9}
        del keep_back
    finally:
        os.close(wait[1])
        os.waitpid(child, 0)
        for fd in ready:
            os.close(fd)
    # Gone: an error, and the step that it happened at.
    ended, step, error = _mover().copy_process(child, *arguments, True, 0, 0)
    assert ended == FAILED
    assert step == 0
    assert error != 0
    del keep


def test_an_unmapped_page_fails_at_its_piece():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    page = 4096
    start = libc.mmap(None, ctypes.c_size_t(8 * page), 3, 0x22, -1, 0)  # private, anonymous
    libc.munmap(ctypes.c_void_p(start + 5 * page), ctypes.c_size_t(page))
    mine = np.zeros(8 * page, np.uint8)
    table = np.array([[i * page, i * page, page, 1, 0, 0] for i in range(8)], np.int64)
    bases = np.array([mine.ctypes.data], np.int64), np.array([start], np.int64)
    arguments = (table.ctypes.data, 8, bases[0].ctypes.data, bases[1].ctypes.data, 1)
    ended, step, error = _mover().copy_process(os.getpid(), *arguments, True, 0, 0)
    assert (ended, step) == (FAILED, 5)
    assert os.strerror(error) == "Bad address"
    libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(8 * page))


@pytest.mark.parametrize("threads", [1, 2])
def test_cancelled_and_late_copies_end_early(threads):
    size = 64 << 20
    mine, theirs = np.zeros(size, np.uint8), np.ones(size, np.uint8)
    table = np.array([[i << 20, i << 20, 1 << 20, 1, 0, 0] for i in range(64)], np.int64)
    keep, arguments = _arguments(table, [mine], [theirs])
    flag = ctypes.c_uint32(1)
    assert _mover(threads).copy(*arguments, True, ctypes.addressof(flag), 0)[0] == CANCELLED
    assert not mine.any()
    soon = time.monotonic_ns() + 1000
    assert _mover(threads).copy(*arguments, True, 0, soon)[0] == LATE
    assert _mover(threads).copy_process(os.getpid(), *arguments, True, ctypes.addressof(flag), 0)[0] == CANCELLED
    assert _mover(threads).copy(*arguments, True, 0, time.monotonic_ns() + 10**11)[0] == DONE
    assert mine.all()
    del keep


def test_nothing_to_move():
    table = np.zeros((0, COLUMNS), np.int64)
    assert _mover(2).copy(table.ctypes.data, 0, 0, 0, 0, True, 0, 0) == (DONE, 0, 0)
    assert _mover(2).copy_process(os.getpid(), table.ctypes.data, 0, 0, 0, 0, True, 0, 0) == (DONE, 0, 0)
    with pytest.raises(native.BadInput):
        _mover().copy(0, -1, 0, 0, 1, True, 0, 0)
    with pytest.raises(native.BadInput, match="isa"):
        _mover(isa="sse9")
