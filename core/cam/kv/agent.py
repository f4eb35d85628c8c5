"""The listening side of an engine: a thread that answers peers.

It listens on an abstract Unix socket, whose name the kernel picks, and on TCP. Strangers are told nothing, hold
nobody up, and are cut off when they do not prove in time that they know the secret. The thread never waits for
one peer: sockets are non-blocking, and what takes long (starting a transport, checksums) is done by another.
"""

import contextlib
import functools
import hmac
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from cam.errors import CamError, InputError
from cam.kv import messages as m
from cam.kv.wire import BadFrame, Stream
from cam.transport import Offer

_log = logging.getLogger(__name__)

_STRANGER_S = 10.0
_MAX_CONNECTIONS = 4096
_MAX_WAITING = 256 << 20
_ACCEPT_AGAIN_S = 0.1


class Service(Protocol):
    """What the agent asks its engine. The first three may raise CamError, which the peer is told."""

    def description(self) -> bytes: ...

    def offer(self, transport: str, request: bytes) -> Offer: ...

    def digest(self, ask: m.AskDigest) -> list[int]: ...

    def touch(self, lease: str, reader: m.Who) -> str: ...

    def finish(self, finish: m.Finish, reader: m.Who) -> str: ...

    def gone(self, peer: m.Who, reason: str) -> None: ...

    def tick(self) -> float:
        """Called now and then. Returns the seconds until it wants to be called again."""
        ...


class _Peer:
    """One connection."""

    __slots__ = ("_expects", "busy", "said_bye", "since", "stream", "who")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.since = time.monotonic()
        self.who: m.Who | None = None  # once it has proven that it knows the secret
        self.said_bye = False
        self.busy = False  # the slow thread is about its question; the next one waits
        self._expects: tuple[m.Hello, bytes] | None = None

    def greet(self, message: object, secret: bytes, engine_id: str) -> m.Message | None:
        """One step of the proof of the secret. Raises BadFrame."""
        if isinstance(message, m.Hello) and self._expects is None:
            if message.version != m.VERSION:
                return m.Refusal(f"protocol version {message.version}; this engine speaks {m.VERSION}")
            if len(message.number) != m.NUMBER_BYTES:
                raise BadFrame("a number of a wrong length")
            number = secrets.token_bytes(m.NUMBER_BYTES)
            self._expects = message, number
            proof = m.proof(secret, b"host", message, engine_id, number)
            return m.Challenge(m.VERSION, engine_id, number, proof)
        if isinstance(message, m.Proof) and self._expects is not None:
            hello, number = self._expects
            if not hmac.compare_digest(message.proof, m.proof(secret, b"caller", hello, engine_id, number)):
                return m.Refusal("the secrets differ")
            self.who, self._expects = hello.who, None
            self.stream.limit = m.MAX_MESSAGE
            return m.Welcome()
        raise BadFrame("not how a conversation begins")


class Agent:
    """Runs until `close`. socket_name, address: where it listens."""

    def __init__(self, name: str, engine_id: str, secret: bytes, listen: str | None, port: int) -> None:
        self._name, self._engine_id, self._secret = name, engine_id, secret
        self._service: Service | None = None
        self._peers: dict[int, _Peer] = {}
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._slow: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._paused_until = 0.0
        self._closing = False
        self.address: tuple[str, int] | None = None
        try:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listeners.append(unix)
            unix.bind(b"")  # the kernel picks a free abstract name
            self.socket_name: bytes = unix.getsockname()
            if listen is not None:
                self._listeners.append(_tcp(listen, port))
                self.address = self._listeners[-1].getsockname()[:2]
            for listener in self._listeners:
                listener.listen(512)
                listener.setblocking(False)
        except BaseException:
            self.release_descriptors()
            raise
        self._threads = [
            threading.Thread(target=self._run, name=f"cam-kv-{name}-agent", daemon=True),
            threading.Thread(target=self._run_slow, name=f"cam-kv-{name}-answers", daemon=True),
        ]

    def start(self, service: Service) -> None:
        self._service = service
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Has `tick` called soon. From any thread."""
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self._wake, 1)

    def connected(self, engine_id: str) -> bool:
        """Whether a peer has a connection to this engine."""
        return any(peer.who is not None and peer.who.engine_id == engine_id for peer in list(self._peers.values()))

    def close(self) -> None:
        """Idempotent. From any thread but its own."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        self._slow.put(None)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._service = None  # it knows the engine, whose memory should not wait for the collector of cycles
        self.release_descriptors()

    def release_descriptors(self) -> None:
        """Closes this process's descriptors; also in a forked child, which has no agent of its own."""
        for peer in self._peers.values():
            peer.stream.close()
        self._peers.clear()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _run(self) -> None:
        service = self._the_service()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listen(True)
        due = 0.0
        while not self._closing:
            events = self._selector.select(max(0.0, min(1.0, due - time.monotonic())))
            for key, mask in events:
                if key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    due = 0.0
                elif key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif mask & selectors.EVENT_WRITE and not self._flush(key.data):
                    continue
                elif mask & selectors.EVENT_READ:
                    self._read(key.data)
            while not self._calls.empty():
                self._calls.get()()
            now = time.monotonic()
            if now >= due:
                due = now + service.tick()
            if self._paused_until and now >= self._paused_until:
                self._listen(True)
            for peer in list(self._peers.values()):
                if peer.who is None and now - peer.since > _STRANGER_S:
                    self._drop(peer, "it did not prove in time that it knows the secret")

    def _listen(self, on: bool) -> None:
        self._paused_until = 0.0 if on else time.monotonic() + _ACCEPT_AGAIN_S
        for listener in self._listeners:
            if on:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError:  # no descriptors left: the listener would stay readable, and this thread spin
            self._listen(False)
            return
        if len(self._peers) >= _MAX_CONNECTIONS:
            connection.close()
            return
        peer = _Peer(Stream(connection, m.MAX_STRANGER_MESSAGE))
        self._peers[connection.fileno()] = peer
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            open_ = peer.stream.receive()
        except (BadFrame, OSError) as error:
            self._drop(peer, str(error))
            return
        self._serve_or_drop(peer)
        if not open_:
            self._drop(peer, "it closed the connection")

    def _serve_or_drop(self, peer: _Peer) -> None:
        try:
            self._serve(peer)
        except (BadFrame, OSError, msgspec.MsgspecError) as error:
            self._drop(peer, str(error))
        except Exception as error:  # a bug with one peer must not end the thread that serves all of them
            _log.exception("%s: a question of %s", self._name, peer.who)
            self._drop(peer, f"its question could not be answered: {error}")

    def _serve(self, peer: _Peer) -> None:
        """Answers what has arrived, one question after another."""
        while not peer.busy:
            data = peer.stream.message()
            if data is None:
                return
            message = m.decode_from_caller(data)
            if peer.who is None:
                self._answer(peer, peer.greet(message, self._secret, self._engine_id))
            elif isinstance(message, m.Bye):
                peer.said_bye = True
            elif isinstance(message, m.AskOffer | m.AskDigest):
                peer.busy = True
                self._slow.put(functools.partial(self._work_on, peer, message))
            else:
                self._answer(peer, self._at_once(peer.who, message))

    def _at_once(self, who: m.Who, message: object) -> m.Message:
        service = self._the_service()
        try:
            match message:
                case m.AskDescription():
                    return m.DescriptionAnswer(service.description())
                case m.Touch():
                    reason = service.touch(message.lease, who)
                    return m.LeaseAnswer(not reason, reason)
                case m.Finish():
                    reason = service.finish(message, who)
                    return m.LeaseAnswer(not reason, reason)
        except CamError as error:
            return m.Refusal(str(error))
        raise BadFrame(f"{type(message).__name__} is out of place")

    def _run_slow(self) -> None:
        while True:
            work = self._slow.get()
            if work is None:
                return
            work()

    def _work_on(self, peer: _Peer, message: m.AskOffer | m.AskDigest) -> None:
        """In the slow thread."""
        service = self._the_service()
        fds: tuple[int, ...] = ()
        answer: m.Message
        try:
            if isinstance(message, m.AskOffer):
                offer = service.offer(message.transport, message.request)
                fds = offer.fds
                answer = m.OfferAnswer(offer.blob, len(fds))
                if fds and not peer.stream.unix:
                    fds, answer = (), m.Refusal(f"{message.transport} needs a Unix socket")
            else:
                answer = m.DigestAnswer(service.digest(message))
        except CamError as error:
            answer = m.Refusal(str(error))
        except Exception as error:  # as above: the thread serves everybody
            _log.exception("%s: a question of %s", self._name, peer.who)
            answer = m.Refusal(f"{type(error).__name__}: {error}")
        self._calls.put(lambda: self._worked(peer, answer, fds))
        self.wake()

    def _worked(self, peer: _Peer, answer: m.Message, fds: tuple[int, ...]) -> None:
        peer.busy = False
        if self._peers.get(peer.stream.socket.fileno()) is not peer:
            return  # it has gone meanwhile
        self._answer(peer, answer, fds)
        if self._peers.get(peer.stream.socket.fileno()) is peer:
            self._serve_or_drop(peer)

    def _answer(self, peer: _Peer, message: m.Message | None, fds: tuple[int, ...] = ()) -> None:
        if message is None:
            return
        peer.stream.post(m.encode(message), fds)
        self._flush(peer)

    def _flush(self, peer: _Peer) -> bool:
        """False: the peer had to be dropped."""
        try:
            done = peer.stream.flush()
        except OSError as error:
            self._drop(peer, str(error))
            return False
        if peer.stream.waiting > _MAX_WAITING:
            self._drop(peer, "it does not read its answers")
            return False
        events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(peer.stream.socket).events != events:
            self._selector.modify(peer.stream.socket, events, peer)
        return True

    def _drop(self, peer: _Peer, reason: str) -> None:
        fd = peer.stream.socket.fileno()
        if self._peers.get(fd) is not peer:
            return
        self._selector.unregister(peer.stream.socket)
        del self._peers[fd]
        peer.stream.close()
        if peer.who is not None and not self.connected(peer.who.engine_id):
            self._the_service().gone(peer.who, "closed" if peer.said_bye else reason)

    def _the_service(self) -> Service:
        if self._service is None:
            raise InputError("the agent was not started")
        return self._service


def _tcp(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"cannot listen on {host!r}: {error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {host!r} port {port}: {error} (port 0 takes a free one)") from None
    return listener
