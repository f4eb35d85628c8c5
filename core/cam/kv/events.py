"""What an engine's owner is told by `Engine.poll`."""

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Notification:
    """A peer's message, after the data it speaks of has arrived. engine_id ... tp_size: who sent it."""

    payload: bytes
    engine_id: str
    name: str
    tp_rank: int
    tp_size: int


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """A loan is over: its blocks are the owner's again.

    reason: "released" by all readers; "expired"; "ended" by the owner; "readers lost": those that had not
    released it are dead. waiting_for: readers that had not released it.
    """

    lease: str
    tag: bytes
    reason: str
    waiting_for: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """An engine that had opened this one has closed, or died."""

    engine_id: str
    name: str
    reason: str


Event = Notification | LeaseEnded | PeerGone


class Inbox:
    """Events until the owner takes them, and a descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._lock = threading.Lock()
        self._signal = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)
            if self._signal >= 0:
                os.eventfd_write(self._signal, 1)

    def take(self) -> list[Event]:
        if not self._events:  # the usual case, without the lock and the system call
            return []
        with self._lock:
            events = list(self._events)
            self._events.clear()
            if self._signal >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._signal)
        return events

    def fileno(self) -> int:
        return self._signal

    def close(self) -> None:
        """Idempotent. What was put before can still be taken."""
        with self._lock:
            signal, self._signal = self._signal, -1
            if signal >= 0:
                os.close(signal)
