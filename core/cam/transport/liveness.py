"""Was it the peer's death? A transfer may fail a moment before the kernel tells that a process has ended."""

import time
from collections.abc import Callable

_PATIENCE_S = 1.0


def lost_soon(lost: Callable[[], str]) -> str:
    """Why the peer is gone, or "" when it still is there after a while. For after a failure only."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        why = lost()
        if why or time.monotonic() > until:
            return why
        time.sleep(0.005)
