"""Groups of some ranks of an existing group, which serves as their rendezvous."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from cam.collectives.messages import Messages, messages_of
from cam.deadline import Deadline, seconds
from cam.errors import InputError
from cam.group import Group
from cam.joining import join

#: torch's tags are not negative.
_TAG = -1


class MessageRendezvous:
    """Among `ranks` of a group, by messages: the other ranks need not take part."""

    def __init__(self, group: Group, ranks: Sequence[int]) -> None:
        self._messages: Messages = messages_of(group)
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(group.rank), len(self._ranks)

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        others = [each for each in self._ranks if each != self._ranks[self.rank]]
        length = torch.tensor([len(payload)])
        content = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        for each in others:
            self._messages.send(length, each, _TAG, max(deadline.left_s, 0.001))
            self._messages.send(content, each, _TAG, max(deadline.left_s, 0.001))
        return [payload if each not in others else self._receive(each, deadline) for each in self._ranks]

    def _receive(self, source: int, deadline: Deadline) -> bytes:
        length = torch.empty(1, dtype=torch.int64)
        self._messages.wait(self._messages.post(length, source, _TAG), max(deadline.left_s, 0.001))
        content = torch.empty(int(length), dtype=torch.uint8)
        self._messages.wait(self._messages.post(content, source, _TAG), max(deadline.left_s, 0.001))
        return content.numpy().tobytes() if _HAS_NUMPY else bytes(content.tolist())


def create_group(
    name: str,
    ranks: Sequence[int] | None = None,
    *,
    strategy: str = "auto",
    parent: Group,
    timeout: float | timedelta | None = None,
    **config_fields: Any,
) -> Group | None:
    """See cam.create_group."""
    chosen = list(range(parent.size)) if ranks is None else [int(rank) for rank in ranks]
    if not chosen or len(set(chosen)) < len(chosen) or not all(0 <= rank < parent.size for rank in chosen):
        raise InputError(
            f"create_group({name!r}): ranks must be different ranks of group {parent.name!r} "
            f"(0..{parent.size - 1}), got {chosen}"
        )
    if strategy not in ("auto", "flat", "direct"):
        raise InputError(f"create_group({name!r}): strategy must be auto, flat or direct, got {strategy!r}")
    if parent.rank not in chosen:
        return None
    settings = parent.config.replace(name=name, collective_algorithm=strategy, **config_fields)
    deadline = Deadline(seconds(timeout, settings.timeout_s))
    return join(lambda: MessageRendezvous(parent, chosen), settings, deadline)


def _numpy_is_there() -> bool:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True


_HAS_NUMPY = _numpy_is_there()
