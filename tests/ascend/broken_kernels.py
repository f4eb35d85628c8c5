"""Kernels with one mistake each, which the checks must find. Nobody runs these."""

import triton
import triton.language as tl

from cam_kernels.ascend.hivm_check import Expectation
from cam_kernels.ascend.kernel import Kernel
from cam_kernels.ascend.kernels.combine import SUM_RESULTS
from cam_kernels.ascend.tiling import block


@triton.jit
def sound(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    """The pattern the others break."""
    h = tl.arange(0, H)
    for peer in range(W):
        there = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + h, tl.load(x_ptr + h))
        tl.debug_barrier()
        flag = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flag + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def no_barrier(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    h = tl.arange(0, H)
    for peer in range(W):
        there = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + h, tl.load(x_ptr + h))
        flag = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flag + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def barrier_before_payload(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    """Barrier and flag are there, in the wrong place: the payload of the round before is still pending."""
    h = tl.arange(0, H)
    for peer in range(W):
        there = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32))
        flag = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()
        tl.store(there + h, tl.load(x_ptr + h))
        tl.store(flag + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def barrier_on_one_path(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    h = tl.arange(0, H)
    for peer in range(W):
        there = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + h, tl.load(x_ptr + h))
        if peer > 0:
            tl.debug_barrier()
        flag = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flag + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def barrier_in_a_loop_that_may_not_run(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    h = tl.arange(0, H)
    there = tl.load(peers_ptr).to(tl.pointer_type(tl.int32))
    tl.store(there + h, tl.load(x_ptr + h))
    for peer in range(W):
        tl.debug_barrier()
        tl.store(x_ptr + (peer + 1) * H + h, tl.load(x_ptr + h))
    flag = tl.load(flag_peers_ptr).to(tl.pointer_type(tl.int32))
    tl.store(flag + tl.arange(0, 8), tl.full([8], 0, tl.int32) + epoch)


@triton.jit
def narrow_flag(x_ptr, peers_ptr, flag_peers_ptr, W, epoch, H: tl.constexpr):
    h = tl.arange(0, H)
    for peer in range(W):
        there = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(there + h, tl.load(x_ptr + h))
        tl.debug_barrier()
        flag = tl.load(flag_peers_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.store(flag + tl.arange(0, 4), tl.full([4], 0, tl.int32) + epoch)


@triton.jit
def scalar_polling(flag_ptr, out_ptr, epoch):
    seen = tl.load(flag_ptr, volatile=True)
    while seen < epoch:
        tl.debug_barrier()
        seen = tl.load(flag_ptr, volatile=True)
    tl.store(out_ptr + tl.arange(0, 8), tl.full([8], 0, tl.int32) + seen)


@triton.jit
def polling_without_barrier(flag_ptr, out_ptr, epoch):
    """The compiler sees a loop without effect and deletes it: the kernel does not wait at all."""
    lane = tl.arange(0, 8)
    pending = tl.sum((tl.load(flag_ptr + lane) < epoch).to(tl.int32), axis=0)
    while pending > 0:
        pending = tl.sum((tl.load(flag_ptr + lane) < epoch).to(tl.int32), axis=0)
    tl.store(out_ptr + lane, lane)


@triton.jit
def scattered(index_ptr, out_ptr, value, N: tl.constexpr):
    """Places that are only known one by one."""
    index = tl.load(index_ptr + tl.arange(0, N))
    tl.store(out_ptr + index, tl.full([N], 0, tl.int32) + value)


@triton.jit
def integer_division(x_ptr, out_ptr, divisor, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n) // divisor)


@triton.jit
def too_large(x_ptr, out_ptr, H: tl.constexpr):
    h = tl.arange(0, H)
    x = tl.load(x_ptr + h)
    y = tl.load(x_ptr + H + h)
    tl.store(out_ptr + h, tl.exp(x) * y + tl.sqrt(tl.abs(y)))


_SEND = {"x_ptr": "*i32", "peers_ptr": "*i64", "flag_peers_ptr": "*i64", "W": "i32", "epoch": "i32"}
_POLL = {"flag_ptr": "*i32", "out_ptr": "*i32", "epoch": "i32"}

SOUND = Kernel(sound).variant(_SEND, {"H": 256})

_SENDER, _WAITER, _OTHER = Expectation(sends=True, flags=True), Expectation(waits=True), Expectation()

_CRAMPED = SUM_RESULTS.variant(
    {
        "slots_ptr": "*bf16", "flags_ptr": "*i32", "position_ptr": "*i32", "weight_ptr": "*fp32", "bias_ptr": "*bf16",
        "out_ptr": "*bf16", "done_ptr": "*i32", "T": "i32", "K": "i32", "H": "i32", "epoch": "i32", "polls": "i32",
    },
    {"BH": 2 * block("sum_results", 8192), "KP": 16, "WEIGHTED": True, "BIASED": True},
)  # fmt: skip

#: The rule that must fail, the variant that breaks it, and what the kernel says it does.
BROKEN = [
    *(
        ("barrier", Kernel(fn).variant(_SEND, {"H": 256}), _SENDER)
        for fn in (no_barrier, barrier_before_payload, barrier_on_one_path, barrier_in_a_loop_that_may_not_run)
    ),
    ("flag-width", Kernel(narrow_flag).variant(_SEND, {"H": 256}), _SENDER),
    ("polling", Kernel(scalar_polling).variant(_POLL, {}), _WAITER),
    ("missing", Kernel(polling_without_barrier).variant(_POLL, {}), _WAITER),
    (
        "element-wise",
        Kernel(scattered).variant({"index_ptr": "*i32", "out_ptr": "*i32", "value": "i32"}, {"N": 64}),
        _OTHER,
    ),
    (
        "integer-division",
        Kernel(integer_division).variant({"x_ptr": "*i32", "out_ptr": "*i32", "divisor": "i32"}, {"N": 64}),
        _OTHER,
    ),
    # A sound kernel with a block constant of twice what tiling.block() allows.
    ("ub", _CRAMPED, _WAITER),
]

TOO_LARGE = Kernel(too_large).variant({"x_ptr": "*fp32", "out_ptr": "*fp32"}, {"H": 65536})
