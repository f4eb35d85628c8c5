"""A transfer that is worked out once and posted as often as wanted; and how one is carried out."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from cam.deadline import Deadline, seconds
from cam.errors import CamError, InputError, PeerLost, Timeout, TransferCancelled, TransferFailed
from cam.kv import messages as m
from cam.kv.integrity import blocks_of, digests
from cam.kv.link import Refused
from cam.kv.metrics import Metrics
from cam.kv.planner import Plan, Span
from cam.kv.remote import Remote
from cam.kv.routes import Lane
from cam.kv.transfer import Transfer
from cam.transport import Batch, Ended, Outcome, Ready
from cam.transport.pieces import Int64s
from cam_kernels import Mover

_log = logging.getLogger(__name__)

#: For telling the other side that a failed transfer is over, when its own time has run out.
_FAREWELL_S = 1.0


@dataclass(frozen=True, eq=False)
class Stretch:
    """One lane's share of a transfer."""

    lane: Lane
    plan: Plan
    span: Span


@dataclass(frozen=True, eq=False)
class Context:
    """What carrying out needs of the engine. layers: the positions that a caller's choice of layers means."""

    mover: Mover
    metrics: Metrics
    inline_bytes: int
    timeout_s: float
    layers: Callable[[Iterable[str | int]], frozenset[int]]


class Prepared:
    """Blocks of one remote instance paired with blocks here. Made by Engine.prepare; thread-safe."""

    def __init__(
        self,
        context: Context,
        remote: Remote,
        direction: str,
        stretches: Sequence[Stretch],
        my_blocks: Int64s,
        their_blocks: Int64s,
        checksum: bool,
    ) -> None:
        self._context, self.remote, self.direction = context, remote, direction
        self._stretches = tuple(stretches)
        self.my_blocks, self.their_blocks, self.checksum = my_blocks, their_blocks, checksum
        self._lock = threading.Lock()
        self._ready: dict[frozenset[int] | None, list[tuple[Stretch, Ready]]] = {}
        self._closed = False

    def post(
        self,
        *,
        layers: Iterable[str | int] | None = None,
        lease: str | None = None,
        notify: bytes | None = None,
        timeout: float | timedelta | None = None,
    ) -> Transfer:
        """Starts it, for all layers or some. Raises InputError, PeerLost, NotReachable."""
        context = self._context
        chosen = None if layers is None else context.layers(layers)
        _check_words(lease, notify)
        timeout_s = seconds(timeout, context.timeout_s)
        work = self._entries(chosen)
        nbytes = sum(each.plan.nbytes * len(each.lane.layers) for each, _ in work)
        transfer = Transfer(self.direction, self.remote.name, self.remote.transport, nbytes, timeout_s)
        alone = lease is None and notify is None and not self.checksum
        inline = alone and (not nbytes or (self.remote.local and nbytes <= context.inline_bytes))
        run = _Run(context, self, transfer, work, lease, notify)
        self.remote.start(transfer, run.carry_out, inline)
        return transfer

    def close(self) -> None:
        """Gives back what transports hold. No transfer of it may be under way. Idempotent."""
        with self._lock:
            self._closed = True
            ready, self._ready = list(self._ready.values()), {}
        for entries in ready:
            for _, each in entries:
                each.close()

    def _entries(self, layers: frozenset[int] | None) -> list[tuple[Stretch, Ready]]:
        with self._lock:
            if self._closed:
                raise InputError("this prepared transfer was closed")
            found = self._ready.get(layers)
            if found is None:
                found = self._ready[layers] = self._prepare(layers)
            return found

    def _prepare(self, layers: frozenset[int] | None) -> list[tuple[Stretch, Ready]]:
        entries: list[tuple[Stretch, Ready]] = []
        for each in self._stretches:
            lane = each.lane if layers is None else each.lane.only(layers)
            if lane is None or not len(each.plan.table):
                continue
            batch = Batch(each.plan.table, lane.my_bases, lane.their_bases)
            channel = self.remote.parts[lane.part].channel
            entries.append((Stretch(lane, each.plan, each.span), channel.prepare(batch, self.direction == "read")))
        return entries


class _Run:
    """One transfer being carried out."""

    def __init__(
        self,
        context: Context,
        prepared: Prepared,
        transfer: Transfer,
        work: list[tuple[Stretch, Ready]],
        lease: str | None,
        notify: bytes | None,
    ) -> None:
        self._context, self._prepared, self._transfer = context, prepared, transfer
        self._work, self._lease, self._notify = work, lease, notify
        self._remote = prepared.remote
        self._copying_ns = 0
        self._corrupt: set[int] = set()

    def carry_out(self) -> None:
        transfer = self._transfer
        error: CamError | None = None
        try:
            error = self._move()
        except CamError as cause:
            error = self._failure(str(cause), cause)
        except Exception as cause:  # a bug must not leave a transfer that never ends
            _log.exception("%r", transfer)
            error = self._failure(f"{type(cause).__name__}: {cause}", None)
        if self._lease is not None or self._notify is not None:
            error = self._part_from_peers(error)
        failed: tuple[int, ...] = ()
        if error is not None:
            failed = tuple(sorted(self._corrupt)) if self._corrupt else self._all_blocks()
            level = logging.DEBUG if isinstance(error, TransferCancelled) else logging.WARNING
            _log.log(level, "%s", error)
        self._count(error)
        transfer.end(error, failed)

    def _move(self) -> CamError | None:
        if self._lease is not None:
            for part in self._remote.parts:
                answer = part.link.ask(m.Touch(self._lease), m.LeaseAnswer, self._deadline(), "lease")
                if not answer.alive:
                    return self._failure(f"{part.label}: {answer.reason}", None)
        if self._transfer.limits.is_cancelled():
            return self._ended(Outcome(Ended.CANCELLED))
        began = time.monotonic_ns()
        for _, ready in self._work:
            outcome = ready.run(self._transfer.limits)
            if outcome.ended is not Ended.DONE:
                return self._ended(outcome)
        self._copying_ns = time.monotonic_ns() - began
        return self._verify() if self._prepared.checksum else None

    def _verify(self) -> CamError | None:
        """Compares what both sides hold now: the same for a read and for a write."""
        prepared, corrupt = self._prepared, self._corrupt
        for stretch, _ in self._work:
            lane, plan = stretch.lane, stretch.plan
            part = self._remote.parts[lane.part]
            mine = digests(self._context.mover, plan, lane.my_bases, theirs=False)
            ask = m.AskDigest(
                mine=lane.mine,
                layers=list(lane.their_layers),
                first_head=lane.heads.start,
                heads=len(lane.heads),
                my_blocks=prepared.my_blocks.astype("<i8").tobytes(),
                their_blocks=prepared.their_blocks.astype("<i8").tobytes(),
                my_start=stretch.span.my_start,
                their_start=stretch.span.their_start,
                tokens=stretch.span.count,
            )
            theirs = part.link.ask(ask, m.DigestAnswer, self._deadline(), "checksum").digests
            positions = blocks_of(plan)
            if len(theirs) != len(mine):
                return self._failure(f"{part.label} sent {len(theirs)} checksums for {len(mine)} blocks", None)
            wrong = positions[np.array(mine, np.uint64) != np.array(theirs, np.uint64)]
            corrupt.update(prepared.my_blocks[wrong].tolist())
        if corrupt:
            return self._failure(f"the checksums of {len(corrupt)} block(s) differ", None)
        return None

    def _part_from_peers(self, error: CamError | None) -> CamError | None:
        """Releases the lease, and tells the ranks that all went well, if it did."""
        notify = self._notify is not None and error is None
        if self._lease is None and not notify:
            return error
        finish = m.Finish(self._lease or "", self._notify or b"", notify)
        left = Deadline(self._deadline().left_s or _FAREWELL_S)
        for part in self._remote.parts:
            try:
                answer = part.link.ask(finish, m.LeaseAnswer, left, "finish")
            except (PeerLost, Timeout, Refused) as cause:
                # Without a lease the data is good, but somebody waits for word of it. With one, nobody can say
                # whether the blocks were kept until the end.
                error = error or self._failure(f"{part.label}: {cause}", cause)
                continue
            if not answer.alive and error is None:
                error = self._failure(f"{part.label}: {answer.reason}, while its blocks were being read", None)
        return error

    def _ended(self, outcome: Outcome) -> CamError:
        if outcome.ended is Ended.CANCELLED:
            return TransferCancelled(f"{self._what()}: cancelled")
        if outcome.ended is Ended.LOST:
            cause: CamError | None = PeerLost(outcome.reason, operation=self._transfer.direction, phase="copy")
            return self._failure(f"the peer is lost: {outcome.reason}", cause)
        if outcome.ended is Ended.LATE:
            limits = self._transfer.limits
            waited = (time.monotonic_ns() - limits.deadline_ns) / 1e9
            cause = Timeout(
                f"{self._what()}: not done in time", operation=self._transfer.direction, phase="copy", waited_s=waited
            )
            return self._failure("not done in time (knob: timeout, timeout_s)", cause)
        lost = self._remote.lost()
        if lost:
            return self._failure(f"the peer is lost: {lost}", PeerLost(lost, operation=self._transfer.direction))
        return self._failure(outcome.reason, None)

    def _failure(self, why: str, cause: CamError | None) -> TransferFailed:
        return TransferFailed(f"{self._what()}: {why}", cause=cause)

    def _what(self) -> str:
        preposition = "from" if self._transfer.direction == "read" else "to"
        return f"{self._transfer.direction} {preposition} {self._remote.name} over {self._transfer.transport}"

    def _deadline(self) -> Deadline:
        return Deadline(max(0.0, (self._transfer.limits.deadline_ns - time.monotonic_ns()) / 1e9))

    def _all_blocks(self) -> tuple[int, ...]:
        positions = {position for each, _ in self._work for position in np.unique(each.plan.block).tolist()}
        return tuple(self._prepared.my_blocks[sorted(positions)].tolist())

    def _count(self, error: CamError | None) -> None:
        outcome = "done" if error is None else "cancelled" if isinstance(error, TransferCancelled) else "failed"
        transfer = self._transfer
        self._context.metrics.count(
            self._remote.name,
            transfer.transport,
            transfer.direction,
            outcome=outcome,
            nbytes=transfer.nbytes,
            blocks=len(self._prepared.my_blocks) if transfer.nbytes else 0,
            seconds=transfer.elapsed_s,
            copying_s=self._copying_ns / 1e9,
            corrupt_blocks=len(self._corrupt),
        )
        if self._notify is not None and error is None:
            self._context.metrics.notified("sent")


def close_when_done(transfer: Transfer, prepared: Prepared) -> None:
    """A transfer that was prepared for one use."""

    def close(_: Transfer) -> None:
        with contextlib.suppress(CamError):
            prepared.close()

    transfer.add_done_callback(close)


def _check_words(lease: str | None, notify: bytes | None) -> None:
    if notify is not None and (not isinstance(notify, bytes) or len(notify) > m.MAX_PAYLOAD):
        raise InputError(f"notify must be at most {m.MAX_PAYLOAD} bytes, got {type(notify).__name__}")
    if lease is not None and (not isinstance(lease, str) or not lease):
        raise InputError(f"lease must be the id of a lease, got {lease!r}")
