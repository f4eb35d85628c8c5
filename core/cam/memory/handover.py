"""Handing segments over between the processes of one host.

Each rank listens on an abstract Unix socket, whose name the kernel chooses and the rendezvous spreads. For
each pair of ranks the higher calls the lower:

    knock      the higher connects; that works although nobody accepts yet, so no order of ranks can deadlock.
               What cannot be reached (another network namespace, another user) is found out here, and the
               ranks tell each other over the rendezvous, so that nobody waits for somebody who cannot come.
    exchange   caller -> host    its rank, a random number
               host -> caller    a random number, and the proof that it knows the secret
               caller -> host    the proof that it knows the secret, its descriptor
               host -> caller    its descriptor

The secret is known to the ranks of this rendezvous only. The kernel vouches for the other side's user. All
connections are served at once: one that stays silent, or talks nonsense, is ignored and holds nobody up.
"""

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cam.deadline import Deadline
from cam.errors import Timeout

SECRET_BYTES = 32

_NUMBER_BYTES = 32
_PROOF_BYTES = 32
_CALL = struct.Struct(f"=8sI{_NUMBER_BYTES}s")
_MAGIC = b"cam-call"
_DONE = b"cam-done"
_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD = 77  # of <asm-generic/socket.h>, Linux 6.5


@dataclass(frozen=True, slots=True)
class Handed:
    """What a peer handed over. fd: its segment; pidfd: readable once its process has ended; pid: as seen
    here.

    Both descriptors belong to the receiver.
    """

    fd: int
    pidfd: int
    pid: int

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.pidfd)


class Refused(Exception):
    """The other side cannot, or must not, be dealt with. The message says why."""


class Handover:
    """One rank's side. Use: publish `address`; knock; tell the others; exchange; close."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(b"")  # the kernel picks a free abstract name
            self._listener.listen(4096)
            self._listener.setblocking(False)
        except BaseException:
            self._listener.close()
            raise
        self.address: bytes = self._listener.getsockname()

    def knock(self, lower: Mapping[int, bytes], deadline: Deadline) -> dict[int, str]:
        """Calls the ranks below this one at their addresses. Returns {rank: why it cannot be reached}."""
        refusals: dict[int, str] = {}
        for rank, address in lower.items():
            call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                call.setblocking(False)
                _connect(call, address, deadline)
                _check_user(call)
            except (OSError, Refused) as error:
                call.close()
                refusals[rank] = f"its socket cannot be reached: {error}"
            else:
                self._calls[rank] = call
        return refusals

    def exchange(
        self, fd: int, secret: bytes, higher: Collection[int], deadline: Deadline
    ) -> tuple[dict[int, Handed], dict[int, str]]:
        """Swaps descriptors with every rank that was reached and with the `higher` ranks that reached this
        one.

        Returns what was handed over, and {rank: why nothing was}. Raises Timeout naming the ranks that are
        late.
        """
        handed: dict[int, Handed] = {}
        refusals: dict[int, str] = {}
        pending = {*higher, *self._calls}
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as strangers:
            try:
                selector.register(self._listener, selectors.EVENT_READ)
                for rank, call in self._calls.items():
                    side: _Side = _Caller(call, self._rank, rank, fd, secret)
                    selector.register(call, selectors.EVENT_READ, side)
                while pending:
                    events = selector.select(deadline.left_s)
                    if not events and deadline.passed:
                        raise _late(sorted(pending), deadline.waited_s)
                    for key, _ in events:
                        if key.fileobj is self._listener:
                            for visitor in self._accept():
                                strangers.callback(visitor.close)
                                side = _Host(visitor, self._rank, pending, fd, secret)
                                selector.register(visitor, selectors.EVENT_READ, side)
                            continue
                        side = key.data
                        try:
                            result = side.step()
                        except (OSError, Refused) as error:
                            selector.unregister(key.fileobj)
                            side.connection.close()
                            if isinstance(side, _Caller):  # a visitor's claim to be a rank is not proven yet
                                refusals[side.peer] = f"the exchange of segments failed: {error}"
                                pending.discard(side.peer)
                            continue
                        if result is not None:
                            selector.unregister(key.fileobj)
                            handed[side.peer] = result
                            pending.discard(side.peer)
            except BaseException:
                for each in handed.values():
                    each.close()
                raise
        return handed, refusals

    def close(self) -> None:
        """Idempotent."""
        self._listener.close()
        for call in self._calls.values():
            call.close()

    def _accept(self) -> list[socket.socket]:
        visitors = []
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                visitor, _ = self._listener.accept()
                visitor.setblocking(False)
                try:
                    _check_user(visitor)
                except Refused:
                    visitor.close()
                else:
                    visitors.append(visitor)
        return visitors


class _Side(ABC):
    """One connection's half of the protocol: step() is called when a message can be read."""

    def __init__(self, connection: socket.socket, fd: int, secret: bytes) -> None:
        self.connection, self.peer = connection, -1
        self._fd, self._secret = fd, secret
        self._number = secrets.token_bytes(_NUMBER_BYTES)

    @abstractmethod
    def step(self) -> Handed | None: ...

    def _proof(self, role: bytes, caller: int, host: int, caller_number: bytes, host_number: bytes) -> bytes:
        text = role + struct.pack("=II", caller, host) + caller_number + host_number
        return hmac.digest(self._secret, text, "sha256")

    def _receive(self, length: int) -> bytes:
        message = self.connection.recv(length + 1)  # what does not fit, and any descriptor, is dropped
        if len(message) != length:
            raise Refused("closed by the peer" if not message else "a message of a wrong length")
        return message

    def _receive_descriptor(self, length: int) -> tuple[bytes, int]:
        flags = socket.MSG_CMSG_CLOEXEC
        message, descriptors, _, _ = socket.recv_fds(self.connection, length + 1, 1, flags)
        if len(message) != length or len(descriptors) != 1:
            for descriptor in descriptors:
                os.close(descriptor)
            raise Refused("closed by the peer" if not message else "not the expected message and descriptor")
        return message, descriptors[0]

    def _handed(self, descriptor: int) -> Handed:
        try:
            pid, pidfd = _process(self.connection)
        except BaseException:
            os.close(descriptor)
            raise
        return Handed(descriptor, pidfd, pid)


class _Caller(_Side):
    """The side of the higher rank."""

    def __init__(self, call: socket.socket, rank: int, peer: int, fd: int, secret: bytes) -> None:
        super().__init__(call, fd, secret)
        self._rank, self.peer = rank, peer
        self._proven = False
        with contextlib.suppress(OSError):  # a peer that is gone shows up when its answer is read
            call.send(_CALL.pack(_MAGIC, rank, self._number))

    def step(self) -> Handed | None:
        if self._proven:
            message, descriptor = self._receive_descriptor(len(_DONE))
            if message != _DONE:
                os.close(descriptor)
                raise Refused("not the expected message")
            return self._handed(descriptor)
        answer = self._receive(_NUMBER_BYTES + _PROOF_BYTES)
        theirs, proof = answer[:_NUMBER_BYTES], answer[_NUMBER_BYTES:]
        if not hmac.compare_digest(proof, self._proof(b"host", self._rank, self.peer, self._number, theirs)):
            raise Refused("it does not know this rendezvous's secret")
        proof = self._proof(b"caller", self._rank, self.peer, self._number, theirs)
        socket.send_fds(self.connection, [proof], [self._fd])
        self._proven = True
        return None


class _Host(_Side):
    """The side of the lower rank: towards whoever connects."""

    def __init__(self, visitor: socket.socket, rank: int, expected: Collection[int], fd: int, secret: bytes) -> None:
        super().__init__(visitor, fd, secret)
        self._rank, self._expected = rank, expected
        self._theirs = b""

    def step(self) -> Handed | None:
        if not self._theirs:
            magic, caller, number = _CALL.unpack(self._receive(_CALL.size))
            if magic != _MAGIC or caller not in self._expected:
                raise Refused("a stranger")
            self.peer, self._theirs = caller, number
            proof = self._proof(b"host", caller, self._rank, number, self._number)
            self.connection.send(self._number + proof)
            return None
        proof, descriptor = self._receive_descriptor(_PROOF_BYTES)
        expected = self._proof(b"caller", self.peer, self._rank, self._theirs, self._number)
        if not hmac.compare_digest(proof, expected) or self.peer not in self._expected:
            os.close(descriptor)
            raise Refused("a stranger")
        handed = self._handed(descriptor)
        try:
            socket.send_fds(self.connection, [_DONE], [self._fd])
        except BaseException:
            handed.close()
            raise
        return handed


def _connect(call: socket.socket, address: bytes, deadline: Deadline) -> None:
    while True:
        try:
            call.connect(address)
            return
        except BlockingIOError:  # the queue of the listener is full: somebody floods it
            if deadline.passed:
                raise Refused("its queue of connections stays full") from None
            time.sleep(0.001)
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                raise Refused("nobody listens there (another network namespace, or it has ended)") from None
            raise


def _check_user(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise Refused(f"it runs as user {uid}, this rank as user {os.geteuid()}")


def _process(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end: (pid in this namespace, pidfd)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(raw)
    try:
        return pid, connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5
        if pid <= 0:
            raise Refused("its process is not visible from here (another pid namespace)") from None
        # Between the two calls the pid could only be reused if the peer died in the middle of the exchange,
        # which then fails.
        return pid, os.pidfd_open(pid)


def _late(ranks: list[int], waited_s: float) -> Timeout:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return Timeout(
        f"init (handover): {who} did not hand over memory within {waited_s:.1f} s",
        operation="init",
        phase="handover",
        ranks=ranks,
        waited_s=waited_s,
    )
