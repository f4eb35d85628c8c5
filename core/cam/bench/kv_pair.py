"""One pass of one contender: two processes, one owns the blocks, the other fetches them again and again."""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from cam import kv
from cam.bench import kv_contenders as contenders
from cam.bench.kv_plan import KvCase
from cam.bench.launch import BenchFailed
from cam.bench.tether import die_with_parent
from cam.kv.options import Options

_LATENCY_ROUNDS = 200


@dataclass(frozen=True)
class Job:
    contender: str
    case: KvCase
    rounds: int | None
    seconds: float
    threads: int | None
    latency: bool


@dataclass
class Pass:
    """Seconds of each round. latency: name -> seconds of each try."""

    rounds: list[float] = field(default_factory=list)
    nontemporal: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    latency: dict[str, list[float]] = field(default_factory=dict)


def run(job: Job, patience_s: float) -> Pass:
    """Raises BenchFailed with what the processes said."""
    spawn = multiprocessing.get_context("spawn")
    between = spawn.Pipe()
    ends = {"owner": spawn.Pipe(), "mover": spawn.Pipe()}
    processes = {
        name: spawn.Process(target=_main, args=(name, job, between[index], ends[name][1], os.getpid()), daemon=True)
        for index, name in enumerate(ends)
    }
    for process in processes.values():
        process.start()
    for end in (*between, *(pair[1] for pair in ends.values())):
        end.close()
    try:
        until = time.monotonic() + patience_s
        results: dict[str, Any] = {}
        for name in ("mover", "owner"):
            end = ends[name][0]
            while not end.poll(0.2):
                if time.monotonic() > until:
                    raise BenchFailed(f"{job.contender}, {job.case.title}: not done within {patience_s:.0f} s")
            try:
                results[name] = end.recv()
            except EOFError:
                raise BenchFailed(f"{job.contender}, {job.case.title}: the {name}'s process died") from None
            if isinstance(results[name], str):
                raise BenchFailed(f"{job.contender}, {job.case.title}, the {name}:\n{results[name]}")
        found: Pass = results["mover"]
        return found
    finally:
        for process in processes.values():
            process.kill()
            process.join()
        for pair in ends.values():
            pair[0].close()


def _main(name: str, job: Job, other: Connection, parent: Connection, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    _quiet()
    try:
        result = _own(job, other) if name == "owner" else _move(job, other)
        parent.send(result)
    except BaseException:
        parent.send(traceback.format_exc())
    finally:
        # Not the usual way out: see the note on exits in cam.transport.nixl.
        parent.close()
        os._exit(0)


def _quiet() -> None:
    """Libraries tell their life stories on standard error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)


def _own(job: Job, other: Connection) -> Pass:
    owner = contenders.owner(job.contender, job.case, job.threads)
    _mark(job.case, owner.pool)
    other.send(owner.announcement)
    while other.recv():
        owner.serve()
    owner.close()
    return Pass()


def _move(job: Job, other: Connection) -> Pass:
    case = job.case
    pool = contenders.empty_pool(case)
    pool.zero_()
    mover = contenders.mover(job.contender, case, pool, other.recv(), job.threads)
    threads = Options(threads=job.threads).copy_threads
    floors = [contenders.Floor(case, pool, nontemporal=nontemporal, threads=threads) for nontemporal in (True, False)]

    def round_() -> float:
        other.send(True)
        return contenders.timed(mover.round)

    round_()
    _check(case, pool)
    found = Pass()
    began = time.perf_counter()
    while not _enough(job, len(found.rounds), time.perf_counter() - began):
        found.nontemporal.append(contenders.timed(floors[0].round))
        found.memcpy.append(contenders.timed(floors[1].round))
        found.rounds.append(round_())
    round_()
    _check(case, pool)
    if job.latency and isinstance(mover, contenders.CamMover):
        found.latency = _latency(mover)
    other.send(False)
    mover.close()
    return found


def _enough(job: Job, rounds: int, spent: float) -> bool:
    if job.rounds is not None:
        return rounds >= job.rounds
    return rounds >= 50 or (rounds >= 3 and spent > job.seconds)


def _latency(mover: contenders.CamMover) -> dict[str, list[float]]:
    """Small things, from call to return."""
    engine, remote = mover.engine, mover.remote
    one = engine.prepare("read", remote, mover.source[:1], mover.target[:1])
    source, target = mover.source[:1].tolist(), mover.target[:1].tolist()
    tries: dict[str, Callable[[], object]] = {
        "1 block of 1 layer": lambda: engine.read(remote, source, target, layers=[0]).wait(),
        "1 block of 1 layer, prepared": lambda: one.post(layers=[0]).wait(),
        "1 block of all layers": lambda: engine.read(remote, source, target).wait(),
        "1 block of 1 layer, with notification": lambda: one.post(layers=[0], notify=b"word").wait(),
    }
    result = {}
    for name, action in tries.items():
        action()
        result[name] = [contenders.timed(action) for _ in range(_LATENCY_ROUNDS)]
    result["open a known peer"] = [_open_timed(mover) for _ in range(20)]
    one.close()
    return result


def _open_timed(mover: contenders.CamMover) -> float:
    """Without the closing."""
    opened: list[kv.Remote] = []
    took = contenders.timed(lambda: opened.append(mover.engine.open(mover.announcement, transport=mover.transport)))
    opened[0].close()
    return took


def _mark(case: KvCase, pool: torch.Tensor) -> None:
    """Writes every byte, and numbers at both ends of each piece by which it is known."""
    pool.fill_(1)
    words = _words(case, pool)
    numbers = np.arange(words.shape[0] * words.shape[1], dtype=np.int64).reshape(words.shape[:2])
    words[:, :, 0] = words[:, :, -1] = numbers


def _check(case: KvCase, pool: torch.Tensor) -> None:
    """Raises RuntimeError unless all pieces have arrived where they belong. Clears their marks."""
    words = _words(case, pool)
    expected = np.arange(words.shape[0], dtype=np.int64)[:, None] * case.pool + case.source()
    found = words[:, case.target()]
    if not ((found[:, :, 0] == expected).all() and (found[:, :, -1] == expected).all()):
        raise RuntimeError(f"{case.title}: pieces did not arrive where they belong")
    words[:, :, 0] = words[:, :, -1] = -1


def _words(case: KvCase, pool: torch.Tensor) -> Any:
    """[layer * plane, block, 64-bit words of a piece]"""
    return pool.view(torch.int64).numpy().reshape(-1, case.pool, case.piece // 8)
