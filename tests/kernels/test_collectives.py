"""The native collectives and messages between ranks that are threads of one process, without torch.

Every instruction set gives NumPy's bits. This is what `make sanitize` runs.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import cam_kernels as native

ISAS = native.isas()
LIMIT = 32 << 20


def in_ranks(world: int, work: Callable[[int, native.Endpoint], Any], isa: str = "auto", threads: int = 1) -> list[Any]:
    """work(rank, endpoint) in a thread for each rank; results by rank."""
    fds = [os.memfd_create(f"rank{rank}") for rank in range(world)]
    try:
        for fd in fds:
            os.ftruncate(fd, native.control_bytes(world) + LIMIT)
        arenas = [native.Arena(fd, world, LIMIT, LIMIT) for fd in fds]
        endpoints = [
            native.Endpoint(rank, arenas[rank], fds, [-1] * world, 2, threads, isa, 1 << 20) for rank in range(world)
        ]
    finally:
        for fd in fds:
            os.close(fd)
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(work, range(world), endpoints))


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def values(dtype: str, elements: int, rank: int) -> np.ndarray:
    random = np.random.default_rng(rank)
    if dtype == "bool":
        return random.random(elements) < 0.5
    if np.dtype(dtype).kind == "f":
        return (random.standard_normal(elements) * 100).astype(dtype)
    return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, elements, dtype=dtype, endpoint=True)


def wanted(arrays: list[np.ndarray], reduction: str) -> np.ndarray:
    dtype = arrays[0].dtype
    wide = np.float32 if dtype == np.float16 else dtype
    total = arrays[0].astype(wide)
    for each in arrays[1:]:
        right = each.astype(wide)
        match reduction:
            case "sum" | "avg":
                total = total | right if dtype.kind == "b" else total + right
            case "product":
                total = total & right if dtype.kind == "b" else total * right
            case "min":
                total = np.minimum(total, right)
            case "max":
                total = np.maximum(total, right)
            case "bit_and":
                total = total & right
            case "bit_or":
                total = total | right
            case "bit_xor":
                total = total ^ right
    if reduction == "avg":
        count = wide.type(len(arrays)) if isinstance(wide, np.dtype) else wide(len(arrays))
        total = total / count if dtype.kind == "f" else np.trunc(total / count)
    return total.astype(dtype)


FLOATS = [(dtype, op) for dtype in ("float16", "float32", "float64") for op in ("sum", "avg", "product", "min", "max")]
WHOLE = [
    (dtype, op)
    for dtype in ("int8", "uint8", "int16", "int32", "int64", "bool")
    for op in ("sum", "product", "min", "max", "bit_and", "bit_or", "bit_xor")
]


@pytest.mark.parametrize("isa", ISAS)
def test_reductions_give_the_bits_of_numpy(isa: str) -> None:
    cases = [(*case, elements) for case in [*FLOATS, *WHOLE, ("int32", "avg")] for elements in (1, 63, 1000)]

    def work(rank: int, endpoint: native.Endpoint) -> list[bytes]:
        found = []
        for dtype, op, elements in cases:
            own = values(dtype, elements, rank)
            at = address(own)
            endpoint.all_reduce([(at, at, elements)], dtype, op, 1.0, "auto", 0, 20.0)
            found.append(own.tobytes())
        return found

    with np.errstate(over="ignore"):
        expected = [wanted([values(d, n, r) for r in range(3)], op).tobytes() for d, op, n in cases]
    for found in in_ranks(3, work, isa):
        for case, one, other in zip(cases, found, expected, strict=True):
            assert one == other, case


@pytest.mark.parametrize("algorithm", ["flat", "direct"])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_spans_and_threads(algorithm: str, threads: int) -> None:
    sizes = (0, 1, 70_001, 300_000, 5)

    def work(rank: int, endpoint: native.Endpoint) -> list[np.ndarray]:
        arrays = [values("float32", size, rank * 10 + i) for i, size in enumerate(sizes)]
        spans = [(address(each), address(each), each.size) for each in arrays]
        endpoint.all_reduce(spans, "float32", "sum", 1.0, algorithm, 10_000, 20.0)
        return arrays

    expected = [wanted([values("float32", n, r * 10 + i) for r in range(3)], "sum") for i, n in enumerate(sizes)]
    for found in in_ranks(3, work, threads=threads):
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other)


def test_moves() -> None:
    world, size = 3, 200_003

    def work(rank: int, endpoint: native.Endpoint) -> None:
        own = np.full(size, rank, np.uint8)
        outs = [np.zeros(size, np.uint8) for _ in range(world)]
        endpoint.all_gather(address(own), [size] * world, [address(out) for out in outs], "auto", 4096, 20.0)
        assert all((outs[r] == r).all() for r in range(world))
        counts = [[(a + 1) * (b + 2) * 1000 if (a, b) != (0, 1) else 0 for b in range(world)] for a in range(world)]
        ins = [np.full(counts[rank][r], 10 * rank + r, np.uint8) for r in range(world)]
        outs = [np.zeros(counts[r][rank], np.uint8) for r in range(world)]
        endpoint.all_to_all(
            [address(each) for each in ins],
            counts[rank],
            [address(each) for each in outs],
            [each.size for each in outs],
            "auto",
            8192,
            20.0,
        )
        assert all((outs[r] == 10 * r + rank).all() for r in range(world))
        endpoint.broadcast(address(own), size, 2, "auto", 0, 20.0)
        assert (own == 2).all()
        parts = [np.full(5000, rank + r, np.int32) for r in range(world)]
        out = np.zeros(5000, np.int32)
        addresses = [address(part) for part in parts]
        endpoint.reduce_scatter(addresses, [5000] * world, address(out), "int32", "sum", 1.0, "auto", 4096, 20.0)
        assert (out == 3 + 3 * rank).all()

    in_ranks(world, work)


def test_messages_keep_order_and_give_memory_back() -> None:
    def work(rank: int, endpoint: native.Endpoint) -> None:
        channels = native.Channels(endpoint)
        peer = 1 - rank
        for turn in range(50):
            size = (turn * 7919) % 300_000
            sent = np.full(size, turn, np.uint8)
            channels.send(peer, turn % 3, address(sent), size, 5.0)
        posted = []
        for turn in range(50):
            size = (turn * 7919) % 300_000
            array = np.zeros(size, np.uint8)
            posted.append((channels.post(peer, turn % 3, address(array), size), array, turn))
        for receive, array, turn in reversed(posted):
            assert channels.wait(receive, 5.0) == peer
            assert (array == turn).all()
        byte = np.zeros(1, np.uint8)
        receive = channels.post(-1, 99, address(byte), 1)
        assert channels.test(receive) == -1
        with pytest.raises(native.WaitTimeout):
            channels.wait(receive, 0.05)
        with pytest.raises(native.BadInput):
            channels.test(receive)

    in_ranks(2, work)


def test_a_full_window_waits_for_the_receiver_and_then_tells_both() -> None:
    size = LIMIT // 3

    def work(rank: int, endpoint: native.Endpoint) -> None:
        channels = native.Channels(endpoint)
        data = np.ones(size, np.uint8)
        if rank == 0:
            for _ in range(6):  # more than fits: waits while rank 1 receives
                channels.send(1, 0, address(data), size, 10.0)
            endpoint.barrier(10.0)
            channels.send(1, 0, address(data), size, 10.0)
            channels.send(1, 0, address(data), size, 10.0)
            with pytest.raises(native.OutOfMemory):
                channels.send(1, 1, address(data), size, 0.2)
            endpoint.barrier(10.0)
        else:
            for _ in range(6):
                assert channels.wait(channels.post(0, 0, address(data), size), 10.0) == 0
            endpoint.barrier(10.0)
            endpoint.barrier(10.0)
            with pytest.raises(native.OutOfMemory) as caught:
                channels.wait(channels.post(0, 1, address(data), size), 10.0)
            assert caught.value.args[0]["ranks"] == [0]

    in_ranks(2, work)


def test_refusals() -> None:
    def work(rank: int, endpoint: native.Endpoint) -> None:
        own = np.ones(4, np.float32)
        spans = [(address(own), address(own), 4)]
        for dtype, op, message in (
            ("float8", "sum", "cannot be reduced"),
            ("float32", "median", "is not one of"),
            ("float32", "bit_or", "not defined"),
            ("int32", "premul_sum", "not defined"),
        ):
            with pytest.raises(native.BadInput) as caught:
                endpoint.all_reduce(spans, dtype, op, 1.0, "auto", 0, 1.0)
            assert message in caught.value.args[0]["message"]
        with pytest.raises(native.BadInput):
            endpoint.all_reduce(spans, "float32", "sum", 1.0, "ring", 0, 1.0)
        with pytest.raises(native.BadInput):
            endpoint.broadcast(address(own), 16, 7, "auto", 0, 1.0)
        with pytest.raises(native.BadInput):
            endpoint.all_gather(address(own), [16], [address(own)] * 3, "auto", 0, 1.0)

    in_ranks(2, work)


def test_array_facts() -> None:
    array = np.zeros((3, 4), np.int16)
    assert native.array_facts(array) == (address(array), 12, "int16", 2, True)
    assert native.array_facts(array[:, ::2])[4] is False
    assert native.array_facts(np.zeros((0, 3)))[1:] == (0, "float64", 8, True)
    assert native.array_facts(np.zeros(2, bool))[2] == "bool"
    for bad in (3, "text", [1.0]):
        with pytest.raises(TypeError):
            native.array_facts(bad)
