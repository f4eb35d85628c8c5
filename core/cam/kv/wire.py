"""Messages as bytes on a stream: a length, then the message; descriptors ride on Unix sockets beside it."""

import contextlib
import os
import socket
import struct
from collections import deque

LENGTH = struct.Struct("<I")

#: Descriptors of one message: the kernel takes 253.
MAX_DESCRIPTORS = 64
_READ = 1 << 18


class BadFrame(Exception):
    """The other side does not keep to the format."""


class Stream:
    """One end of a connection, non-blocking: what came in, what still has to go out."""

    __slots__ = ("_fds", "_in", "_out", "limit", "socket", "unix")

    def __init__(self, connection: socket.socket, limit: int) -> None:
        """limit: bytes of a message that the other side may send."""
        connection.setblocking(False)
        self.socket, self.limit = connection, limit
        self.unix = connection.family == socket.AF_UNIX
        self._in = bytearray()
        self._fds: list[int] = []
        self._out: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        if not self.unix:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that vanished without a word is noticed after about 15 s, also while nothing is sent.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)

    def receive(self) -> bool:
        """Takes in what is there. False: the other side has closed. Raises OSError."""
        try:
            if self.unix:
                chunk, fds, flags, _ = socket.recv_fds(self.socket, _READ, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
                self._fds += fds
                if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_DESCRIPTORS:
                    raise BadFrame("too many descriptors")
            else:
                chunk = self.socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return True
        self._in += chunk
        return bool(chunk)

    def message(self) -> bytes | None:
        """The next complete message. Raises BadFrame."""
        if len(self._in) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._in)
        if length > self.limit:
            raise BadFrame(f"a message of {length} bytes, {self.limit} are allowed")
        end = LENGTH.size + length
        if len(self._in) < end:
            return None
        message = bytes(self._in[LENGTH.size : end])
        del self._in[:end]
        return message

    @property
    def complete(self) -> bool:
        """Whether `message` would return one."""
        return len(self._in) >= LENGTH.size and len(self._in) - LENGTH.size >= LENGTH.unpack_from(self._in)[0]

    def take_descriptors(self, count: int | None = None) -> tuple[int, ...]:
        """The first `count` of those that came, or all; the caller owns them."""
        fds, self._fds = tuple(self._fds[:count]), [] if count is None else self._fds[count:]
        return fds

    def post(self, message: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queues a message; `flush` sends it."""
        self._out.append((memoryview(LENGTH.pack(len(message)) + message), fds))

    def flush(self) -> bool:
        """Sends what the kernel takes. True: all of it. Raises OSError."""
        while self._out:
            data, fds = self._out[0]
            try:
                sent = socket.send_fds(self.socket, [data], fds) if fds else self.socket.send(data)
            except (BlockingIOError, InterruptedError):
                return False
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = data[sent:], ()
        return True

    @property
    def waiting(self) -> int:
        """Bytes that have not been sent yet."""
        return sum(len(data) for data, _ in self._out)

    def close(self) -> None:
        """Idempotent."""
        for fd in self.take_descriptors():
            with contextlib.suppress(OSError):
                os.close(fd)
        self.socket.close()
