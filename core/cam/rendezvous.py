"""How ranks exchange their first messages, before they share memory.

A Rendezvous is one operation, all_gather of small byte strings with a deadline. It stands on what the job
already has: any torch Store, or a torch ProcessGroup. Nothing else is opened on the network.
"""

import os
import re
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from cam.deadline import Deadline
from cam.errors import CamError, ConfigError, GroupAborted, InputError, Timeout

if TYPE_CHECKING:  # torch.distributed has it as well, but not for type checkers
    from torch._C._distributed_c10d import Store

_OPERATION = "init"
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Stores made from the environment, by (process, address, rank, size). Rank 0 serves the store without
#: torchrun: it must outlive the call that made it, or peers that still read from it see a broken
#: connection.
_environment_stores: dict[tuple[int, str, int, int], "Store"] = {}


class Rendezvous(Protocol):
    """The ranks of a group to be, numbered 0 .. size - 1."""

    rank: int
    size: int

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """Every rank's payload, by rank. `key` names the step: each is used once, by all ranks in the same
        order.

        Raises Timeout naming the ranks that are late.
        """
        ...


class Alone:
    """The rendezvous of a single rank with itself."""

    rank = 0
    size = 1

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        return [payload]


class StoreRendezvous:
    """Over any torch Store: each rank sets its key and waits for the others'.

    A store outlives groups, so keys carry a number: how many groups of this name this rank has begun on
    this store. It is counted in the store itself, because one job may reach the same store through
    different objects.
    """

    def __init__(self, store: "Store", rank: int, size: int, name: str) -> None:
        self.rank, self.size = rank, size
        try:
            count = store.add(f"cam/{name}/begun/{rank}", 1)
        except RuntimeError as error:
            raise GroupAborted(f"init: the store of the rendezvous does not answer: {error}") from error
        self._store = dist.PrefixStore(f"cam/{name}/{count}", store)  # type: ignore[attr-defined]

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        try:
            self._store.set(f"{key}/{self.rank}", payload)  # type: ignore[arg-type]  # the stub forgets bytes
            return [payload if rank == self.rank else self._get(f"{key}/{rank}", deadline) for rank in range(self.size)]
        except RuntimeError as error:
            # A store that still answers has only run out of time; some do a moment early.
            late = self._missing(key)
            if late or deadline.passed:
                raise _timeout(key, late, deadline.waited_s) from None
            raise GroupAborted(f"init ({key}): the store of the rendezvous failed: {error}") from error

    def _get(self, key: str, deadline: Deadline) -> bytes:
        # At least a millisecond: 0 means "no limit" to some stores.
        self._store.wait([key], timedelta(seconds=max(deadline.left_s, 0.001)))
        return bytes(self._store.get(key))

    def _missing(self, key: str) -> list[int]:
        try:
            return [rank for rank in range(self.size) if not self._store.check([f"{key}/{rank}"])]
        except RuntimeError:
            return []


class ProcessGroupRendezvous:
    """Over an existing torch ProcessGroup, by its own collectives."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("cam.init(process_group=...): this process is not a member of that group")
        self._group = group

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        deadline = Deadline(timeout_s)
        gathered: list[Any] = [None] * self.size
        failures: list[BaseException] = []

        def gather() -> None:
            try:
                if dist.get_backend(self._group) == dist.Backend.GLOO:
                    # Gloo alone can say who is late.
                    dist.monitored_barrier(
                        self._group, timedelta(seconds=max(deadline.left_s, 0.001)), wait_all_ranks=True
                    )
                dist.all_gather_object(gathered, payload, group=self._group)
            except BaseException as error:
                failures.append(error)

        # The collective's own limit belongs to the process group and may be half an hour, so it is not
        # waited for beyond ours: the thread is left behind, as the process group is after a collective that
        # did not finish.
        thread = threading.Thread(target=gather, name="cam-rendezvous", daemon=True)
        thread.start()
        # A little longer than the barrier inside, which knows who is late.
        thread.join(timeout_s + 1.0)
        if thread.is_alive():
            raise _timeout(key, [], deadline.waited_s)
        if failures:
            late = [int(rank) for rank in re.findall(r"\d+", _late_in_barrier(failures[0]))]
            if late or deadline.passed:
                raise _timeout(key, late, deadline.waited_s) from failures[0]
            raise GroupAborted(f"init ({key}): the process group failed: {failures[0]}") from failures[0]
        if not all(isinstance(message, bytes) for message in gathered):
            raise CamError(f"init ({key}): ranks disagree about what is gathered over the process group")
        return gathered


def from_environment(name: str, timeout_s: float) -> Rendezvous | None:
    """The rendezvous that torchrun's variables describe; None where RANK and the others are not set.

    Uses torchrun's own store when there is one (TORCHELASTIC_USE_AGENT_STORE); else rank 0 serves one on
    MASTER_PORT. Raises ConfigError when only some of the variables are set, Timeout when the store cannot
    be reached.
    """
    missing = [variable for variable in _ENVIRONMENT if not os.environ.get(variable)]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if "WORLD_SIZE" not in missing and os.environ["WORLD_SIZE"].strip() == "1":
        return Alone()
    if missing:
        raise ConfigError(
            f"of {', '.join(_ENVIRONMENT)}, not set: {', '.join(missing)}. Start with torchrun, set all "
            "four, or pass process_group= or store="
        )
    return _from_complete_environment(name, timeout_s)


def _from_complete_environment(name: str, timeout_s: float) -> Rendezvous:
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise ConfigError(f"RANK and WORLD_SIZE must be integers: {error}") from None
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    where = (os.getpid(), address, rank, size)
    if where not in _environment_stores:
        deadline = Deadline(timeout_s)
        try:
            handler = rendezvous("env://", timeout=timedelta(seconds=timeout_s))
            _environment_stores[where] = next(handler)[0]
        except (RuntimeError, ValueError) as error:
            if not deadline.passed:
                raise ConfigError(f"no rendezvous at {address}: {error}") from error
            raise Timeout(
                f"init: rank {rank} found no store, or not all of {size} ranks, at {address} "
                f"within {deadline.waited_s:.1f} s: {error}",
                operation=_OPERATION,
                phase="store",
                waited_s=deadline.waited_s,
            ) from error
    return StoreRendezvous(_environment_stores[where], rank, size, name)


def _late_in_barrier(error: BaseException) -> str:
    """The ranks in "Ranks 1, 3 failed to pass monitoredBarrier"; empty where it says something else."""
    match = re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", str(error))
    return match.group(1) if match else ""


def _timeout(key: str, late: list[int], waited_s: float) -> Timeout:
    who = f"rank{'s' if len(late) > 1 else ''} {', '.join(map(str, late))}" if late else "some rank"
    return Timeout(
        f"init ({key}): {who} did not arrive within {waited_s:.1f} s",
        operation=_OPERATION,
        phase=key,
        ranks=late,
        waited_s=waited_s,
    )
