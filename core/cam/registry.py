"""The groups of this process, by name; and what becomes of them in a forked child."""

import os
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING

from cam.errors import InputError

if TYPE_CHECKING:
    from cam.group import Group

_lock = threading.Lock()
#: By name; None while a group is being joined.
_groups: "dict[str, Group | None]" = {}
_alive: "weakref.WeakSet[Group]" = weakref.WeakSet()


def group(name: str = "cam") -> "Group":
    """The open group of that name in this process. Raises InputError, which lists those there are."""
    with _lock:
        found = _groups.get(name)
        names = sorted(key for key, value in _groups.items() if value is not None)
    if found is None:
        raise InputError(f"no group {name!r} is open in this process; open are: {', '.join(names) or 'none'}")
    return found


def groups() -> "list[Group]":
    """The open groups of this process."""
    with _lock:
        return [each for each in _groups.values() if each is not None]


class reserve:  # noqa: N801  # used like a function: `with reserve(name) as reservation`
    """Holds a name while its group is joined, so that two threads cannot take the same."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> "reserve":
        with _lock:
            if self._name in _groups:
                raise InputError(f"a group {self._name!r} is open in this process: close it, or give another name=")
            _groups[self._name] = None
        return self

    def keep(self, joined: "Group") -> None:
        with _lock:
            _groups[self._name] = joined

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            forget(self._name, None)


def forget(name: str, joined: "Group | None") -> None:
    """Frees a name, if it still belongs to that group."""
    with _lock:
        if _groups.get(name) is joined:
            _groups.pop(name, None)


def watch(each: "Group") -> None:
    """Lets a group know when its process has forked."""
    _alive.add(each)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # may be held by a thread that the child does not have
    _groups.clear()
    for each in list(_alive):
        each.leave_to_parent()


# Instead of comparing process ids in every call, which would cost a system call each.
os.register_at_fork(after_in_child=_after_fork_in_child)
