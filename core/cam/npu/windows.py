"""Windows of CAM's own kernels: memory of each rank that its peers' kernels write, equally large on all ranks.

On CPUs a window is a memfd that peers open through /proc and map; on NPUs device memory handed over by torch_npu's
interprocess handles, which is not run on hardware. Either way the ranks share one host.
"""

import ctypes
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from cam.errors import GroupAborted, NotReachable
from cam.group import Group
from cam.memory.segment import Segment, doubt
from cam.native import kernels as native

#: Before the window proper: on CPUs the segment's number, and the alarm. Keeps what follows aligned to a page.
_HEAD_BYTES = 4096
_ALARM = 64


class Windows:
    """memory: int8 [nbytes], the own window, zero at first. bases: addresses here of every rank's window, by rank."""

    def __init__(self, rank: int, heads: Sequence[Tensor], keep: Sequence[object]) -> None:
        self.memory = heads[rank][_HEAD_BYTES:]
        self.bases = [head.data_ptr() + _HEAD_BYTES for head in heads]
        self._rank = rank
        self._alarms = [head[_ALARM : _ALARM + 4].view(torch.int32) for head in heads]
        self._keep = keep

    def raise_alarm(self) -> None:
        """Tells all peers that this rank has given up in the middle of an operation."""
        for alarm in self._alarms:
            alarm.fill_(self._rank + 1)

    def alarm(self) -> int | None:
        """The rank that has given up, if any."""
        raised = int(self._alarms[self._rank][0])
        return raised - 1 if raised else None


class _Offer(msgspec.Struct, frozen=True):
    """What a rank tells a peer about its window: a descriptor's number and the segment's, or an NPU handle."""

    fd: int = -1
    nonce: bytes = b""
    handle: tuple[int, bytes, int, int, bytes, int, bytes, bool] | None = None
    error: str = ""


class _Outcome(msgspec.Struct, frozen=True):
    error: str = ""


T = TypeVar("T", bound=msgspec.Struct)


def open_windows(group: Group, nbytes: int, device: torch.device, timeout_s: float) -> Windows:
    """Windows of nbytes on `device`, on every rank. Collective.

    Raises NotReachable on all ranks alike when one of them cannot make or open one; Timeout, PeerLost.
    """
    nbytes += _HEAD_BYTES
    if device.type == "npu":
        return Windows(group.rank, _open_npu(group, nbytes, timeout_s, device), [])
    mappings = _open_cpu(group, nbytes, timeout_s)
    return Windows(group.rank, [_bytes_at(each.address, nbytes) for each in mappings], mappings)


def _open_cpu(group: Group, nbytes: int, timeout_s: float) -> list[Any]:
    segment: Segment | None = None
    try:
        offer = _Offer()
        try:
            segment = Segment(f"{group.name}-ascend-{group.rank}", nbytes)
            offer = _Offer(segment.fd, segment.nonce)
        except OSError as error:
            offer = _Offer(error=f"a window of {nbytes} bytes cannot be made: {error}")
        offers = _tell(group, [offer] * group.size, "make windows", _Offer, timeout_s)
        mappings: list[Any] = []
        outcome = _Outcome()
        try:
            mappings = [_map(group, rank, each, nbytes) for rank, each in enumerate(offers)]
        except (OSError, NotReachable) as error:
            outcome = _Outcome(str(error))
        # Nobody may close, or write, before all have mapped.
        _tell(group, [outcome] * group.size, "map windows", _Outcome, timeout_s)
        return mappings
    finally:
        if segment is not None:
            segment.close()


def _map(group: Group, rank: int, offer: _Offer, nbytes: int) -> Any:
    fd = os.open(f"/proc/{group.peers[rank].pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        why = doubt(fd, offer.nonce, nbytes)
        if why:
            raise NotReachable(f"rank {rank}: {why}")
        return native.Mapping(fd, nbytes)
    finally:
        os.close(fd)


def _bytes_at(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_int8 * nbytes).from_address(address), dtype=torch.int8)


def _open_npu(group: Group, nbytes: int, timeout_s: float, device: torch.device) -> list[Tensor]:
    """Not run on hardware: written against torch_npu 2.13's own use of these two functions (multiprocessing)."""
    own = torch.zeros(nbytes, dtype=torch.int8, device=device)
    torch.get_device_module(device).synchronize()
    storage: Any = own.untyped_storage()
    # A handle for each peer: every one counts as a reference of its own.
    offers = _tell(
        group, [_Offer(handle=storage._share_npu_()) for _ in range(group.size)], "make windows", _Offer, timeout_s
    )
    heads, outcome = [own] * group.size, _Outcome()
    try:
        for rank, offer in enumerate(offers):
            if rank != group.rank:
                theirs = torch.UntypedStorage._new_shared_npu(*(offer.handle or ()))  # type: ignore[attr-defined]
                heads[rank] = torch.empty(0, dtype=torch.int8, device=device).set_(theirs)
    except RuntimeError as error:
        outcome = _Outcome(f"a peer's device memory cannot be opened: {error}")
    _tell(group, [outcome] * group.size, "map windows", _Outcome, timeout_s)
    return heads


def _tell(group: Group, messages: Sequence[T], operation: str, kind: type[T], timeout_s: float) -> list[T]:
    """messages[r] to rank r; returns what the ranks told this one. Raises on all ranks when one tells of an error."""
    payloads = [msgspec.msgpack.encode(message) for message in messages]
    told = [
        msgspec.msgpack.decode(payload, type=kind)
        for payload in group.exchange(payloads, operation=operation, timeout=timeout_s)
    ]
    for rank, message in enumerate(told):
        if message.error:  # type: ignore[attr-defined]  # both kinds have it
            raise NotReachable(f"group {group.name!r}, {operation}: rank {rank}: {message.error}")  # type: ignore[attr-defined]
    return told


def gave_up(group: Group, operation: str, rank: int) -> GroupAborted:
    """The error for an alarm."""
    return GroupAborted(f"group {group.name!r}, {operation}: rank {rank} gave up in the middle; its own error says why")
