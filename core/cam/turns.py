"""One operation at a time on a group, in the order in which the program asked for them.

Ranks pair up their operations by order, so a group's operations must start in the same order everywhere.
Within one thread that is program order: an operation waits until those that the thread submitted before
have finished. Threads that use one group take turns; it is up to them to do so in the same order on every
rank.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")


class Turns:
    """A reentrant lock (`with turns: ...`) that also waits for the submitted work, and the thread that does it.

    Never submit while holding the turn and then wait for the result: the work waits for the turn as well.

    lock, last: for Group.call alone, which is too hot for two more Python calls. last: the work submitted most
    recently, until it is done.
    """

    __slots__ = ("_closed", "_executor", "_name", "_queue", "last", "lock")

    def __init__(self, name: str) -> None:
        self._name = name
        self.lock = threading.RLock()
        self.last: futures.Future[object] | None = None
        self._queue = threading.Lock()
        self._executor: futures.ThreadPoolExecutor | None = None
        self._closed = False

    def __enter__(self) -> None:
        if self.last is not None:
            self.wait()
        self.lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.lock.release()

    def wait(self) -> None:
        """Waits for what was submitted before; at once in the thread that has the turn already."""
        last = self.last
        if last is not None and not self.lock._is_owned():  # type: ignore[attr-defined]  # as Condition does
            futures.wait((last,))

    def submit(self, fn: Callable[[], T]) -> "futures.Future[T]":
        """Runs fn on the progress thread, holding the turn, after everything submitted before."""
        with self._queue:
            if self._closed:
                raise RuntimeError("closed")
            if self._executor is None:
                self._executor = futures.ThreadPoolExecutor(1, thread_name_prefix=f"{self._name}-progress")
            future = self._executor.submit(self._run, fn)
            self.last = future  # type: ignore[assignment]  # Future is invariant; nobody reads its result
        future.add_done_callback(self._finished)
        return future

    def close(self) -> None:
        """Waits for what was submitted, then ends the progress thread. Idempotent.

        With the turn in hand it only says that there is nothing more to come: the work waits for the turn.
        """
        with self._queue:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=not self.lock._is_owned())  # type: ignore[attr-defined]

    def _run(self, fn: Callable[[], T]) -> T:
        with self.lock:
            return fn()

    def _finished(self, future: "futures.Future[T]") -> None:
        with self._queue:
            if self.last is future:
                self.last = None
