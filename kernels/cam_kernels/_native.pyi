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
