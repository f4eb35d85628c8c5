"""What can go wrong, as one small tree under CamError.

Every class takes the message first and its named fields as keywords; the fields are plain attributes, so that
an error survives pickling and that programs read them instead of parsing text.
"""

from collections.abc import Sequence


class CamError(Exception):
    """Base of everything that CAM raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:  # OSError and MemoryError have formats of their own
        return str(self.args[0]) if self.args else ""


class ConfigError(CamError, ValueError):
    """A configuration has an unknown key (the message names the near miss) or a value that is not allowed."""


class InputError(CamError, ValueError):
    """A call got an argument that is not allowed. Raised locally, before anything is sent to a peer."""


class Mismatch(CamError):
    """Ranks called the same operation with different parameters.

    field: name of the parameter; mine: this rank's value; rank: the rank that differs; theirs: its value.
    """

    def __init__(self, message: str, *, field: str = "", mine: str = "", rank: int = -1, theirs: str = "") -> None:
        super().__init__(message)
        self.field, self.mine, self.rank, self.theirs = field, mine, rank, theirs


class Timeout(CamError, TimeoutError):
    """Ranks did not take part in time.

    operation, phase: where this rank waited; ranks: those that are late; waited_s: for how long.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        phase: str = "",
        ranks: Sequence[int] = (),
        waited_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.operation, self.phase, self.ranks, self.waited_s = operation, phase, tuple(ranks), waited_s


class PeerLost(CamError):
    """A peer's process ended, or the peer left the group, while this rank needed it.

    operation, phase: where this rank waited; rank: the lost peer; waited_s: how long it was waited for.
    """

    def __init__(
        self, message: str, *, operation: str = "", phase: str = "", rank: int = -1, waited_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.operation, self.phase, self.rank, self.waited_s = operation, phase, rank, waited_s


class GroupAborted(CamError):
    """An earlier failure, here or at a peer, broke the group. The message carries the root cause."""


class OutOfWindowMemory(CamError, MemoryError):
    """A rank's window cannot hold what was asked for. The knob is window_limit (CAM_WINDOW_LIMIT).

    rank: whose window; requested, allocated, limit: bytes.
    """

    def __init__(self, message: str, *, rank: int = -1, requested: int = 0, allocated: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.rank, self.requested, self.allocated, self.limit = rank, requested, allocated, limit


class ForkedProcess(CamError):
    """A group was used in a process forked from the one that made it."""


class NotReachable(CamError):
    """A peer does not share this host's memory; the message says which and why."""


class BackendUnavailable(CamError):
    """No such backend here. The message lists those that exist and why each other one could not be loaded."""


class TransferFailed(CamError):
    """A transfer of cache blocks did not do all that was asked.

    failed_blocks: ids of local blocks whose content must not be trusted; cause: the error behind it, if any.
    """

    def __init__(self, message: str, *, failed_blocks: Sequence[int] = (), cause: CamError | None = None) -> None:
        super().__init__(message)
        self.failed_blocks, self.cause = tuple(failed_blocks), cause


class TransferCancelled(TransferFailed):
    """The transfer was cancelled before it was done."""
