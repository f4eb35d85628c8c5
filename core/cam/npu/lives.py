"""Whether the processes of a group's peers are still there, for waits that the group's own endpoint does not make."""

import os
import select
import time

from cam.errors import PeerLost
from cam.group import Group


class Lives:
    """The processes of the peers, watched while this rank waits for what they write."""

    def __init__(self, group: Group) -> None:
        self.operation, self._start, self._group = "", 0.0, group
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        for peer in group.peers:
            if peer.rank != group.rank:
                try:
                    pidfd = os.pidfd_open(peer.pid)
                except ProcessLookupError:
                    raise self._lost(peer.rank) from None
                self._ranks[pidfd] = peer.rank
                self._poll.register(pidfd, select.POLLIN)

    def begin(self, operation: str, start: float) -> None:
        self.operation, self._start = operation, start

    def check(self) -> None:
        """Raises PeerLost."""
        for pidfd, _ in self._poll.poll(0):
            raise self._lost(self._ranks[pidfd])

    def _lost(self, rank: int) -> PeerLost:
        waited = time.monotonic() - self._start if self._start else 0.0
        operation = self.operation or "dispatch"
        return PeerLost(
            f"group {self._group.name!r}, {operation} (kernels): rank {rank} was lost after {waited:.3g} s of waiting "
            "(its process has ended)",
            operation=operation,
            phase="kernels",
            rank=rank,
            waited_s=waited,
        )

    def __del__(self) -> None:
        for pidfd in self._ranks:
            os.close(pidfd)
