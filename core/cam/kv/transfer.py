"""The handle of one transfer."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

from cam.deadline import seconds
from cam.errors import CamError, InputError, Timeout, TransferFailed
from cam.transport import Limits


class Transfer:
    """Blocks on their way. Made by Engine.read, Engine.write and Prepared.post.

    direction: "read" or "write". peer: name of the remote instance. transport: how the bytes go. nbytes: what was
    asked for. seconds: from post to end, 0 while it runs. error: why it did not do all of it; failed_blocks: LOCAL
    block ids whose content is not to be trusted (for a write: that may not have arrived).
    """

    __slots__ = (
        "_callbacks",
        "_ended",
        "_lock",
        "_started",
        "direction",
        "error",
        "failed_blocks",
        "limits",
        "nbytes",
        "peer",
        "seconds",
        "transport",
    )

    def __init__(self, direction: str, peer: str, transport: str, nbytes: int, timeout_s: float) -> None:
        self.direction, self.peer, self.transport, self.nbytes = direction, peer, transport, nbytes
        self.seconds = 0.0
        self.error: CamError | None = None
        self.failed_blocks: tuple[int, ...] = ()
        self._started = time.monotonic_ns()
        self.limits = Limits(self._started + int(timeout_s * 1e9))
        self._lock = threading.Lock()
        #: Held until the transfer has ended; waiting for it is acquiring it. Cheaper to make than an Event.
        self._ended = threading.Lock()
        self._ended.acquire()
        self._callbacks: list[Callable[[Transfer], None]] = []

    def done(self) -> bool:
        """Ended in some way: nothing touches the blocks any more."""
        return self.seconds > 0

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Raises TransferFailed, TransferCancelled; Timeout when it still runs after `timeout`, which harms nothing.
        None: until it ends, which its own deadline bounds."""
        if not self.done():
            limit = -1.0 if timeout is None else seconds(timeout, 0.0)
            if not self._ended.acquire(timeout=limit):
                raise Timeout(
                    f"{self.direction} with {self.peer}: still under way after {limit:.3g} s of waiting",
                    operation=self.direction,
                    phase="wait",
                    waited_s=limit,
                )
            self._ended.release()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Asks it to end soon; `done` tells when. What has ended stays as it is. Idempotent."""
        self.limits.cancel()

    def add_done_callback(self, fn: Callable[["Transfer"], None]) -> None:
        """Calls fn(transfer) once it has ended: at once if it has, else in the thread that ends it; keep it short."""
        with self._lock:
            if not self.done():
                self._callbacks.append(fn)
                return
        fn(self)

    @property
    def elapsed_s(self) -> float:
        """Since it was posted; its whole time once it has ended."""
        return self.seconds or (time.monotonic_ns() - self._started) / 1e9

    def end(self, error: CamError | None, failed_blocks: tuple[int, ...]) -> None:
        """For the engine: once."""
        if self.done():
            raise InputError("a transfer ends once")
        if isinstance(error, TransferFailed):
            error.failed_blocks = failed_blocks
        self.error, self.failed_blocks = error, failed_blocks
        with self._lock:
            self.seconds = max(1, time.monotonic_ns() - self._started) / 1e9
            callbacks, self._callbacks = self._callbacks, []
        self._ended.release()
        for fn in callbacks:
            fn(self)

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self.error else "done"
        return f"<Transfer {self.direction} {self.peer} over {self.transport}: {self.nbytes} bytes, {state}>"
