"""Which ranks share this host's memory, decided once, by all ranks together.

Four steps over the rendezvous; in each, every rank tells the others its part or what went wrong on its
side, so that one rank's failure is everybody's error at once, with its cause, and nobody is left waiting:

    hello    host (boot id), socket; rank 0 adds the secret that the handover proves knowledge of
    reach    the own segment's size and number, and the peers on this host that could not be reached
    links    which segments were received and proven to be shared memory
    ready    whether the memory could be mapped (this step belongs to the caller: see Links.agree)
"""

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

import msgspec

from cam import host
from cam.deadline import Deadline
from cam.errors import CamError, GroupAborted, Mismatch
from cam.memory.handover import SECRET_BYTES, Handed, Handover
from cam.memory.segment import Segment, doubt
from cam.rendezvous import Rendezvous

PROTOCOL = 1

#: Bound on one rank's message of one step. The longest are lists of reasons, one line for each peer.
_MAX_MESSAGE_BYTES = 4 << 20

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Peer:
    """One rank of a group, as this rank sees it.

    pid: in this process's pid namespace. shares_memory: its window can be read and written from here;
    otherwise `reason` says in words why not.
    """

    rank: int
    pid: int
    shares_memory: bool
    reason: str = ""


class _Envelope(msgspec.Struct, frozen=True):
    """One rank's message of one step. error: what went wrong there; body is then empty."""

    protocol: int
    release: str
    error: str
    body: bytes


class _Hello(msgspec.Struct, frozen=True):
    size: int
    boot_id: str
    host: str
    pid: int
    address: bytes
    secret: bytes


class _Reach(msgspec.Struct, frozen=True):
    window_bytes: int
    nonce: bytes
    refusals: dict[int, str]


class _View(msgspec.Struct, frozen=True):
    refusals: dict[int, str]


class _Ready(msgspec.Struct, frozen=True):
    pass


class Links:
    """What this rank holds of its peers after `link`.

    peers: by rank, this rank included. handed: what each peer that shares memory handed over. segment: the
    own. unreachable: why this group cannot share memory as a whole, the same text on all ranks; empty when
    it can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        segment: Segment,
        peers: tuple[Peer, ...],
        handed: dict[int, Handed],
        unreachable: str,
    ) -> None:
        self._rendezvous = rendezvous
        self.segment, self.peers, self.handed, self.unreachable = segment, peers, handed, unreachable

    def agree(self, ready: Callable[[], None], deadline: Deadline) -> None:
        """The last step: runs ready() on every rank; raises on all of them when it raises on one."""

        def run() -> _Ready:
            ready()
            return _Ready()

        _step(self._rendezvous, "ready", run, _Ready, deadline)

    def close(self) -> None:
        """Closes the descriptors. What has mapped or duplicated them keeps working."""
        self.segment.close()
        for handed in self.handed.values():
            handed.close()
        self.handed = {}


def link(rendezvous: Rendezvous, make_segment: Callable[[int], Segment], deadline: Deadline) -> Links:
    """Finds out which peers share memory with this rank, and receives their segments.

    make_segment(n) makes the own segment, given that n ranks run on this host.
    Raises what went wrong here, GroupAborted for what went wrong at a peer, Timeout for a late peer.
    """
    rank = rendezvous.rank
    segment: Segment | None = None
    handed: dict[int, Handed] = {}
    handover = Handover(rank)
    try:
        hellos = _step(rendezvous, "hello", lambda: _hello(rendezvous, handover), _Hello, deadline)
        _check_size(rendezvous, hellos)
        local = [peer for peer in range(rendezvous.size) if hellos[peer].boot_id == hellos[rank].boot_id]

        def reach() -> _Reach:
            nonlocal segment
            segment = make_segment(len(local))
            lower = {peer: hellos[peer].address for peer in local if peer < rank}
            return _Reach(segment.size, segment.nonce, handover.knock(lower, deadline))

        reaches = _step(rendezvous, "reach", reach, _Reach, deadline)
        if segment is None:
            raise CamError("init (reach): no segment was made")
        own: Segment = segment
        callers = {peer for peer in local if peer > rank and rank not in reaches[peer].refusals}

        def swap() -> _View:
            nonlocal handed
            # The rest of the time is for telling the others who was late, or they would blame this rank.
            limit = Deadline(deadline.left_s * 0.8)
            handed, refusals = handover.exchange(own.fd, hellos[0].secret, callers, limit)
            for peer in list(handed):
                reason = doubt(handed[peer].fd, reaches[peer].nonce, reaches[peer].window_bytes)
                if reason:
                    handed.pop(peer).close()
                    refusals[peer] = reason
            return _View(reaches[rank].refusals | refusals)

        views = _step(rendezvous, "links", swap, _View, deadline)
    except BaseException:
        for each in handed.values():
            each.close()
        if segment is not None:
            segment.close()
        raise
    finally:
        handover.close()
    reasons = _reasons(hellos, views)
    for peer in [peer for peer in handed if _between(reasons, rank, peer)]:
        handed.pop(peer).close()
    peers = tuple(
        _peer(peer, rank, hellos[peer], handed.get(peer), _between(reasons, rank, peer))
        for peer in range(rendezvous.size)
    )
    return Links(rendezvous, own, peers, handed, _explain(reasons))


def _hello(rendezvous: Rendezvous, handover: Handover) -> _Hello:
    return _Hello(
        size=rendezvous.size,
        boot_id=host.boot_id(),
        host=socket.gethostname(),
        pid=os.getpid(),
        address=handover.address,
        secret=secrets.token_bytes(SECRET_BYTES) if rendezvous.rank == 0 else b"",
    )


def _check_size(rendezvous: Rendezvous, hellos: list[_Hello]) -> None:
    for rank, hello in enumerate(hellos):
        if hello.size != rendezvous.size:
            raise Mismatch(
                f"init (hello): world_size is {rendezvous.size} here and {hello.size} on rank {rank}",
                field="world_size",
                mine=str(rendezvous.size),
                rank=rank,
                theirs=str(hello.size),
            )


def _reasons(hellos: list[_Hello], views: list[_View]) -> dict[tuple[int, int], str]:
    """{(rank, peer): why rank cannot share memory with peer}, computed from the same messages on all
    ranks."""
    reasons = {}
    for rank, mine in enumerate(hellos):
        for peer, theirs in enumerate(hellos):
            if mine.boot_id != theirs.boot_id:
                reasons[rank, peer] = f"it runs on another host ({theirs.host}, this is {mine.host})"
            elif peer in views[rank].refusals:
                reasons[rank, peer] = views[rank].refusals[peer]
    return reasons


def _between(reasons: dict[tuple[int, int], str], rank: int, peer: int) -> str:
    """Why a pair does not share memory: as this rank found, or else as the peer did."""
    theirs = reasons.get((peer, rank), "")
    return reasons.get((rank, peer), f"seen from there: {theirs}" if theirs else "")


def _peer(peer: int, rank: int, hello: _Hello, handed: Handed | None, reason: str) -> Peer:
    if peer == rank:
        return Peer(rank, os.getpid(), True)
    return Peer(peer, hello.pid if handed is None else handed.pid, not reason, reason)


def _explain(reasons: dict[tuple[int, int], str]) -> str:
    if not reasons:
        return ""
    (rank, peer), reason = min(reasons.items())
    pairs = len({frozenset(pair) for pair in reasons})
    more = f" (and {pairs - 1} other pairs)" if pairs > 1 else ""
    return f"rank {rank} cannot share memory with rank {peer}: {reason}{more}"


def _step(rendezvous: Rendezvous, step: str, part: Callable[[], T], kind: type[T], deadline: Deadline) -> list[T]:
    """Runs part() and gathers everybody's result; raises on all ranks when it raises on one of them."""
    release = version("cam")
    failure: Exception | None = None
    try:
        envelope = _Envelope(PROTOCOL, release, "", msgspec.msgpack.encode(part()))
    except Exception as error:
        failure = error
        envelope = _Envelope(PROTOCOL, release, f"{type(error).__name__}: {error}"[:2000], b"")
    try:
        messages = rendezvous.all_gather(step, msgspec.msgpack.encode(envelope), deadline.left_s)
    except Exception:
        if failure is not None:
            raise failure from None
        raise
    if failure is not None:
        raise failure
    return [_open(message, rank, step, kind) for rank, message in enumerate(messages)]


def _open(message: bytes, rank: int, step: str, kind: type[T]) -> T:
    try:
        if len(message) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"{len(message)} bytes, at most {_MAX_MESSAGE_BYTES} are allowed")
        envelope = msgspec.msgpack.decode(message, type=_Envelope)
        if envelope.protocol == PROTOCOL and not envelope.error:
            return msgspec.msgpack.decode(envelope.body, type=kind)
    except (ValueError, msgspec.MsgspecError) as error:
        raise CamError(f"init ({step}): the message of rank {rank} is not understood: {error}") from None
    if envelope.protocol != PROTOCOL:
        raise Mismatch(
            f"init ({step}): rank {rank} runs cam {envelope.release} with protocol {envelope.protocol}, this "
            f"rank cam {version('cam')} with protocol {PROTOCOL}: install the same version everywhere",
            field="protocol",
            mine=str(PROTOCOL),
            rank=rank,
            theirs=str(envelope.protocol),
        )
    raise GroupAborted(f"init ({step}): rank {rank} failed: {envelope.error}")
