"""The engine: one process's end of all its cache transfers."""

import atexit
import os
import secrets as random
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch

from cam import host
from cam.deadline import Deadline, seconds
from cam.errors import ForkedProcess, InputError, NotReachable
from cam.kv import messages as m
from cam.kv.agent import Agent
from cam.kv.blocks import Blocks, block_ids, span_of
from cam.kv.cache import Cache
from cam.kv.events import Event, Inbox
from cam.kv.geometry import Geometry, Layer
from cam.kv.leases import Leases
from cam.kv.link import Link, connect, connect_tcp
from cam.kv.metrics import Metrics
from cam.kv.options import Options
from cam.kv.planner import Plan, Span, plan
from cam.kv.prepared import Context, Prepared, Stretch, close_when_done
from cam.kv.remote import Part, Remote, reach
from cam.kv.routes import compare
from cam.kv.service import EngineService, Transports
from cam.kv.transfer import Transfer
from cam.memory.pool import Pool
from cam.transport import names
from cam.transport.registry import unknown

Direction = Literal["read", "write"]

_alive: "weakref.WeakSet[Engine]" = weakref.WeakSet()


class Engine:
    """Registers this process's KV cache and moves blocks between it and other engines'.

    name: for people; messages and metrics show it. tp_rank, tp_size: this process's place among the
    tensor-parallel ranks of its instance. engine_id: unique; None makes a new one, so that a restarted process is
    not taken for the old one. secret: known to all engines that may talk to each other; None: a random one that
    travels inside the description, which then must not be published. listen: the TCP address for peers that the
    Unix socket does not reach; None: none. port: 0 lets the system choose; `address` has the result.

    Thread-safe. Close it, or use it as a context manager. Raises InputError, ConfigError.
    """

    def __init__(
        self,
        name: str,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        engine_id: str | None = None,
        secret: bytes | str | None = None,
        listen: str | None = "127.0.0.1",
        port: int = 0,
        options: Options | None = None,
    ) -> None:
        if not 0 <= tp_rank < tp_size:
            raise InputError(f"tp_rank must be in 0..tp_size-1, got {tp_rank} of {tp_size}")
        self.options = options or Options()
        for transport in self.options.transports:
            if transport not in names():
                raise unknown(transport)
        self.name, self.engine_id = name, engine_id or str(uuid.uuid4())
        self._me = m.Who(self.engine_id, name, tp_rank, tp_size)
        self._given_secret = secret is not None
        given = secret.encode() if isinstance(secret, str) else secret
        self._secret = random.token_bytes(m.SECRET_BYTES) if given is None else given
        if not self._secret:
            raise InputError("secret must not be empty")
        self._lock = threading.Lock()
        self._pool = Pool(f"kv-{name}", self.options.memory_limit)
        self._remotes: set[Remote] = set()
        self._closed = self._forked = False
        mover = self.options.mover()
        self._cache = Cache(self._me, self._pool, self.options.settings(listen), mover)
        self._inbox = Inbox()
        self._leases = Leases(self.options.lease_s, self._inbox.put)
        self._metrics = Metrics(name, lambda: {**self._leases.counts, "active": self._leases.active()})
        self._transports = Transports(self._cache.home, self.options.transports)
        self._context = Context(
            mover, self._metrics, self.options.inline_bytes, self.options.timeout_s, self._cache.positions
        )
        self._agent = Agent(name, self.engine_id, self._secret, listen, port)
        self._agent.start(
            EngineService(
                self.describe,
                lambda: (self._cache.mine.geometries, self._cache.mine.addresses),
                self._transports,
                mover,
                self._leases,
                self._inbox,
                self._metrics,
            )
        )
        _alive.add(self)

    # --- memory ---------------------------------------------------------------------------------------------------

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in memory that peers of this host can map. Raises OutOfWindowMemory."""
        return self._cache.empty(shape, dtype)

    def adopt(self, tensors: Sequence[torch.Tensor], *, keep: bool = True) -> int:
        """Moves the storages of these tensors into memory that peers of this host can map (see Pool.adopt). Before
        `register`. keep=False: without their contents. Returns the bytes that moved."""
        return self._cache.adopt(tensors, keep)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether peers of this host can map it."""
        return self._cache.holds(tensor)

    # --- being reached --------------------------------------------------------------------------------------------

    @property
    def address(self) -> tuple[str, int] | None:
        """Where the agent listens on TCP."""
        return self._agent.address

    def register(self, layers: Sequence[Layer]) -> None:
        """Makes the cache known; once. The tensors must live, and stay where they are, until `close`. Raises
        InputError."""
        self._check_usable()
        self._cache.register(layers)

    def describe(self) -> bytes:
        """What a peer needs to open this engine: pass it on as you like. Raises InputError before `register`."""
        address = self.address
        if address is not None and self.options.advertise is not None:
            address = self.options.advertise, address[1]
        secret = b"" if self._given_secret else self._secret
        return self._cache.describe(host.boot_id(), self._agent.socket_name, address, secret)

    def lease(
        self, lease_id: str | None = None, *, ttl_s: float | None = None, tag: bytes = b"", readers: int = 1
    ) -> str:
        """Lends blocks until `readers` different instances, with all their ranks, have released them, or until nobody
        has touched the lease for ttl_s seconds (None: options.lease_s); `poll` says when. Which blocks is the caller's
        affair.

        lease_id: used once, the same on all ranks where peers use one id for all; None: a new one. A peer that is
        quicker than this call is remembered. Returns the id. Raises InputError.
        """
        self._check_usable()
        chosen = lease_id or str(uuid.uuid4())
        self._leases.grant(chosen, ttl_s, tag, readers)
        self._agent.wake()  # its time to live may be the next thing to happen
        return chosen

    def end_lease(self, lease_id: str) -> bool:
        """Takes the blocks back; who still reads them will find out. False: it had ended."""
        return self._leases.end(lease_id)

    def poll(self) -> list[Event]:
        """What peers said, which leases ended, which peers are gone, since the last call. Never blocks."""
        return self._inbox.take()

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` would return something; -1 after `close`."""
        return self._inbox.fileno()

    # --- reaching others ------------------------------------------------------------------------------------------

    def fetch(self, address: str, port: int, *, timeout: float | timedelta | None = None) -> bytes:
        """The description of the engine that listens there. Needs a shared secret. Raises NotReachable, Timeout."""
        self._check_usable()
        deadline = Deadline(seconds(timeout, self.options.timeout_s))
        link = connect_tcp(address, port, self._secret, self._me, "", deadline)
        try:
            return link.ask(m.AskDescription(), m.DescriptionAnswer, deadline, "fetch").data
        finally:
            link.close()

    def open(self, *descriptions: bytes, transport: str = "auto", timeout: float | timedelta | None = None) -> Remote:
        """Connects to an instance: one description for each of its ranks, in any order.

        transport: "auto" takes the first of options.transports that both sides can prove to work; else that one.
        Raises InputError, BackendUnavailable (no such transport), Mismatch (both values), NotReachable (every
        transport's reason), PeerLost, Timeout.
        """
        self._check_usable()
        mine = self._cache.mine
        if transport != "auto" and transport not in names():
            raise unknown(transport)
        wanted = self.options.transports if transport == "auto" else (transport,)
        began = time.monotonic()
        deadline = Deadline(seconds(timeout, self.options.timeout_s))
        if not descriptions:
            raise InputError("open needs a description for each rank of the instance")
        try:
            known = [m.read_description(each) for each in descriptions]
        except ValueError as error:
            raise InputError(f"open: {error}") from None
        compare(mine, known)
        links: list[Link] = []
        parts: list[Part] = []
        try:
            for each in known:
                links.append(connect(each, each.secret or self._secret, self._me, deadline))
                parts.append(reach(each, links[-1], mine, wanted, self._transports.get, deadline))
            remote = Remote(parts, mine, self._me, self.options.timeout_s, self._forget)
        except BaseException:
            for part in parts:
                part.channel.close()
            for link in links:
                link.close()
            raise
        with self._lock:
            closed = self._closed
            self._remotes.add(remote)
        if closed:
            remote.close()
            self._check_usable()
        self._metrics.handshake(remote.name, time.monotonic() - began)
        return remote

    def prepare(
        self,
        direction: Direction,
        remote: Remote,
        remote_blocks: Blocks,
        local_blocks: Blocks,
        *,
        tokens: int | None = None,
        remote_start: int = 0,
        local_start: int = 0,
        checksum: bool | None = None,
    ) -> Prepared:
        """Works out a transfer that can then be posted often, also layer by layer.

        remote_blocks, local_blocks: block ids. The tokens of each side's blocks, laid end to end, are numbered;
        `tokens` of them move, from remote_start on there and from local_start on here. Without `tokens`, equal
        block sizes pair the blocks one to one; unequal ones must hold equally many tokens. Raises InputError.
        """
        self._check_usable()
        if direction not in ("read", "write"):
            raise InputError(f"direction must be 'read' or 'write', got {direction!r}")
        theirs, mine = block_ids("remote_blocks", remote_blocks), block_ids("local_blocks", local_blocks)
        plans: dict[tuple[Geometry, Geometry, range], tuple[Plan, Span]] = {}
        stretches = []
        for lane in remote.lanes[direction]:
            key = lane.mine, lane.theirs, lane.heads
            found = plans.get(key)
            if found is None:
                span = span_of(lane.mine, lane.theirs, len(mine), len(theirs), tokens, local_start, remote_start)
                found = plans[key] = plan(lane.mine, lane.theirs, lane.heads, mine, theirs, span), span
            stretches.append(Stretch(lane, *found))
        on = self.options.checksum if checksum is None else checksum
        if on == "auto":
            on = not remote.local
        return Prepared(self._context, remote, direction, stretches, mine, theirs, bool(on))

    def read(
        self,
        remote: Remote,
        remote_blocks: Blocks,
        local_blocks: Blocks,
        *,
        layers: Iterable[str | int] | None = None,
        tokens: int | None = None,
        remote_start: int = 0,
        local_start: int = 0,
        lease: str | None = None,
        notify: bytes | None = None,
        timeout: float | timedelta | None = None,
        checksum: bool | None = None,
    ) -> Transfer:
        """Brings blocks here. See `prepare` for which; empty lists are legal.

        layers: names, or positions in `register`; None: all. lease: of every remote rank: touched before, released
        after, whatever becomes of the transfer; if it was over by then, the blocks are failed ones. notify: said to
        every remote rank when all has arrived. checksum: None: as options say. Raises InputError, PeerLost,
        NotReachable; what happens later is the Transfer's.
        """
        once = self.prepare(
            "read", remote, remote_blocks, local_blocks,
            tokens=tokens, remote_start=remote_start, local_start=local_start, checksum=checksum,
        )  # fmt: skip
        return self._post_once(once, layers, lease, notify, timeout)

    def write(
        self,
        remote: Remote,
        remote_blocks: Blocks,
        local_blocks: Blocks,
        *,
        layers: Iterable[str | int] | None = None,
        tokens: int | None = None,
        remote_start: int = 0,
        local_start: int = 0,
        lease: str | None = None,
        notify: bytes | None = None,
        timeout: float | timedelta | None = None,
        checksum: bool | None = None,
    ) -> Transfer:
        """Takes blocks there: as `read`, the other way round."""
        once = self.prepare(
            "write", remote, remote_blocks, local_blocks,
            tokens=tokens, remote_start=remote_start, local_start=local_start, checksum=checksum,
        )  # fmt: skip
        return self._post_once(once, layers, lease, notify, timeout)

    # --- the rest -------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """See cam.kv.metrics.Metrics.snapshot."""
        return self._metrics.snapshot()

    def prometheus(self) -> str:
        """The same in Prometheus' text format."""
        return self._metrics.prometheus()

    def close(self) -> None:
        """Cancels and waits for what is under way, leaves all peers, stops listening. Tensors stay valid.
        Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            remotes = list(self._remotes)
        if self._forked:
            return
        for remote in remotes:
            remote.close()
        self._agent.close()
        self._transports.close()
        self._cache.close()
        self._inbox.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Engine {self.name} ({self.engine_id}), rank {self._me.tp_rank} of {self._me.tp_size}>"

    def _post_once(
        self,
        once: Prepared,
        layers: Iterable[str | int] | None,
        lease: str | None,
        notify: bytes | None,
        timeout: float | timedelta | None,
    ) -> Transfer:
        try:
            transfer = once.post(layers=layers, lease=lease, notify=notify, timeout=timeout)
        except BaseException:
            once.close()
            raise
        close_when_done(transfer, once)
        return transfer

    def _forget(self, remote: Remote) -> None:
        with self._lock:
            self._remotes.discard(remote)

    def _check_usable(self) -> None:
        if self._forked:
            raise ForkedProcess(f"engine {self.name} belongs to the parent process: make one in this process")
        if self._closed:
            raise NotReachable(f"engine {self.name} was closed")

    def leave_to_parent(self) -> None:
        """In a forked child: gives up this process's copies of descriptors."""
        self._forked = self._closed = True
        self._lock = threading.Lock()
        for remote in list(self._remotes):
            remote.abandon()
        self._agent.release_descriptors()


def _at_exit() -> None:
    """Of an engine that nobody closed: its peers hear good-bye, and its threads are gone before the interpreter is."""
    for each in list(_alive):
        each.close()


def _after_fork_in_child() -> None:
    for each in list(_alive):
        each.leave_to_parent()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
