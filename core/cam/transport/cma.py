"""Cross memory attach: the kernel copies between two processes of one host, for memory that is not shared.

Allowed where ptrace would be: the same user, and neither Yama's ptrace_scope, a seccomp filter nor a container
in between. That is tried out when connecting, on a number that the peer holds, never assumed.
"""

import ctypes
import errno
import functools
import secrets
import time

import msgspec
import numpy as np

from cam.errors import NotReachable
from cam.transport.copying import Copy
from cam.transport.pieces import Batch, Int64s
from cam.transport.protocol import Ended, Home, Limits, Offer, Target
from cam_kernels import Mover

_NUMBER_BYTES = 32


class _Probe(msgspec.Struct, array_like=True):
    address: int
    number: bytes


_decoder = msgspec.msgpack.Decoder(_Probe)


class Cma:
    name = "cma"

    def __init__(self, home: Home) -> None:
        self._mover = home.mover
        self._number = secrets.token_bytes(_NUMBER_BYTES)
        self._held = ctypes.create_string_buffer(self._number, _NUMBER_BYTES)

    def offer(self, request: bytes) -> Offer:
        return Offer(msgspec.msgpack.encode(_Probe(ctypes.addressof(self._held), self._number)))

    def connect(self, target: Target) -> "_Attached":
        if target.pid is None:
            raise NotReachable(f"cma: {target.name} is not on this host, or its process is not visible from here")
        try:
            probe = _decoder.decode(target.ask(b"").blob)
        except msgspec.MsgspecError as error:
            raise NotReachable(f"cma: {target.name} answers in a way not understood: {error}") from None
        channel = _Attached(self._mover, target)
        channel.try_out(probe)
        return channel

    def close(self) -> None:
        """Nothing to give back."""


class _Attached:
    """A process whose memory the kernel lets this one reach."""

    def __init__(self, mover: Mover, target: Target) -> None:
        self._target = target
        self._move = functools.partial(mover.copy_process, target.pid or 0)
        self.reason = f"same host, the kernel lets this process reach the memory of process {target.pid}"

    def try_out(self, probe: _Probe) -> None:
        found = np.zeros(_NUMBER_BYTES, np.uint8)
        batch = Batch(
            np.array([[0, 0, _NUMBER_BYTES, 1, 0, 0]], np.int64),
            np.array([found.ctypes.data], np.int64),
            np.array([probe.address], np.int64),
        )
        outcome = self.prepare(batch, True).run(Limits(time.monotonic_ns() + 10**9))
        name, pid = self._target.name, self._target.pid
        if outcome.ended is not Ended.DONE:
            hint = ""
            if outcome.reason.startswith(errno.errorcode[errno.EPERM]):
                hint = " (another user, Yama's ptrace_scope, or a container without CAP_SYS_PTRACE)"
            raise NotReachable(f"cma: {name}: process {pid} cannot be read: {outcome.reason}{hint}")
        if found.tobytes() != probe.number:
            raise NotReachable(f"cma: {name}: process {pid} is not the one that answers: another pid namespace")

    def addresses(self, theirs: Int64s) -> Int64s:
        return theirs

    def prepare(self, batch: Batch, to_mine: bool) -> Copy:
        return Copy(self._move, batch, to_mine, self._target.lost)

    def close(self) -> None:
        """Nothing to give back."""
