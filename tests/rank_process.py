"""Inside one rank: a loop that receives (function, arguments), calls it and sends back what came of it."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests import wire

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankEnv:
    """What a rank's function receives as its group when the pool was made with group=False."""

    rank: int
    world_size: int
    store: dist.Store


@dataclass(frozen=True)
class Start:
    """How a pool of ranks is to be started."""

    world_size: int
    port: int
    prefix: str
    group: bool
    config: dict[str, Any]


_to_parent: Callable[[str, object], None] | None = None


def reached(label: str) -> None:
    """Called by a rank's function: tells the test that waits in Run.wait_reached(rank, label)."""
    if _to_parent is None:
        raise RuntimeError("reached() is for functions that a rank runs")
    _to_parent("reached", label)


def main(rank: int, start: Start, connection: Connection, stderr: Any, parent: int) -> None:
    """Entry point of the rank's process. `stderr` is a multiprocessing DupFd of an unnamed file."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the fork server died before the request above
        os._exit(1)
    log = stderr.detach()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    # Ctrl-C in the terminal reaches the whole process group; only pytest reacts, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    run = -1

    def send(kind: str, value: object) -> None:
        try:
            message = wire.dumps((run, kind, value))
        except Exception as error:
            message = wire.dumps((run, "error", TypeError(f"rank {rank}: cannot pickle the {kind}: {error!r}")))
        connection.send_bytes(message)

    global _to_parent
    _to_parent = send

    try:
        group = _group(rank, start)
    except BaseException as error:
        send("error", _with_traceback(error))
        os._exit(1)  # half-made state: no destructor should run
    send("result", None)

    with contextlib.suppress(EOFError, OSError):
        while True:
            message = connection.recv_bytes()
            if not message:
                break
            try:
                run, fn, arguments = wire.loads(message)
                send("result", fn(group, *arguments))
            except BaseException as error:
                send("error", _with_traceback(error))
                # The frames of the failure must not keep its tensors, or the group's memory, alive.
                error.__traceback__ = None
    if start.group:
        group.close()


def _group(rank: int, start: Start) -> Any:
    store = dist.PrefixStore(start.prefix, dist.TCPStore("127.0.0.1", start.port, is_master=False))
    if not start.group:
        return RankEnv(rank, start.world_size, store)
    import cam

    return cam.init(store=store, rank=rank, world_size=start.world_size, **start.config)


def _with_traceback(error: BaseException) -> BaseException:
    error.remote_traceback = "".join(traceback.format_exception(error))  # type: ignore[attr-defined]
    return error
