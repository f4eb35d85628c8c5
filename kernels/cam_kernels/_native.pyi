"""The native module. Addresses are integers (0 = none); returned arrays speak DLPack and own their window memory.

Errors carry one dict of fields: message, operation, phase, ranks, waited_s, field, mine, theirs, requested, allocated,
limit.
"""

from typing import Any, Protocol

class Array(Protocol):
    def __dlpack__(self, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class WaitTimeout(Exception): ...
class PeerDied(Exception): ...
class Aborted(Exception): ...
class ParameterMismatch(Exception): ...
class OutOfMemory(Exception): ...
class BadInput(Exception): ...

def isas() -> list[str]:
    """The instruction sets whose row kernels this machine can run, best first."""

def control_bytes(world_size: int) -> int:
    """Bytes at the head of each segment that belong to the native module; the first 64 of them to the caller."""

def row_offset(base: int, row: int, row_bytes: int) -> int:
    """base + row * row_bytes in 64 bits, as the kernels compute it."""

def copy(dst_ptr: int, src_ptr: int, nbytes: int, nontemporal: bool, isa: str = "auto") -> None:
    """One thread's copy, by the row kernel; for measuring the floor."""

def array_facts(array: object) -> tuple[int, int, str, int, bool]:
    """(address, elements, dtype, bytes an element, one run of memory) of a writable CPU array that speaks DLPack or the
    buffer protocol. TypeError for anything else."""

class Arena:
    def __init__(self, fd: int, world_size: int, limit: int, retain: int) -> None:
        """Maps the own segment: a memfd of control_bytes(world_size) + limit bytes."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Raises OutOfMemory, BadInput."""

    def offset_of(self, ptr: int, nbytes: int) -> int:
        """Offset in the segment of memory that lies wholly inside the arena, else -1."""

    def stats(self) -> dict[str, int]: ...
    def trim(self) -> None: ...

class Endpoint:
    def __init__(
        self,
        rank: int,
        arena: Arena,
        peer_fds: list[int],
        peer_pidfds: list[int],
        spin_us: int,
        threads: int,
        isa: str,
        nontemporal_threshold: int,
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    def barrier(self, timeout_s: float) -> None: ...
    def exchange(self, payloads: list[bytes], operation: str, timeout_s: float) -> list[bytes]: ...
    def close(self) -> None: ...
    def abort(self, message: str) -> None:
        """Breaks the group on purpose: waits in any thread, here and at the peers, end with an error that says this."""

    def stats(self) -> dict[str, dict[str, float]]:
        """Per operation: calls, bytes moved by this rank, wait_s (for peers), total_s (in native code)."""

    def ep_dispatch(
        self,
        x: int,
        x_stride: int,
        hidden: int,
        dtype: str,
        scales: int,
        scale_bytes: int,
        topk_idx: int,
        topk_idx_int64: bool,
        tokens: int,
        topk: int,
        topk_weights: int,
        active: int,
        num_experts: int,
        layout: str,
        quant: str,
        alignment: int,
        max_tokens: int,
        timeout_s: float,
    ) -> tuple[Array, Array | None, Array, Array | None, Array | None, Array, Array, Array]:
        """(x, scales, source, topk_idx, topk_weights, expert_counts, source_counts, route)"""

    def ep_combine(
        self,
        y: int,
        rows: int,
        hidden: int,
        dtype: str,
        layout: str,
        route: int,
        tokens: int,
        topk: int,
        weights: int,
        bias: int,
        row_values: int,
        timeout_s: float,
    ) -> tuple[Array, Array | None]:
        """(out, combined row values)"""

    def ep_scatter(
        self,
        x: int,
        x_stride: int,
        hidden: int,
        dtype: str,
        scales: int,
        scale_bytes: int,
        quant: str,
        layout: str,
        route: int,
        tokens: int,
        topk: int,
        rows: int,
        expert_counts: int,
        local_experts: int,
        alignment: int,
        weights: int,
        dot_with: int,
        token_values: int,
        timeout_s: float,
    ) -> tuple[Array, Array | None, Array | None, Array | None]:
        """(x, scales, dots, row values)"""

    def ep_route(self, source: int, rows: int, tokens: int, topk: int, timeout_s: float) -> Array: ...
    def all_reduce(
        self,
        spans: list[tuple[int, int, int]],
        dtype: str,
        reduction: str,
        factor: float,
        algorithm: str,
        piece: int,
        timeout_s: float,
    ) -> None:
        """spans: (input, output, elements) of tensors reduced together. reduction: sum, avg, product, min, max,
        bit_and, bit_or, bit_xor, premul_sum. algorithm: auto, flat, direct. piece: bytes staged at once (0: chosen).
        """

    def reduce(
        self,
        spans: list[tuple[int, int, int]],
        dtype: str,
        reduction: str,
        factor: float,
        root: int,
        algorithm: str,
        piece: int,
        timeout_s: float,
    ) -> None:
        """Outputs are written on the root only."""

    def reduce_scatter(
        self,
        parts: list[int],
        elements: list[int],
        out: int,
        dtype: str,
        reduction: str,
        factor: float,
        algorithm: str,
        piece: int,
        timeout_s: float,
    ) -> None:
        """parts[r], elements[r]: what this rank contributes to the result of rank r."""

    def all_gather(
        self, own: int, nbytes: list[int], outs: list[int], algorithm: str, piece: int, timeout_s: float
    ) -> None:
        """nbytes[r]: what rank r contributes; outs[r]: where that goes here."""

    def gather(
        self, own: int, nbytes: list[int], outs: list[int], root: int, algorithm: str, piece: int, timeout_s: float
    ) -> None: ...
    def broadcast(self, data: int, nbytes: int, root: int, algorithm: str, piece: int, timeout_s: float) -> None: ...
    def all_to_all(
        self,
        ins: list[int],
        in_bytes: list[int],
        outs: list[int],
        out_bytes: list[int],
        algorithm: str,
        piece: int,
        timeout_s: float,
    ) -> None: ...
    def scatter(
        self,
        ins: list[int],
        in_bytes: list[int],
        out: int,
        out_bytes: int,
        root: int,
        algorithm: str,
        piece: int,
        timeout_s: float,
    ) -> None:
        """ins, in_bytes: empty on ranks other than the root."""

class Channels:
    """Messages between two ranks of an endpoint's group. One per endpoint."""

    def __init__(self, endpoint: Endpoint) -> None: ...
    def send(self, to: int, tag: int, data: int, nbytes: int, timeout_s: float) -> None:
        """Complete when it returns. Waits only while the window is full of messages that nobody has received."""

    def post(self, source: int, tag: int, data: int, nbytes: int) -> int:
        """Posts a receive; source -1 = any. Its memory must stay valid until test, wait or forget has ended it."""

    def test(self, receive: int) -> int:
        """The source once the message is here, else -1."""

    def wait(self, receive: int, timeout_s: float) -> int: ...
    def forget(self, receive: int) -> None: ...

class Mapping:
    """A whole shared segment (memfd), mapped for reading and writing until this object goes."""

    def __init__(self, fd: int, nbytes: int) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Mover:
    """Copies tables of pieces between layers here and layers elsewhere, each table with one call.

    table: int64 [count, 6]: my offset, their offset, bytes of a run, runs, my stride, their stride. my_bases,
    their_bases: int64 [layers]: addresses that the offsets count from. cancel: address of a uint32 that another
    thread sets to end the call early, or 0. deadline_ns: of CLOCK_MONOTONIC, or 0.
    Returns (ended, step, errno): ended 0 done, 1 cancelled, 2 late, 3 failed; step: layer * count + piece, the first
    that may not have been done.
    """

    def __init__(self, threads: int, isa: str, nontemporal_threshold: int) -> None: ...
    @property
    def isa(self) -> str: ...
    def copy(
        self,
        table: int,
        count: int,
        my_bases: int,
        their_bases: int,
        layers: int,
        to_mine: bool,
        cancel: int,
        deadline_ns: int,
    ) -> tuple[int, int, int]:
        """Both sides are mapped here."""

    def copy_process(
        self,
        pid: int,
        table: int,
        count: int,
        my_bases: int,
        their_bases: int,
        layers: int,
        to_mine: bool,
        cancel: int,
        deadline_ns: int,
    ) -> tuple[int, int, int]:
        """Their side lies in process pid: process_vm_readv, process_vm_writev."""
