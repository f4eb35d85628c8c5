"""A start line for ranks on one host that favours no contender: ranks leave it at one agreed instant.

The barriers of Gloo, MPI and CAM let ranks go one after another, up to 100 us apart, which is more than some
of the calls that are measured. Here the ranks meet in a shared file mapping, rank 0 names an instant a little
in the future, and everybody waits for it on the clock they share (CLOCK_MONOTONIC, which perf_counter reads).
"""

import mmap
import os
import time
from pathlib import Path

from cam.errors import Timeout

_LINE = 64  # one cache line per rank: an arrival must not slow down the others' polling
_WORD = 8


class StartLine:
    """path: a file that all ranks see. crowded: ranks outnumber cores, so nobody spins while others work."""

    def __init__(self, path: Path, rank: int, world: int, *, crowded: bool, timeout_s: float) -> None:
        self._rank, self._world, self._crowded, self._timeout_s = rank, world, crowded, timeout_s
        self._meeting = 0
        bytes_needed = _LINE * (world + 1)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, bytes_needed)
            self._map = mmap.mmap(file, bytes_needed)
        finally:
            os.close(file)
        # Aligned 8-byte elements: each store and load is one machine access.
        words = memoryview(self._map).cast("q")
        self._arrived = [words[r * _LINE // _WORD : r * _LINE // _WORD + 1] for r in range(world)]
        self._gun = words[world * _LINE // _WORD : world * _LINE // _WORD + 1]
        self._last = 0

    def wait(self) -> int:
        """Waits for all ranks, then for the start; returns that instant in perf_counter_ns().

        Raises Timeout with the ranks that did not come.
        """
        self._meeting += 1
        meeting = self._meeting
        self._arrived[self._rank][0] = meeting
        self._wait_for_all(meeting)
        if self._rank == 0:
            # The lead covers the time in which the others notice; crowded ranks also wait for a turn on a
            # core.
            lead_ns = 1_500_000 if self._crowded else 40_000
            self._gun[0] = time.perf_counter_ns() + lead_ns
        # One word tells both that there is a new instant and which.
        while (start := self._gun[0]) == self._last:
            self._pause()
        self._last = start
        if self._crowded:
            while time.perf_counter_ns() < start:
                os.sched_yield()
        else:
            while time.perf_counter_ns() < start:
                pass
        return start

    def _wait_for_all(self, meeting: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        waiting = list(range(self._world))
        while waiting:
            waiting = [rank for rank in waiting if self._arrived[rank][0] < meeting]
            if time.monotonic() > deadline:
                raise Timeout(
                    f"ranks {waiting} did not come to the start line within {self._timeout_s:.0f} s",
                    operation="bench",
                    phase="start line",
                    ranks=waiting,
                    waited_s=self._timeout_s,
                )
            self._pause()

    def _pause(self) -> None:
        # Those who wait while others are still in the measured call must leave them the cores.
        if self._crowded:
            time.sleep(0.0002)
