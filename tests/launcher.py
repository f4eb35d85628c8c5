"""The one launcher of N real processes for tests.

    with Ranks(4) as ranks:
        results = ranks.run(fn, x, PerRank([a, b, c, d]))     # fn(group, x, a) on rank 0, fn(group, x, b) on
        1 ..

- Ranks are forked from a fork server that has torch and cam loaded: starting 8 takes a fraction of a second.
  A pool outlives its `with` block and serves the next one with the same settings, so that hypothesis examples
  and whole test files run on live groups. A pool in which anything failed is thrown away.
- Nothing hangs: each run has a deadline, after which every rank writes its Python stacks, is killed, and
  RankFailed shows the stacks. The same happens at once when a rank raises or dies.
- Nothing is left: output goes to unnamed files, ranks die with pytest (see tests/forkserver_preload.py), the
  rendezvous is one TCPStore on a port that the kernel chose.

`fn` must be importable by name (module level); its tensors arrive and return as copies. Inside it
`reached("label")` tells `Run.wait_reached(rank, "label")`, which is how a test acts in the middle of a run
without sleeping.
"""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection as mp_connection
from multiprocessing import reduction
from typing import Any

import torch.distributed as dist

from tests import fork_server, wire
from tests.rank_process import RankEnv, Start, main, reached

__all__ = ["PerRank", "RankDied", "RankEnv", "RankFailed", "Ranks", "Run", "close_all", "reached"]

DEADLINE_S = 60.0
#: How long the other ranks may take to report as well after the first one has failed.
GRACE_S = 0.5
#: Idle pools are closed, least recently used first, when more processes than this would be alive.
MAX_IDLE_PROCESSES = 64
STDERR_TAIL = 6000


class PerRank:
    """Argument of Ranks.run that differs between ranks: one value per rank."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)


class RankDied(Exception):
    """A rank's process ended in the middle of a run. exitcode: negative = killed by that signal."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        self.rank, self.exitcode = rank, exitcode
        how = f"exit code {exitcode}"
        if exitcode is not None and exitcode < 0:
            how = f"killed by {signal.Signals(-exitcode).name}"
        super().__init__(f"rank {rank} died ({how})")


class RankFailed(Exception):
    """At least one rank raised, died or did not finish in time. failures: {rank: exception}."""

    def __init__(self, summary: str, failures: dict[int, BaseException], stderrs: dict[int, str]) -> None:
        self.failures = failures
        parts = [summary]
        for rank, error in sorted(failures.items()):
            parts.append(f"---- rank {rank}: {type(error).__name__}: {error}")
            parts.append(getattr(error, "remote_traceback", "").rstrip())
        for rank, text in sorted(stderrs.items()):
            if text.strip():
                parts.append(f"---- rank {rank} wrote:\n{text.rstrip()}")
        super().__init__("\n".join(part for part in parts if part))


class Ranks:
    """N ranks in N processes.

    world_size: number of ranks. group: False gives functions a RankEnv (rank, world_size, store) instead of a
    cam group. deadline: seconds for each run. config: fields of cam.Config, passed to cam.init.
    """

    def __init__(self, world_size: int, *, group: bool = True, deadline: float = DEADLINE_S, **config: Any) -> None:
        self.world_size, self.deadline = world_size, deadline
        # Idle pools must not hold on to memory: dozens of ranks with a gigabyte each would fill the machine.
        config = {"window_retain": 16 << 20, **config}
        self._key = (world_size, group, json.dumps(config, sort_keys=True, default=str))
        self._make = lambda: _Pool(world_size, group, config)
        self._pool: _Pool | None = None

    def __enter__(self) -> "Ranks":
        self._live()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        pool, self._pool = self._pool, None
        if pool is None:
            return
        if kind is not None or pool.tainted or pool.busy:
            pool.kill()
        else:
            _give_back(self._key, pool)

    @property
    def pids(self) -> list[int]:
        return self._live().pids

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal (SIGKILL, SIGSTOP, SIGCONT ...) to one rank. Later tests get other processes."""
        pool = self._live()
        pool.tainted = True
        os.kill(pool.pids[rank], signum)

    def discard(self) -> None:
        """For functions that catch errors themselves and leave a broken group behind: later tests get other ranks."""
        self._live().tainted = True

    def stderr(self, rank: int) -> str:
        """Tail of everything the rank has written to stdout and stderr."""
        return self._live().stderr(rank, since=0)

    def run(
        self, fn: Callable[..., Any], *args: Any, deadline: float | None = None, expect_errors: bool = False
    ) -> list[Any]:
        """fn(group, *args) on every rank; returns the results by rank.

        expect_errors: exceptions and deaths (RankDied) are returned in place of results. A missed deadline
        always raises RankFailed.
        """
        return self.start(fn, *args, deadline=deadline).join(expect_errors=expect_errors)

    def start(self, fn: Callable[..., Any], *args: Any, deadline: float | None = None) -> "Run":
        """Like run(), but returns while the ranks work."""
        return Run(self._live(), fn, args, self.deadline if deadline is None else deadline)

    def _live(self) -> "_Pool":
        if self._pool is None or self._pool.dead:
            self._pool = _take(self._key, self._make)
        return self._pool


class Run:
    """One function at work on all ranks of a pool."""

    _ids = itertools.count()

    def __init__(self, pool: "_Pool", fn: Callable[..., Any] | None, args: Sequence[Any], deadline: float) -> None:
        if pool.busy:
            raise RuntimeError("a run is already in progress on these ranks: join it first")
        self._pool, self._deadline = pool, deadline
        self._results: dict[int, Any] = {}
        self._failures: dict[int, BaseException] = {}
        self._reached: set[tuple[int, str]] = set()
        self._stderr_from = [pool.stderr_size(rank) for rank in range(pool.world_size)]
        self._id = -1 if fn is None else next(Run._ids)
        self._name = "start" if fn is None else getattr(fn, "__qualname__", repr(fn))
        self._expired = False
        messages: list[bytes] = []
        if fn is not None:
            messages = [
                wire.dumps((self._id, fn, _own(args, rank, pool.world_size))) for rank in range(pool.world_size)
            ]
        pool.busy = True
        # The only clock: whatever this process is blocked in, the timer ends the ranks and their pipes.
        self._timer = threading.Timer(deadline, self._expire)
        self._timer.daemon = True
        self._timer.start()
        for rank, message in enumerate(messages):
            with contextlib.suppress(OSError):  # it died while idle: reported by join
                pool.connections[rank].send_bytes(message)

    def wait_reached(self, rank: int, label: str) -> None:
        """Returns when the rank's function has called reached(label)."""
        while (rank, label) not in self._reached:
            pending = self._pending()
            if rank not in pending:
                error = self._failures.get(rank)
                raise self._failed(f"rank {rank} ended before it reached {label!r}") from error
            self._receive(pending, None)

    def join(self, *, expect_errors: bool = False) -> list[Any]:
        """Waits for all ranks. See Ranks.run."""
        until: float | None = None
        while pending := self._pending():
            if self._failures and not expect_errors:
                until = time.monotonic() + GRACE_S if until is None else until
                if time.monotonic() >= until:
                    self._pool.dump_and_kill(pending)
                    break
            self._receive(pending, until)
        self._timer.cancel()
        self._pool.busy = False
        if self._expired:
            raise self._failed(f"{self._name}: not finished after {self._deadline:g} s")
        if not self._failures:
            return [self._results[rank] for rank in range(self._pool.world_size)]
        self._pool.tainted = True
        if not expect_errors:
            raise self._failed(f"{self._name}: {len(self._failures)} of {self._pool.world_size} ranks failed")
        return [self._failures.get(rank, self._results.get(rank)) for rank in range(self._pool.world_size)]

    def _pending(self) -> list[int]:
        return [r for r in range(self._pool.world_size) if r not in self._results and r not in self._failures]

    def _receive(self, pending: list[int], until: float | None) -> None:
        by_connection = {self._pool.connections[rank]: rank for rank in pending}
        timeout = None if until is None else max(0.0, until - time.monotonic())
        for ready in mp_connection.wait(list(by_connection), timeout):
            rank = by_connection[ready]  # type: ignore[index]
            try:
                run, kind, value = wire.loads(self._pool.connections[rank].recv_bytes())
            except (EOFError, OSError):
                self._failures[rank] = self._ended(rank)
                continue
            if run != self._id:
                continue
            if kind == "reached":
                self._reached.add((rank, value))
            elif kind == "error":
                self._failures[rank] = value
            else:
                self._results[rank] = value

    def _ended(self, rank: int) -> BaseException:
        if self._expired:
            return TimeoutError(f"rank {rank} was still running")
        return RankDied(rank, self._pool.exitcode(rank))

    def _expire(self) -> None:
        self._expired = True
        self._pool.dump_and_kill(list(range(self._pool.world_size)))

    def _failed(self, summary: str) -> RankFailed:
        self._timer.cancel()
        self._pool.kill()
        stderrs = {r: self._pool.stderr(r, self._stderr_from[r]) for r in range(self._pool.world_size)}
        return RankFailed(summary, self._failures, stderrs)


def _own(args: Sequence[Any], rank: int, world_size: int) -> tuple[Any, ...]:
    for arg in args:
        if isinstance(arg, PerRank) and len(arg.values) != world_size:
            raise ValueError(f"PerRank of {len(arg.values)} values for {world_size} ranks")
    return tuple(arg.values[rank] if isinstance(arg, PerRank) else arg for arg in args)


class _Pool:
    """The processes behind a Ranks, and the pipes to them."""

    _ids = itertools.count()

    def __init__(self, world_size: int, group: bool, config: dict[str, Any]) -> None:
        self.world_size = world_size
        self.busy = self.tainted = self.dead = False
        context = _context()
        start = Start(world_size, _rendezvous().port, f"pool{next(_Pool._ids)}", group, config)
        self.connections: list[mp_connection.Connection] = []
        self._processes: list[Any] = []
        self._stderr: list[int] = []
        for rank in range(world_size):
            log = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR | os.O_APPEND)
            ours, theirs = multiprocessing.Pipe()
            process = context.Process(target=_Rank(rank, start, theirs, log), name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)
            self._stderr.append(log)
        self.pids = [process.pid for process in self._processes]
        Run(self, None, (), DEADLINE_S).join()

    def exitcode(self, rank: int) -> int | None:
        self._processes[rank].join(5)
        code: int | None = self._processes[rank].exitcode
        return code

    def stderr_size(self, rank: int) -> int:
        return os.fstat(self._stderr[rank]).st_size

    def stderr(self, rank: int, since: int) -> str:
        size = self.stderr_size(rank)
        since = max(since, size - STDERR_TAIL)
        return os.pread(self._stderr[rank], size - since, since).decode(errors="replace")

    def dump_and_kill(self, ranks: list[int]) -> None:
        """Makes these ranks write the stacks of all their threads, then kills the whole pool."""
        before = {rank: self.stderr_size(rank) for rank in ranks}
        for rank in ranks:
            self._signal(rank, signal.SIGCONT)  # a stopped rank could not write
            self._signal(rank, signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while any(self._processes[r].is_alive() and self.stderr_size(r) == before[r] for r in ranks):
            if time.monotonic() > until:
                break
            time.sleep(0.01)
        time.sleep(0.05)  # the last stack may still be on its way into the file
        self.kill()

    def kill(self) -> None:
        self.dead = True
        for rank in range(self.world_size):
            self._signal(rank, signal.SIGKILL)
        for process in self._processes:
            process.join(5)

    def close(self) -> None:
        """Lets the ranks leave by themselves: what an idle, healthy pool is owed."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        until = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
        self.kill()

    def _signal(self, rank: int, signum: int) -> None:
        if self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signum)

    def __del__(self) -> None:
        for log in self._stderr:
            os.close(log)


class _Rank:
    """Process target: carries its end of the pipe and its stderr across to the new process."""

    def __init__(self, rank: int, start: Start, connection: mp_connection.Connection, log: int) -> None:
        self.rank, self.start, self.connection, self.log = rank, start, connection, log

    def __getstate__(self) -> tuple[Any, ...]:
        return self.rank, self.start, self.connection, reduction.DupFd(self.log), fork_server.pid()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._arguments = state

    def __call__(self) -> None:
        main(*self._arguments)


# --- what is shared by all pools of this process ------------------------------------------------------------

_idle: dict[tuple[Any, ...], list[_Pool]] = {}
_store: list[dist.TCPStore] = []


def _take(key: tuple[Any, ...], make: Callable[[], _Pool]) -> _Pool:
    pools = _idle.pop(key, [])
    while pools:
        pool = pools.pop()
        if pools:
            _idle[key] = pools
        if all(process.is_alive() for process in pool._processes):
            return pool
        pool.kill()
    return make()


def _give_back(key: tuple[Any, ...], pool: _Pool) -> None:
    _idle[key] = [*_idle.pop(key, []), pool]  # last in the dictionary = most recently used
    while sum(pool.world_size for pool in _all_idle()) > MAX_IDLE_PROCESSES:
        oldest = next(iter(_idle))
        for old in _idle.pop(oldest):
            old.close()


def _all_idle() -> Iterator[_Pool]:
    return itertools.chain.from_iterable(_idle.values())


def close_all() -> None:
    """Ends all idle pools."""
    while _idle:
        for pool in _idle.popitem()[1]:
            pool.close()


def _rendezvous() -> dist.TCPStore:
    if not _store:
        _store.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    return _store[0]


def _context() -> Any:
    if not fork_server.running():
        fork_server.start()
        atexit.register(close_all)
    return multiprocessing.get_context("forkserver")
