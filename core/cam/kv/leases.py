"""Loans of blocks: the owner keeps them until every reader is through, dead, or too late.

A lease has an id that both sides know, a number of readers, and a time to live that each touch renews. A reader may
come before the owner has made the lease (it learned of the request on another way); its touches and releases are
remembered. A reader is a whole instance: it is through when each of its tensor-parallel ranks is, which the owner could
not count, because it does not know how many ranks the instance that reads will have. An id that has ended stays known
for a while, so that a reader who comes too late is told so.
"""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from cam.errors import InputError
from cam.kv.events import LeaseEnded
from cam.kv.messages import Who

#: Ended leases that are remembered, and how many may be spoken of before they are made.
_REMEMBERED = 1 << 16


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    tag: bytes = b""
    readers: int = 0  # 0: not made by the owner yet
    deadline: float = 0.0
    reading: set[Who] = field(default_factory=set)
    through: set[Who] = field(default_factory=set)
    lost: set[Who] = field(default_factory=set)

    def instances(self) -> tuple[int, int]:
        """(that are through, that lost a rank before): an engine that is the only rank of its instance is one, whatever
        its name; of others the name says which belong together."""
        ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
        for who in self.through:
            ranks[_instance(who)].add(who.tp_rank)
        through = {key for key, found in ranks.items() if len(found) == key[1]}
        return len(through), len({_instance(who) for who in self.lost} - through)


def _instance(who: Who) -> tuple[str, int]:
    return (who.engine_id, 1) if who.tp_size == 1 else (who.name, who.tp_size)


class Leases:
    """All methods are thread-safe. ended: called (outside the lock) once for each lease of the owner's."""

    def __init__(self, default_ttl_s: float, ended: Callable[[LeaseEnded], None]) -> None:
        self._default_ttl_s, self._ended = default_ttl_s, ended
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._over: OrderedDict[str, str] = OrderedDict()
        self.counts = {"granted": 0, "released": 0, "expired": 0, "ended": 0, "readers lost": 0}

    def grant(self, lease: str, ttl_s: float | None, tag: bytes, readers: int) -> None:
        """Raises InputError for an id that is or was in use."""
        ttl = self._default_ttl_s if ttl_s is None else ttl_s
        if readers < 1 or not ttl > 0 or not lease or len(lease) > 1000:
            raise InputError(
                f"a lease has an id of 1..1000 characters, readers >= 1 and ttl_s > 0, got {lease!r}, {readers}, {ttl}"
            )
        with self._lock:
            known = self._leases.get(lease)
            if lease in self._over or (known is not None and known.readers):
                state = self._over.get(lease, "open")
                raise InputError(f"lease {lease!r} exists already ({state}): ids are used once")
            entry = known or _Lease(ttl)
            entry.ttl_s, entry.tag, entry.readers = ttl, tag, readers
            entry.deadline = time.monotonic() + ttl
            self._leases[lease] = entry
            self.counts["granted"] += 1
            event = self._settle(lease, entry)
        self._tell(event)

    def touch(self, lease: str, reader: Who) -> str:
        """A reader begins: the lease lives its full time again. Returns why it cannot, or ""."""
        with self._lock:
            over = self._over.get(lease)
            if over is not None:
                return f"lease {lease!r} is over: {over}"
            entry = self._leases.get(lease)
            if entry is None:
                if len(self._leases) >= _REMEMBERED:
                    return f"lease {lease!r} is unknown, and too many unknown ones are waited for"
                entry = self._leases[lease] = _Lease(self._default_ttl_s)
            entry.deadline = time.monotonic() + entry.ttl_s
            entry.reading.add(reader)
        return ""

    def release(self, lease: str, reader: Who) -> str:
        """A reader is through, for good or not. Returns why the lease had not lasted until now, or ""."""
        with self._lock:
            over = self._over.get(lease)
            if over is not None:
                return f"lease {lease!r} is over: {over}"
            entry = self._leases.get(lease)
            if entry is None:
                entry = self._leases[lease] = _Lease(self._default_ttl_s)
                entry.deadline = time.monotonic() + entry.ttl_s
            entry.reading.discard(reader)
            entry.through.add(reader)
            event = self._settle(lease, entry)
        self._tell(event)
        return ""

    def lose(self, reader: Who) -> None:
        """A reader is dead: it will release nothing."""
        events = []
        with self._lock:
            for lease, entry in list(self._leases.items()):
                if reader in entry.reading:
                    entry.reading.discard(reader)
                    entry.lost.add(reader)
                    events.append(self._settle(lease, entry))
        for event in events:
            self._tell(event)

    def end(self, lease: str) -> bool:
        """The owner ends it. False: it had ended, or never was."""
        with self._lock:
            entry = self._leases.get(lease)
            if entry is None or not entry.readers:
                return False
            event = self._close(lease, entry, "ended")
        self._tell(event)
        return True

    def expire(self) -> float:
        """Ends what is overdue. Returns the seconds until the next lease is (infinite: there is none)."""
        events = []
        now, soonest = time.monotonic(), float("inf")
        with self._lock:
            for lease, entry in list(self._leases.items()):
                if entry.deadline > now:
                    soonest = min(soonest, entry.deadline - now)
                elif entry.readers:
                    events.append(self._close(lease, entry, "expired"))
                else:
                    del self._leases[lease]  # spoken of, but never made
        for event in events:
            self._tell(event)
        return soonest

    def active(self) -> int:
        with self._lock:
            return sum(entry.readers > 0 for entry in self._leases.values())

    def _settle(self, lease: str, entry: _Lease) -> LeaseEnded | None:
        """Ends the lease when nobody is left to wait for."""
        through, lost = entry.instances()
        if not entry.readers or through + lost < entry.readers:
            return None
        return self._close(lease, entry, "readers lost" if lost else "released")

    def _close(self, lease: str, entry: _Lease, reason: str) -> LeaseEnded:
        del self._leases[lease]
        self._over[lease] = reason
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)
        self.counts[reason] += 1
        return LeaseEnded(lease, entry.tag, reason, max(0, entry.readers - entry.instances()[0]))

    def _tell(self, event: LeaseEnded | None) -> None:
        if event is not None:
            self._ended(event)
