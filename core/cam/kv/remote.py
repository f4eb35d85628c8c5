"""An instance that was opened: its ranks, how each is reached, and what meets what."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

from cam.deadline import Deadline, seconds
from cam.errors import BackendUnavailable, NotReachable, PeerLost
from cam.kv import messages as m
from cam.kv.link import Link, Refused
from cam.kv.routes import Lane, Mine, lanes
from cam.kv.transfer import Transfer
from cam.transport import Channel, Offer, Range, Target, Transport

#: Transports that are done in the caller's thread without waiting for anybody.
LOCAL = frozenset({"shm", "cma"})


@dataclass(frozen=True, eq=False)
class Part:
    """One rank of an instance. reason: what speaks for the transport, and what against those before it."""

    description: m.Description
    link: Link
    transport: str
    channel: Channel
    reason: str

    @property
    def label(self) -> str:
        who = self.description.who
        return f"{who.name} ({who.engine_id}, rank {who.tp_rank} of {who.tp_size})"


def reach(
    description: m.Description,
    link: Link,
    mine: Mine,
    wanted: Sequence[str],
    get: Callable[[str], Transport],
    deadline: Deadline,
) -> Part:
    """Tries transports in order. Raises NotReachable with every one's reason, PeerLost, Timeout."""
    names = set(mine.names)
    ranges = [
        Range(layer.address, description.geometries[layer.geometry].span)
        for layer in description.layers
        if layer.name in names
    ]
    against: list[str] = [f"no Unix socket: {link.why_not_unix}"] if link.why_not_unix else []
    for name in wanted:

        def ask(request: bytes, name: str = name) -> Offer:
            try:
                answer, fds = link.ask_with_descriptors(
                    m.AskOffer(name, request), m.OfferAnswer, deadline, f"open ({name})"
                )
            except Refused as error:
                raise NotReachable(f"{name}: {description.who.name} declines: {error}") from None
            return Offer(answer.blob, fds)

        target = Target(description.who.name, link.pid, link.unix, ranges, ask, link.lost)
        try:
            channel = get(name).connect(target)
        except (NotReachable, BackendUnavailable) as error:
            against.append(str(error))
            continue
        reason = f"{name}: {channel.reason}" + (f" (after: {'; '.join(against)})" if against else "")
        return Part(description, link, name, channel, reason)
    raise NotReachable(f"open: no transport reaches {description.who.name}: {'; '.join(against)}")


class Remote:
    """An instance of one or more ranks that this engine can read from and write to. Made by Engine.open.

    name, engine_ids: of its ranks, in the order given. transports: engine_id -> transport. block_size: tokens per
    block of its first layer.
    """

    def __init__(
        self, parts: Sequence[Part], mine: Mine, me: m.Who, timeout_s: float, forget: Callable[["Remote"], None]
    ):
        self.parts = tuple(parts)
        self._me, self._timeout_s, self._forget = me, timeout_s, forget
        self.name = parts[0].description.who.name
        self.engine_ids = tuple(part.description.who.engine_id for part in parts)
        self.transports = {part.description.who.engine_id: part.transport for part in parts}
        self.transport = ", ".join(dict.fromkeys(part.transport for part in parts))
        self.reason = "; ".join(dict.fromkeys(part.reason for part in parts))
        self.tp_size = parts[0].description.who.tp_size
        self.lanes: dict[str, list[Lane]] = {
            direction: lanes(
                mine,
                [part.description for part in parts],
                direction,
                lambda part, addresses: parts[part].channel.addresses(addresses),
            )
            for direction in ("read", "write")
        }
        self.block_size = self.lanes["read"][0].theirs.tokens
        self.local = all(part.transport in LOCAL for part in parts)
        self._lock = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._running: set[Transfer] = set()
        self._closed = False

    @property
    def alive(self) -> bool:
        """Every rank's process is there, and this has not been closed."""
        return not self._closed and not any(part.link.lost() for part in self.parts)

    def lost(self) -> str:
        """Which rank is gone and why, or ""."""
        for part in self.parts:
            why = part.link.lost()
            if why:
                return f"{part.label}: {why}"
        return ""

    def notify(self, payload: bytes, *, timeout: float | timedelta | None = None) -> None:
        """Tells every rank's owner. Returns when all their engines have it. Raises PeerLost, Timeout."""
        deadline = Deadline(seconds(timeout, self._timeout_s))
        for part in self.parts:
            part.link.ask(m.Finish("", payload, True), m.LeaseAnswer, deadline, "notify")

    def start(self, transfer: Transfer, work: Callable[[], None], inline: bool) -> None:
        """Does the work of a transfer, which ends the transfer: here and now, or in this instance's own thread, so
        that one slow peer holds up no other. Raises PeerLost when this has been closed."""
        with self._lock:
            if self._closed:
                raise PeerLost(f"{transfer.direction}: {self.name} was closed here", operation=transfer.direction)
            self._running.add(transfer)
            if not inline and self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"cam-kv-{self._me.name}-{self.name}")
            worker = self._worker

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._running.discard(transfer)

        if inline or worker is None:
            run()
        else:
            worker.submit(run)

    def close(self) -> None:
        """Cancels what is under way, waits until nothing touches the blocks any more, and says good-bye. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running, worker = list(self._running), self._worker
        for transfer in running:
            transfer.cancel()
        if worker is not None:
            worker.shutdown(wait=True)
        while any(not transfer.done() for transfer in running):  # done inside a call of another thread
            time.sleep(0.001)
        self._forget(self)
        for part in self.parts:
            part.channel.close()
            part.link.close()

    def abandon(self) -> None:
        """A forked child's copy: closes descriptors, tells nobody."""
        self._closed = True
        for part in self.parts:
            part.link.abandon()

    def __enter__(self) -> "Remote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Remote {self.name}: {len(self.parts)} rank(s) over {self.transport}>"
