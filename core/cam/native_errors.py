"""The native module's failures, as the cam.CamError tree.

A native exception carries one dict: message, and, depending on its kind, operation, phase, ranks, waited_s,
field, mine, theirs, requested, allocated, limit.
"""

from typing import Any

from cam.errors import (
    CamError,
    GroupAborted,
    InputError,
    Mismatch,
    OutOfWindowMemory,
    PeerLost,
    Timeout,
)
from cam.native import LOADED
from cam.native import kernels as native

#: What `except` has to name.
NATIVE_ERRORS: tuple[type[Exception], ...] = (
    (
        native.WaitTimeout,
        native.PeerDied,
        native.Aborted,
        native.ParameterMismatch,
        native.OutOfMemory,
        native.BadInput,
    )
    if LOADED
    else ()
)


def translate(error: Exception, group: str, operation: str, rank: int) -> CamError:
    """The CamError for a native exception of `operation` on this rank of a group."""
    fields: dict[str, Any] = dict(error.args[0]) if error.args and isinstance(error.args[0], dict) else {}
    operation = fields.get("operation") or operation
    phase = fields.get("phase") or ""
    ranks = [int(each) for each in fields.get("ranks") or ()]
    waited_s = float(fields.get("waited_s") or 0.0)
    message = str(fields.get("message") or error)
    where = f"group {group!r}, {operation}" + (f" ({phase})" if phase else "")
    match error:
        case native.WaitTimeout():
            return Timeout(
                f"{where}: {_named(ranks)} did not arrive within {waited_s:.3g} s ({message})",
                operation=operation,
                phase=phase,
                ranks=ranks,
                waited_s=waited_s,
            )
        case native.PeerDied():
            lost = ranks[0] if ranks else -1
            return PeerLost(
                f"{where}: {_named(ranks)} was lost after {waited_s:.3g} s of waiting ({message})",
                operation=operation,
                phase=phase,
                rank=lost,
                waited_s=waited_s,
            )
        case native.ParameterMismatch():
            field, mine, theirs = (str(fields.get(key, "")) for key in ("field", "mine", "theirs"))
            return Mismatch(
                f"{where}: {field} is {mine} on rank {rank} and {theirs} on {_named(ranks)} ({message})",
                field=field,
                mine=mine,
                rank=ranks[0] if ranks else -1,
                theirs=theirs,
            )
        case native.OutOfMemory():
            requested, allocated, limit = (int(fields.get(key) or 0) for key in ("requested", "allocated", "limit"))
            whose = ranks[0] if ranks else rank
            return OutOfWindowMemory(
                f"{where}: the window of rank {whose} has no room for {requested} bytes: {allocated} of "
                f"{limit} are in use ({message}; knob: window_limit, CAM_WINDOW_LIMIT)",
                rank=whose,
                requested=requested,
                allocated=allocated,
                limit=limit,
            )
        case native.BadInput():
            return InputError(f"{where}: {message}")
    return GroupAborted(f"{where}: the group is broken: {message}")


def _named(ranks: list[int]) -> str:
    if not ranks:
        return "a peer"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
