"""The native collectives alone, at world size 1 and without torch: every instruction set gives the golden's bits.

Numbers are compared as bits: results must not depend on the machine. This is what `make sanitize` runs.
"""

import gc
import os
import select
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cam_kernels as native

ISAS = native.isas()
HIDDENS = (1, 7, 16, 64, 96, 100, 129, 512, 1000)


def endpoint(isa: str, threads: int = 1, nontemporal_threshold: int = 1 << 60) -> tuple[native.Endpoint, native.Arena]:
    limit = 64 << 20
    fd = os.memfd_create("native-test")
    try:
        os.ftruncate(fd, native.control_bytes(1) + limit)
        arena = native.Arena(fd, 1, limit, limit)
    finally:
        os.close(fd)
    return native.Endpoint(0, arena, [-1], [-1], 10, threads, isa, nontemporal_threshold), arena


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """fp32 -> bf16 bits, to nearest even."""
    raw = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((raw + 0x7FFF + ((raw >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((raw >> 16) | 0x40).astype(np.uint16), rounded)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def awkward(rows: int, hidden: int, seed: int) -> np.ndarray:
    """fp32 values of all magnitudes, denormals and zeros among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, hidden)) * 10.0 ** random.integers(-42, 30, (rows, hidden))
    values[random.random((rows, hidden)) < 0.1] = 0
    return values.astype(np.float32)


class Rows:
    """A batch in one of the kernels' dtypes, and what its bits mean in fp32."""

    def __init__(self, dtype: str, values: np.ndarray) -> None:
        self.dtype = dtype
        match dtype:
            case "bfloat16":
                self.memory = bf16_bits(values)
                self.values = from_bf16_bits(self.memory)
            case "float16":
                self.memory = np.clip(values, -60000, 60000).astype(np.float16)
                self.values = self.memory.astype(np.float32)
            case _:
                self.memory = values
                self.values = values

    def rounded(self, sums: np.ndarray) -> np.ndarray:
        match self.dtype:
            case "bfloat16":
                return bf16_bits(sums)
            case "float16":
                return sums.astype(np.float16)
        return sums

    def received(self, array: Any) -> np.ndarray:
        if self.dtype == "bfloat16":  # NumPy has no bf16: read the memory as what it is
            import torch

            return torch.from_dlpack(array).view(torch.int16).numpy().view(np.uint16)
        return np.from_dlpack(array)


def dispatch(
    end: native.Endpoint, rows: Rows, idx: np.ndarray, weights: np.ndarray, quant: str = "none"
) -> tuple[Any, ...]:
    tokens, topk = idx.shape
    hidden = rows.memory.shape[1]
    return end.ep_dispatch(
        rows.memory.ctypes.data, rows.memory.strides[0], hidden, rows.dtype, 0, 0, idx.ctypes.data, True, tokens, topk,
        weights.ctypes.data, 0, 5, "expert", quant, 1, -1, 5.0,
    )  # fmt: skip


def combine(end: native.Endpoint, y: np.ndarray, dtype: str, route: np.ndarray, weights: np.ndarray) -> Any:
    return end.ep_combine(
        y.ctypes.data, y.shape[0], y.shape[1], dtype, "expert", route.ctypes.data, *route.shape, weights.ctypes.data, 0,
        0, 5.0,
    )[0]  # fmt: skip


def routing(tokens: int, topk: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    idx = random.integers(-1, 5, (tokens, topk))
    return idx, random.standard_normal((tokens, topk)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("nontemporal", [False, True], ids=["cached", "nontemporal"])
def test_dispatch_and_combine_have_the_goldens_bits(isa: str, dtype: str, nontemporal: bool) -> None:
    end, _ = endpoint(isa, nontemporal_threshold=0 if nontemporal else 1 << 60)
    for hidden in HIDDENS:
        rows = Rows(dtype, awkward(6, hidden, hidden))
        idx, weights = routing(6, 3, hidden)
        x, _, source, _, row_weights, counts, _, route = dispatch(end, rows, idx, weights)
        order = [(t, k) for e in range(5) for t in range(6) for k in range(3) if idx[t, k] == e]
        assert [tuple(row) for row in np.from_dlpack(source)[:, 1:].tolist()] == order
        received = rows.received(x)
        assert (received == rows.memory[[t for t, _ in order]]).all()
        assert np.from_dlpack(row_weights).tolist() == [weights[at] for at in order]
        assert np.from_dlpack(counts).tolist() == [(idx == e).sum() for e in range(5)]

        y = Rows(dtype, awkward(len(order), hidden, hidden + 1))
        place = {at: row for row, at in enumerate(order)}
        sums = np.zeros((6, hidden), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for t in range(6):
                for k in range(3):
                    if (t, k) in place:
                        sums[t] = sums[t] + weights[t, k] * y.values[place[t, k]]
            want = y.rounded(sums)
        out = y.received(combine(end, y.memory, dtype, np.from_dlpack(route), weights))
        nan = np.isnan(sums)
        assert (out[~nan].view(np.uint8) == want[~nan].view(np.uint8)).all(), f"hidden {hidden}"


@pytest.mark.parametrize("isa", ISAS)
def test_int8_is_the_published_formula(isa: str) -> None:
    end, _ = endpoint(isa)
    for hidden in HIDDENS:
        rows = Rows("float32", awkward(4, hidden, hidden).clip(-1e30, 1e30))
        rows.memory[1] = 0
        idx, weights = np.zeros((4, 1), np.int64), np.ones((4, 1), np.float32)
        q, scales, *_ = dispatch(end, rows, idx, weights, "int8")
        want_scales = (np.abs(rows.memory).max(1) / np.float32(127)).astype(np.float32)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            want = np.nan_to_num(np.rint(rows.memory / want_scales[:, None]), nan=0).clip(-127, 127).astype(np.int8)
        assert (np.from_dlpack(scales) == want_scales).all()
        assert (np.from_dlpack(q) == want).all(), f"hidden {hidden}"


@pytest.mark.parametrize("quant", ["int8", "fp8"])
def test_every_instruction_set_quantises_alike(quant: str) -> None:
    for hidden in HIDDENS:
        rows = Rows("bfloat16", awkward(5, hidden, hidden))
        idx, weights = np.zeros((5, 1), np.int64), np.ones((5, 1), np.float32)
        seen = []
        for isa in ISAS:
            end, _ = endpoint(isa)
            q, scales, *_ = dispatch(end, rows, idx, weights, quant)
            seen.append((np.from_dlpack(q).copy(), np.from_dlpack(scales).copy()))
        for q, scales in seen[1:]:
            assert (q == seen[0][0]).all()
            assert (scales == seen[0][1]).all()


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_is_not_lost_in_quantisation(isa: str, quant: str) -> None:
    end, _ = endpoint(isa)
    rows = Rows("float32", np.ones((1, 200), np.float32))
    rows.memory[0, 3] = np.nan
    _, scales, *_ = dispatch(end, rows, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32), quant)
    assert np.isnan(np.from_dlpack(scales).flat[0])


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    rows = Rows("bfloat16", awkward(300, 130, 1))
    idx, weights = routing(300, 4, 2)
    outs = []
    for threads in (1, 2, 5):
        end, _ = endpoint("auto", threads)
        x, *_, route = dispatch(end, rows, idx, weights)
        y = rows.received(x).copy()
        outs.append((y, rows.received(combine(end, y, "bfloat16", np.from_dlpack(route), weights)).copy()))
    for y, out in outs[1:]:
        assert (y == outs[0][0]).all()
        assert (out == outs[0][1]).all()


def test_offsets_are_computed_in_64_bits() -> None:
    """DeepEP and sgl-kernel-npu#723 overflowed 32 bits (field bug 13)."""
    rows, row_bytes = 3_000_000, 7168 * 2
    assert rows * row_bytes > 1 << 32
    assert native.row_offset(4096, rows, row_bytes) == 4096 + rows * row_bytes


@pytest.mark.parametrize(("bad", "words"), [(5, "0..4"), (-2, "num_experts"), (1 << 40, "topk_idx")])
def test_an_expert_out_of_range_is_refused_and_harmless(bad: int, words: str) -> None:
    end, _ = endpoint("auto")
    rows = Rows("float32", np.ones((2, 8), np.float32))
    idx, weights = np.array([[0], [bad]]), np.ones((2, 1), np.float32)
    with pytest.raises(native.BadInput) as caught:
        dispatch(end, rows, idx, weights)
    assert words in caught.value.args[0]["message"]
    idx[1] = 4
    dispatch(end, rows, idx, weights)


def test_a_route_of_another_dispatch_is_refused() -> None:
    end, _ = endpoint("auto")
    y, weights = np.ones((3, 8), np.float32), np.ones((2, 1), np.float32)
    with pytest.raises(native.BadInput, match="row 3 of rank 0"):
        combine(end, y, "float32", np.array([[0], [3]]), weights)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(native.BadInput, match="portable"):
        endpoint("sse9")


def test_a_closed_endpoint_refuses() -> None:
    end, _ = endpoint("auto")
    end.close()
    with pytest.raises(native.Aborted):
        end.barrier(1.0)


def test_a_forked_child_can_drop_an_endpoint_with_threads() -> None:
    """The child has none of the threads; ending must not wait for them."""
    end, _ = endpoint("auto", threads=3)
    pid = os.fork()
    if pid == 0:
        del end
        gc.collect()
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    try:
        assert select.select([pidfd], [], [], 20)[0], "the child hangs"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    end.barrier(1.0)


def test_an_object_that_lives_to_the_end_is_no_leak() -> None:
    program = """
import ctypes, os
import cam_kernels as native
fd = os.memfd_create("kept")
os.ftruncate(fd, native.control_bytes(1) + (1 << 20))
ctypes.pythonapi.Py_IncRef(ctypes.py_object(native.Arena(fd, 1, 1 << 20, 0)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
