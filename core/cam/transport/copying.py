"""What shm and cma share: runs of the native mover, in which nobody else takes part."""

import ctypes
import errno
from collections.abc import Callable

from cam.transport.liveness import lost_soon
from cam.transport.pieces import Batch
from cam.transport.protocol import Ended, Limits, Outcome

#: Mover.copy or Mover.copy_process of one pid: what remains are the table, the bases and the limits.
Move = Callable[[int, int, int, int, int, bool, int, int], tuple[int, int, int]]

_ENDED = {0: Ended.DONE, 1: Ended.CANCELLED, 2: Ended.LATE, 3: Ended.FAILED}


class Copy:
    """A batch whose addresses the mover can use."""

    __slots__ = ("_arguments", "_batch", "_lost", "_move")

    def __init__(self, move: Move, batch: Batch, to_mine: bool, lost: Callable[[], str] | None) -> None:
        """lost: asked after each run, where the peer's death would make the bytes worthless."""
        self._move, self._lost = move, lost
        self._batch = batch  # keeps the arrays whose addresses are used
        self._arguments = (
            batch.table.ctypes.data,
            len(batch.table),
            batch.mine.ctypes.data,
            batch.theirs.ctypes.data,
            len(batch.mine),
            to_mine,
        )

    def run(self, limits: Limits) -> Outcome:
        code, step, error = self._move(*self._arguments, ctypes.addressof(limits.flag), limits.deadline_ns)
        ended = _ENDED[code]
        if self._lost is not None:
            # After each run: a pid could have been taken over by another process only after the peer's death.
            lost = lost_soon(self._lost) if ended is Ended.FAILED else self._lost()
            if lost:
                return Outcome(Ended.LOST, 0, lost)
        if ended is Ended.FAILED:
            return Outcome(ended, step, f"{errno.errorcode.get(error, error)}: {_explained(error)}")
        return Outcome(ended, step)

    def close(self) -> None:
        """Nothing to give back."""


def _explained(error: int) -> str:
    if error == errno.EFAULT:
        return "memory that was announced is not mapped"
    if error == errno.ESRCH:
        return "the process has ended"
    if error == errno.EPERM:
        return "the kernel forbids it"
    return "the copy failed"
