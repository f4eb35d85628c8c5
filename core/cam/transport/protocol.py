"""The contract of a transport.

Two processes, each with a Home: the memory that it lets others reach. One of them wants to move bytes:

    owner                                         the one who moves
    offer(request) -> Offer                <--    connect(target) asks for the owner's Offer and gives a Channel
                                                  channel.addresses(...)   what to put into a Batch
                                                  channel.prepare(batch, to_mine) -> Ready
                                                  ready.run(limits) -> Outcome    as often as wanted

A transfer is one-sided: the owner does nothing while it happens. `run` blocks its thread with the interpreter
lock released, and ends soon after its limits say so; when it has returned, nothing touches the memory any more.
Everything that `connect` cannot do is NotReachable, with the reason; a transport never falls back to another.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from cam.transport.pieces import Batch, Int64s
from cam_kernels import Mover


@dataclass(frozen=True)
class Range:
    """Bytes of a process's memory, by their address in that process."""

    address: int
    nbytes: int


@dataclass(frozen=True)
class Shared:
    """A segment of shared memory (memfd) and where its owner maps it. nonce: its first bytes, by which a peer
    finds out that it maps the same memory."""

    fd: int
    address: int
    nbytes: int
    nonce: bytes


@dataclass(frozen=True)
class Settings:
    """What transports of other libraries can be told.

    nixl_backends: plugins of NIXL. mooncake_protocol, mooncake_device: as Mooncake's TransferEngine takes them
    ("tcp"; "rdma" with device names; "ascend" where Mooncake was built for it). advertise: the address of this
    host under which peers reach what Mooncake listens on.
    """

    nixl_backends: tuple[str, ...] = ("UCX",)
    mooncake_protocol: str = "tcp"
    mooncake_device: str = ""
    advertise: str = "127.0.0.1"


@dataclass(frozen=True)
class Home:
    """The memory that a process lets others reach. name: unique among all processes that may meet. mover: the threads
    that copy, for all transports of this process."""

    name: str
    ranges: Sequence[Range]
    shared: Sequence[Shared]
    settings: Settings
    mover: Mover


@dataclass(frozen=True)
class Offer:
    """What a peer needs to reach the owner's memory. fds: the receiver owns its copies."""

    blob: bytes
    fds: tuple[int, ...] = ()


@dataclass(frozen=True)
class Target:
    """The process at the other end, as the connection to it shows it.

    pid: in this process's namespace, vouched for by the kernel; None when it is not on this host. ranges: what
    will be moved, so that `connect` can refuse early. ask: gets the owner's Offer for a request of the
    transport's own making. lost: why the process is gone, or "" while it is there; must not block.
    """

    name: str
    pid: int | None
    passes_fds: bool
    ranges: Sequence[Range]
    ask: Callable[[bytes], Offer]
    lost: Callable[[], str]


class Ended(Enum):
    DONE = "done"
    CANCELLED = "cancelled"
    LATE = "late"
    LOST = "lost"
    FAILED = "failed"


@dataclass(frozen=True)
class Outcome:
    """How a run ended. step: those before it are done, of the others nothing is known."""

    ended: Ended
    step: int = 0
    reason: str = ""


@dataclass(slots=True)
class Limits:
    """What ends a run early. flag: another thread sets it to cancel. deadline_ns: of time.monotonic_ns()."""

    deadline_ns: int
    flag: ctypes.c_uint32 = field(default_factory=ctypes.c_uint32)

    def cancel(self) -> None:
        self.flag.value = 1

    def is_cancelled(self) -> bool:
        return self.flag.value != 0


class Ready(Protocol):
    """A prepared transfer."""

    def run(self, limits: Limits) -> Outcome: ...

    def close(self) -> None: ...


class Channel(Protocol):
    """A way to one peer's memory. reason: what was proven when it was made."""

    reason: str

    def addresses(self, theirs: Int64s) -> Int64s:
        """The owner's addresses as a Batch must give them."""
        ...

    def prepare(self, batch: Batch, to_mine: bool) -> Ready:
        """to_mine: read, else write."""
        ...

    def close(self) -> None:
        """Idempotent. No run may be in progress."""
        ...


class Transport(Protocol):
    """One way of moving bytes, in one process. Made by the registry from a Home."""

    name: str

    def offer(self, request: bytes) -> Offer:
        """The owner's side. May be slow the first time. Raises NotReachable, BackendUnavailable."""
        ...

    def connect(self, target: Target) -> Channel:
        """Raises NotReachable, BackendUnavailable."""
        ...

    def close(self) -> None:
        """Idempotent. Its channels are closed."""
        ...
