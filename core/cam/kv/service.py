"""An engine's answers to its peers: what the agent's threads call."""

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np

from cam.errors import InputError
from cam.kv import messages as m
from cam.kv.events import Inbox, Notification, PeerGone
from cam.kv.geometry import Geometry
from cam.kv.integrity import digests
from cam.kv.leases import Leases
from cam.kv.metrics import Metrics
from cam.kv.planner import Span, plan
from cam.transport import Home, Offer, Transport, create
from cam_kernels import Mover

_log = logging.getLogger(__name__)


class Transports:
    """This engine's transports, each made when it is first needed. Thread-safe."""

    def __init__(self, home: Callable[[], Home], allowed: Sequence[str]) -> None:
        self._home, self.allowed = home, tuple(allowed)
        self._lock = threading.Lock()
        self._made: dict[str, Transport] = {}

    def get(self, name: str) -> Transport:
        """Raises BackendUnavailable."""
        with self._lock:
            found = self._made.get(name)
            if found is None:
                found = self._made[name] = create(name, self._home())
            return found

    def close(self) -> None:
        with self._lock:
            made, self._made = list(self._made.values()), {}
        for each in made:
            each.close()


class EngineService:
    """Implements cam.kv.agent.Service."""

    def __init__(
        self,
        describe: Callable[[], bytes],
        geometries: Callable[[], tuple[Sequence[Geometry], Sequence[int]]],
        transports: Transports,
        mover: Mover,
        leases: Leases,
        inbox: Inbox,
        metrics: Metrics,
    ) -> None:
        """geometries: the layers', and their addresses."""
        self._describe, self._geometries = describe, geometries
        self._transports, self._mover = transports, mover
        self._leases, self._inbox, self._metrics = leases, inbox, metrics

    def description(self) -> bytes:
        return self._describe()

    def offer(self, transport: str, request: bytes) -> Offer:
        if transport not in self._transports.allowed:
            raise InputError(
                f"transport {transport!r} is not among those allowed: {', '.join(self._transports.allowed)}"
            )
        return self._transports.get(transport).offer(request)

    def digest(self, ask: m.AskDigest) -> list[int]:
        geometries, addresses = self._geometries()
        if not ask.layers or not all(0 <= layer < len(geometries) for layer in ask.layers):
            raise InputError(f"layers must be in 0..{len(geometries) - 1}, got {ask.layers[:4]}")
        mine = geometries[ask.layers[0]]
        if any(geometries[layer] != mine for layer in ask.layers):
            raise InputError("the layers of one question must have one geometry")
        heads = range(ask.first_head, ask.first_head + ask.heads)
        for each in (mine.heads, ask.mine.heads):
            if ask.heads < 1 or heads.start < each.first or heads.stop > each.end:
                raise InputError(f"heads {heads.start}..{heads.stop - 1} are not all in {each.first}..{each.end - 1}")
        if ask.mine.channel_bytes != mine.channel_bytes or ask.mine.planes != mine.planes:
            raise InputError("the geometries do not meet")
        their_blocks = np.frombuffer(ask.my_blocks, "<i8").astype(np.int64)
        my_blocks = np.frombuffer(ask.their_blocks, "<i8").astype(np.int64)
        span = Span(ask.my_start, ask.their_start, ask.tokens)
        found = plan(ask.mine, mine, heads, their_blocks, my_blocks, span)
        bases = np.array([addresses[layer] for layer in ask.layers], np.int64)
        return digests(self._mover, found, bases, theirs=True)

    def touch(self, lease: str, reader: m.Who) -> str:
        return self._leases.touch(lease, reader)

    def finish(self, finish: m.Finish, reader: m.Who) -> str:
        if len(finish.payload) > m.MAX_PAYLOAD:
            raise InputError(f"a notification has at most {m.MAX_PAYLOAD} bytes, got {len(finish.payload)}")
        # First the word, then the blocks: whoever hears that a lease has ended has all that was said about it.
        if finish.notify:
            note = Notification(finish.payload, reader.engine_id, reader.name, reader.tp_rank, reader.tp_size)
            self._inbox.put(note)
            self._metrics.notified("received")
        return self._leases.release(finish.lease, reader) if finish.lease else ""

    def gone(self, peer: m.Who, reason: str) -> None:
        _log.info("peer %s (%s, rank %d of %d): %s", peer.name, peer.engine_id, peer.tp_rank, peer.tp_size, reason)
        self._leases.lose(peer)
        self._inbox.put(PeerGone(peer.engine_id, peer.name, reason))

    def tick(self) -> float:
        return self._leases.expire()
