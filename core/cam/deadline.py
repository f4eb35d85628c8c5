"""Time limits: what callers may pass, and one point in time shared by the steps of one operation."""

import math
import time
from datetime import timedelta

from cam.errors import InputError


def seconds(timeout: float | timedelta | None, default: float) -> float:
    """A timeout as seconds; None means `default`. Raises InputError unless it is a finite number > 0."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise InputError(f"timeout must be finite and > 0 (seconds or datetime.timedelta), got {timeout!r}")
    return float(value)


class Deadline:
    """A fixed point in time, so that several waits together take no longer than one was allowed to."""

    __slots__ = ("_end", "_start")

    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._end = self._start + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end
