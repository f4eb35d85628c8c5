"""Who takes part: a Group is this process's rank among its peers, their shared memory, and the one way into
the native module.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils.dlpack import from_dlpack

from cam import registry
from cam.config import Config
from cam.deadline import seconds
from cam.errors import CamError, ForkedProcess, GroupAborted, InputError, NotReachable
from cam.native import kernels as native
from cam.native_errors import NATIVE_ERRORS, translate
from cam.peers import Peer
from cam.turns import Turns

if TYPE_CHECKING:  # torch.distributed has it as well, but not for type checkers
    from torch._C._distributed_c10d import ProcessGroup

T = TypeVar("T")

#: The native module's dtypes. Others travel in one of the same size.
_NATIVE_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
_CARRIERS = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}


class Group:
    """Ranks that work together. Made by `cam.init`; a context manager that closes it.

    rank, size: this rank and how many there are. name, config: as configured, with automatic values filled
    in. peers: one Peer per rank, this one included.

    Operations raise the errors of cam.errors. Once one has failed in the middle, ranks may be out of step:
    the group is broken, and every later operation raises GroupAborted with the root cause.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        peers: tuple[Peer, ...],
        arena: "native.Arena",
        endpoint: "native.Endpoint | None",
        unreachable: str,
    ) -> None:
        self.rank, self.size, self.config, self.peers = rank, size, config, peers
        self.name: str = config.name
        #: What cam.init was given: NPUs communicate over it.
        self.process_group: ProcessGroup | None = None
        self._timeout_s = config.timeout_s
        self._arena: native.Arena | None = arena
        self._endpoint = endpoint
        self._unreachable = unreachable
        self._turns = Turns(config.name)
        #: Makes the error of a group that cannot be used any more; None as long as it can.
        self._refusal: Callable[[str], CamError] | None = None
        registry.watch(self)

    # --- operations -----------------------------------------------------------------------------------------

    def barrier(self, timeout: float | timedelta | None = None) -> None:
        """Returns when every rank has called it."""
        self.call("barrier", self.endpoint.barrier, timeout=timeout)

    def exchange(
        self, payloads: Sequence[bytes], *, operation: str, timeout: float | timedelta | None = None
    ) -> list[bytes]:
        """All-to-all of small messages: payloads[r] goes to rank r; returns what each rank sent here, by
        rank.

        operation: names the exchange in errors, and must be the same on all ranks.
        """

        return self.call(operation, self.endpoint.exchange, list(payloads), operation, timeout=timeout)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised window memory: peers reach it without a copy. Freed with its last view.

        Raises OutOfWindowMemory (knob: window_limit).
        """
        arena = self._window("empty")
        name = _NATIVE_DTYPES.get(dtype)
        carrier = name or _CARRIERS.get(dtype.itemsize)
        if carrier is None:
            raise InputError(f"group.empty: {dtype} is not supported ({dtype.itemsize} bytes an element)")
        try:
            memory = arena.empty(tuple(shape), carrier)
        except NATIVE_ERRORS as error:
            raise translate(error, self.name, "empty", self.rank) from None
        tensor: torch.Tensor = from_dlpack(memory)
        return tensor if name else tensor.view(dtype)

    def memory(self) -> dict[str, int]:
        """This rank's window memory in bytes: allocated, peak, resident, limit; and the number of blocks."""
        return dict(self._window("memory").stats())

    def trim(self) -> None:
        """Gives all window memory that is not in use back to the operating system."""
        self._window("trim").trim()

    def close(self) -> None:
        """Leaves the group, after the operations that were submitted. Idempotent.

        Peers that still wait for this rank get PeerLost. Tensors of the window stay valid.
        """
        if self._refusal is None:
            self._turns.close()
            self._leave()

    def abort(self, reason: str) -> None:
        """Breaks the group on purpose, from any thread: operations that wait, here and at the peers, raise
        GroupAborted with this reason.
        """
        endpoint = self._endpoint
        if endpoint is not None:
            endpoint.abort(reason)

    def abandon(self, reason: str) -> None:
        """Aborts if operations are in flight on the progress thread: for a program that ends without waiting for
        them.
        """
        if self._turns.last is not None:
            self.abort(reason)

    @property
    def timeout_s(self) -> float:
        """The deadline of operations that bring none of their own, in seconds."""
        return self._timeout_s

    def set_timeout(self, timeout: float | timedelta) -> None:
        """The deadline of later operations that bring none of their own."""
        self._timeout_s = seconds(timeout, self._timeout_s)

    def _leave(self) -> None:
        with self._turns:
            if self._refusal is not None:  # another thread was faster
                return
            self._refusal = self._closed
            endpoint, self._endpoint, self._arena = self._endpoint, None, None
        if endpoint is not None:
            endpoint.close()
        registry.forget(self.name, self)

    def __enter__(self) -> "Group":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<cam.Group {self.name!r}: rank {self.rank} of {self.size}>"

    # --- for the floors above: ops and jobs -----------------------------------------------------------------

    @property
    def arena(self) -> "native.Arena":
        """The allocator of this rank's window."""
        return self._window("arena")

    @property
    def endpoint(self) -> "native.Endpoint":
        """The native endpoint. Raises NotReachable when some ranks do not share memory."""
        endpoint = self._endpoint  # read once: another thread may close the group
        if endpoint is None:
            raise self._refuse("endpoint")
        return endpoint

    @property
    def turn(self) -> Turns:
        """`with group.turn:` keeps several native calls together; nothing else on this group comes
        between."""
        return self._turns

    def call(self, operation: str, fn: Callable[..., T], *args: Any, timeout: float | timedelta | None = None) -> T:
        """fn(*args, timeout_s=...) in this operation's turn, its native errors translated.

        The deadline starts when the turn comes.
        """
        if self._refusal is not None:
            raise self._refusal(operation)
        timeout_s = self._timeout_s if timeout is None else seconds(timeout, self._timeout_s)
        turns = self._turns
        if turns.last is not None:
            turns.wait()
        with turns.lock:
            if self._refusal is not None:
                raise self._refusal(operation)
            try:
                return fn(*args, timeout_s=timeout_s)
            except NATIVE_ERRORS as error:
                raise translate(error, self.name, operation, self.rank) from None

    def submit(self, fn: Callable[[], T]) -> "Future[T]":
        """Runs fn, which may call this group, on the group's progress thread.

        The order of submission is the order of the operations: a later call on this group from the same
        thread waits until fn is done.
        """
        if self._refusal is not None:
            raise self._refusal("submit")
        try:
            return self._turns.submit(fn)
        except RuntimeError:  # another thread has closed the group just now
            raise self._closed("submit") from None

    # --- why not --------------------------------------------------------------------------------------------

    def _window(self, operation: str) -> "native.Arena":
        arena = self._arena  # read once: another thread may close the group
        if self._refusal is not None or arena is None:
            raise self._refuse(operation)
        return arena

    def check_open(self, operation: str) -> None:
        """Raises GroupAborted or ForkedProcess where this group cannot be used any more.

        For those who refer to it by name, which may be another group's by now.
        """
        if self._refusal is not None:
            raise self._refusal(operation)

    def _refuse(self, operation: str) -> CamError:
        if self._refusal is not None:
            return self._refusal(operation)
        return NotReachable(f"group {self.name!r}, {operation}: {self._unreachable}")

    def _closed(self, operation: str) -> CamError:
        return GroupAborted(f"group {self.name!r}, {operation}: this rank has closed the group")

    def _forked(self, operation: str) -> CamError:
        return ForkedProcess(
            f"group {self.name!r}, {operation}: process {os.getpid()} was forked from the process that made "
            "the group, and its peers do not know it. Start workers with spawn or forkserver, or call "
            "cam.init in the child"
        )

    def leave_to_parent(self) -> None:
        """In a forked child: the group stays the parent's. The lock may be held by a thread that is not
        here."""
        self._refusal = self._forked
        self._turns = Turns(self.name)
