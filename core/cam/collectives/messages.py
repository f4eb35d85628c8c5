"""Messages between two ranks of a cam.Group, with tags. See kernels/cpu/channels.h."""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

import cam_kernels as native
from cam.deadline import seconds
from cam.errors import GroupAborted, InputError
from cam.group import Group
from cam.native_errors import NATIVE_ERRORS, translate

T = TypeVar("T")
Timeout = float | timedelta | None

ANY_SOURCE = -1


class Messages:
    """Of one group, which messages_of(group) gives.

    A send is complete when it returns: the message lies in this rank's window until it is received. A receive is
    posted, and then waited for or asked for.

    These calls take no turn on the group: they neither wait for its collectives nor disturb them, and a failure here
    does not break the group.
    """

    __slots__ = ("_channels", "_held")

    def __init__(self, group: Group) -> None:
        self._held = weakref.ref(group)  # the group is the key by which this is found
        self._channels = native.Channels(group.endpoint)

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0, timeout: Timeout = None) -> None:
        memory = _dense("send", tensor).contiguous()
        limit = seconds(timeout, self._group.config.timeout_s)
        size = memory.numel() * memory.element_size()
        self._do("send", lambda: self._channels.send(to, tag, memory.data_ptr(), size, limit))

    def post(self, tensor: torch.Tensor, source: int, tag: int = 0) -> int:
        """tensor: contiguous, kept alive by the caller until the receive has ended."""
        memory = _dense("recv", tensor)
        size = memory.numel() * memory.element_size()
        return self._do("recv", lambda: self._channels.post(source, tag, memory.data_ptr(), size))

    def poll(self, receive: int) -> int:
        """The source rank once the message is here, else -1."""
        return self._do("recv", lambda: self._channels.test(receive))

    def wait(self, receive: int, timeout: Timeout = None) -> int:
        """The source rank. Raises Timeout, PeerLost, Mismatch (the sizes differ; the message is lost)."""
        limit = seconds(timeout, self._group.config.timeout_s)
        return self._do("recv", lambda: self._channels.wait(receive, limit))

    @property
    def _group(self) -> Group:
        group = self._held()
        if group is None:
            raise GroupAborted("the group of these messages is gone")
        return group

    def _do(self, operation: str, call: Callable[[], T]) -> T:
        group = self._group
        group.endpoint  # noqa: B018  # raises when the group is closed, or its process was forked
        try:
            return call()
        except NATIVE_ERRORS as error:
            raise translate(error, group.name, operation, group.rank) from None


def messages_of(group: Group) -> Messages:
    """The group's one Messages: a rank has one outbox, and its peers walk one list of messages in it."""
    with _lock:
        found = _of_group.get(group)
        if found is None:
            found = _of_group[group] = Messages(group)
        return found


_lock = threading.Lock()
_of_group: "weakref.WeakKeyDictionary[Group, Messages]" = weakref.WeakKeyDictionary()


def _dense(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise InputError(f"{name}: a dense CPU tensor is needed, got {tensor.layout} on {tensor.device}")
    return tensor.resolve_conj().resolve_neg()
