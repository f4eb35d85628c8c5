"""The calling side: one connection to one peer's agent, and whether that peer is alive."""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from typing import TypeVar

import msgspec

from cam import host
from cam.deadline import Deadline
from cam.errors import CamError, NotReachable, PeerLost, Timeout
from cam.kv import messages as m
from cam.kv.wire import BadFrame, Stream

A = TypeVar("A", bound=m.Message)

_CREDENTIALS = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_SO_PEERPIDFD = 77  # of <asm-generic/socket.h>, Linux 6.5


class Refused(CamError):
    """The peer answered with a refusal; the message is its reason."""


class Link:
    """Thread-safe: one question at a time.

    name: of the peer, for messages. pid: in this process's namespace, None on another host. unix: over a Unix
    socket, which passes descriptors. why_not_unix: when it is not.
    """

    def __init__(self, connection: socket.socket, secret: bytes, me: m.Who, expected: str, deadline: Deadline) -> None:
        self.name = expected or "the engine there"
        self._stream = Stream(connection, m.MAX_MESSAGE)
        self.unix = self._stream.unix
        self.why_not_unix = ""
        self._lock = threading.Lock()
        self._lost = ""
        self._unanswered = 0  # answers come in the order of the questions
        self._closed = False
        self.pid: int | None = None
        self._pidfd = -1
        self._life: select.poll | None = None
        try:
            if self.unix:
                self.pid, self._pidfd = _process(connection)
                self._life = select.poll()
                self._life.register(self._pidfd, select.POLLIN)
            self.engine_id = self._greet(secret, me, expected, deadline)
        except BaseException:
            self._close("")
            raise
        self.name = self.engine_id

    def ask(self, message: m.Message, kind: type[A], deadline: Deadline, operation: str) -> A:
        """Sends a question and waits for its answer. Raises Refused, PeerLost, Timeout."""
        return self.ask_with_descriptors(message, kind, deadline, operation)[0]

    def ask_with_descriptors(
        self, message: m.Message, kind: type[A], deadline: Deadline, operation: str
    ) -> tuple[A, tuple[int, ...]]:
        """As `ask`; the descriptors belong to the caller."""
        if not self._lock.acquire(timeout=max(0.001, deadline.left_s)):
            raise self._late(operation, deadline)
        try:
            answer = self._exchange(message, deadline, operation)
            fds = self._stream.take_descriptors()
        finally:
            self._lock.release()
        if isinstance(answer, kind):
            return answer, fds
        for fd in fds:
            os.close(fd)
        if isinstance(answer, m.Refusal):
            raise Refused(answer.reason)
        raise self._broken(operation, f"it answered with {type(answer).__name__}")

    def lost(self) -> str:
        """Why the peer is gone, or "" while it seems to be there. Does not block."""
        if self._lost:
            return self._lost
        if self._closed:
            return "the connection was closed here"
        try:
            if self._life is not None and self._life.poll(0):
                self._lost = f"process {self.pid} has ended"
            elif not self._stream.socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                self._lost = "it closed the connection"
        except (BlockingIOError, InterruptedError):
            return ""
        except (OSError, ValueError) as error:
            self._lost = f"the connection broke: {error}"
        return self._lost

    def close(self) -> None:
        """Says good-bye. Idempotent."""
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._stream.post(m.encode(m.Bye()))
                    self._stream.flush()
                self._close("")

    def abandon(self) -> None:
        """Closes the descriptors without a word: a forked child's copy."""
        self._close("")

    def _greet(self, secret: bytes, me: m.Who, expected: str, deadline: Deadline) -> str:
        hello = m.Hello(m.VERSION, me, expected, secrets.token_bytes(m.NUMBER_BYTES))
        challenge = self._exchange(hello, deadline, "open")
        if isinstance(challenge, m.Refusal):
            raise NotReachable(f"{self.name} refuses: {challenge.reason}")
        if not isinstance(challenge, m.Challenge) or challenge.version != m.VERSION:
            raise NotReachable(f"{self.name}: what listens there speaks another protocol")
        if expected and challenge.engine_id != expected:
            raise NotReachable(
                f"engine {expected} is gone: engine {challenge.engine_id} listens at its address now (a restart?)"
            )
        proof = m.proof(secret, b"host", hello, challenge.engine_id, challenge.number)
        if not hmac.compare_digest(challenge.proof, proof):
            raise NotReachable(f"{self.name} does not know the secret")
        proof = m.proof(secret, b"caller", hello, challenge.engine_id, challenge.number)
        answer = self._exchange(m.Proof(proof), deadline, "open")
        if not isinstance(answer, m.Welcome):
            reason = answer.reason if isinstance(answer, m.Refusal) else type(answer).__name__
            raise NotReachable(f"{self.name} refuses: {reason}")
        return challenge.engine_id

    def _exchange(self, message: m.Message, deadline: Deadline, operation: str) -> m.FromHost:
        stream = self._stream
        if self._closed or self._lost:
            raise self._broken(operation, self._lost or "the connection was closed here")
        try:
            stream.post(m.encode(message))
            self._unanswered += 1
            while not stream.flush():
                self._wait(select.POLLOUT, deadline, operation)
            while True:
                data = stream.message()
                if data is not None:
                    answer = m.decode_from_host(data)
                    self._unanswered -= 1
                    if not self._unanswered:
                        return answer
                    self._discard(answer)
                    continue
                self._wait(select.POLLIN, deadline, operation)
                if not stream.receive() and not stream.complete:
                    raise self._broken(operation, "it closed the connection")
        except CamError:  # before OSError: Timeout is both
            raise
        except (OSError, BadFrame, msgspec.MsgspecError) as error:
            raise self._broken(operation, f"the connection broke: {error}") from error

    def _discard(self, answer: m.FromHost) -> None:
        """To a question that somebody stopped waiting for."""
        if isinstance(answer, m.OfferAnswer):
            for fd in self._stream.take_descriptors(answer.fds):
                os.close(fd)

    def _wait(self, event: int, deadline: Deadline, operation: str) -> None:
        poll = select.poll()
        poll.register(self._stream.socket, event)
        if self._pidfd >= 0:
            poll.register(self._pidfd, select.POLLIN)
        ready = poll.poll(max(1.0, deadline.left_s * 1000))
        if not ready:
            raise self._late(operation, deadline)
        if all(fd == self._pidfd for fd, _ in ready):
            raise self._broken(operation, f"process {self.pid} has ended")

    def _late(self, operation: str, deadline: Deadline) -> Timeout:
        return Timeout(
            f"{operation}: {self.name} did not answer within {deadline.waited_s:.3g} s",
            operation=operation,
            phase="answer",
            waited_s=deadline.waited_s,
        )

    def _broken(self, operation: str, why: str) -> PeerLost:
        self._lost = self._lost or why
        return PeerLost(f"{operation}: {self.name} is lost: {why}", operation=operation, phase="answer")

    def _close(self, why: str) -> None:
        self._closed = True
        self._lost = self._lost or why
        self._stream.close()
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


def connect(description: m.Description, secret: bytes, me: m.Who, deadline: Deadline) -> Link:
    """To the engine of a description: over its Unix socket where that works, else over TCP. Raises NotReachable,
    Timeout, PeerLost."""
    expected, name = description.who.engine_id, description.who.name
    if description.boot_id == host.boot_id():
        call = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            call.settimeout(max(0.001, deadline.left_s))
            call.connect(description.socket)
            return Link(call, secret, me, expected, deadline)
        except CamError:  # before OSError: Timeout is both
            call.close()
            raise
        except OSError as error:
            call.close()
            why = f"its Unix socket cannot be reached (another network namespace, or it has ended): {error}"
    else:
        why = "it is on another host"
    if not description.host:
        raise NotReachable(f"{name} ({expected}): {why}, and it listens on no TCP address")
    try:
        link = connect_tcp(description.host, description.port, secret, me, expected, deadline)
    except NotReachable as error:
        raise NotReachable(f"{name} ({expected}): {why}; {error}") from error
    link.why_not_unix = why
    return link


def connect_tcp(address: str, port: int, secret: bytes, me: m.Who, expected: str, deadline: Deadline) -> Link:
    """Raises NotReachable, Timeout, PeerLost."""
    try:
        call = socket.create_connection((address, port), timeout=max(0.001, deadline.left_s))
    except OSError as error:
        raise NotReachable(f"nobody can be reached at {address} port {port}: {error}") from None
    try:
        return Link(call, secret, me, expected, deadline)
    except BaseException:
        call.close()
        raise


def _process(connection: socket.socket) -> tuple[int | None, int]:
    """The process at the other end: (pid in this namespace or None, pidfd)."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise NotReachable(f"it runs as user {uid}, this engine as user {os.geteuid()}")
    try:
        return (pid or None), connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # before Linux 6.5, or the peer has ended
        if pid <= 0:
            raise NotReachable("its process is not visible from here (another pid namespace)") from None
        try:
            return pid, os.pidfd_open(pid)
        except OSError as error:
            raise NotReachable(f"its process {pid} has ended: {error}") from None
