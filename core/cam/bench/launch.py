"""Starts the ranks of a benchmark, listens to rank 0, and sees to it that all of them end.

Ranks are started by mpirun where MPI takes part, else one by one. Both ways they die with this process, and
when a case takes longer than allowed, a rank fails or the user interrupts, all are killed.
"""

import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from cam.bench import tether
from cam.bench.world import EVENT_MARK
from cam.errors import CamError

_GRACE_S = 3.0
_SHOWN_LINES = 40

Event = dict[str, Any]


class BenchFailed(CamError):
    """The ranks did not finish: one failed or a case took too long. The message ends with what they wrote."""


@dataclass(frozen=True)
class Mpi:
    """version: first line of mpirun --version; None where MPI cannot be used, for this `reason`."""

    version: str | None
    reason: str = ""

    @classmethod
    def find(cls) -> "Mpi":
        """Looks for mpirun and mpi4py, and tries both together with one rank."""
        if importlib.util.find_spec("mpi4py") is None:
            return cls(None, "mpi4py is not installed")
        mpirun = shutil.which("mpirun")
        if mpirun is None:
            return cls(None, "there is no mpirun on PATH")
        try:
            about = _output([mpirun, "--version"])
            version = (about.strip().splitlines() or ["unknown"])[0]
            command = [*mpirun_command(version, 1, crowded=False), sys.executable]
            _output([*command, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"])
        except (OSError, subprocess.SubprocessError) as error:
            shown = getattr(error, "stderr", None) or str(error)
            return cls(None, f"mpirun does not work here: {shown.strip()[-300:]}")
        return cls(version)


def mpirun_command(version: str, ranks: int, *, crowded: bool) -> list[str]:
    command = ["mpirun", "-n", str(ranks)]
    if "Open MPI" in version or "OpenRTE" in version:
        # Ranks pin themselves, and may outnumber cores on purpose. Yielding when idle is what Open MPI does by itself
        # when it knows that cores are shared; --oversubscribe hides that from it.
        command += ["--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", str(int(crowded))]
        if os.geteuid() == 0:
            command += ["--allow-run-as-root"]
    return command


class Spec(Protocol):
    """What the ranks of one group are told. directory: for the rendezvous and the start line. mpi: start with MPI."""

    @property
    def ranks(self) -> int: ...

    @property
    def directory(self) -> str: ...

    @property
    def mpi(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


def run_world(
    spec: Spec,
    on_event: Callable[[Event], None],
    *,
    mpi: Mpi,
    crowded: bool,
    patience_s: float,
    worker: str = "cam.bench.worker",
) -> None:
    """Runs all cases of one group. on_event gets each event of rank 0 (see worker).

    patience_s: the longest time between two events. worker: the module that each rank runs. Raises BenchFailed.
    """
    directory = Path(spec.directory)
    spec_path = directory / f"spec-{spec.ranks}.json"
    spec_path.write_text(json.dumps(spec.to_json()))
    with open(directory / f"stderr-{spec.ranks}", "w+b") as errors:
        processes = _start(spec, spec_path, mpi, errors, crowded, worker)
        try:
            _listen(processes, on_event, patience_s, spec.ranks)
        except BenchFailed as error:
            errors.seek(0)
            written = errors.read().decode(errors="replace").strip().splitlines()[-_SHOWN_LINES:]
            raise BenchFailed("\n".join([str(error), *written])) from None
        finally:
            _end(processes)


def _start(
    spec: Spec, spec_path: Path, mpi: Mpi, errors: IO[bytes], crowded: bool, module: str
) -> list[subprocess.Popen[bytes]]:
    tie = [sys.executable, tether.__file__]
    tied = [*tie, str(os.getpid())]
    worker = [sys.executable, "-m", module, str(spec_path)]
    # Gloo otherwise resolves the host's name, which in a container may lead nowhere.
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    if spec.mpi and mpi.version is not None:
        mpirun = mpirun_command(mpi.version, spec.ranks, crowded=crowded)
        command = [*tied, *mpirun, *tie, "0", *worker]
        return [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment)
        ]
    return [
        subprocess.Popen(
            [*tied, *worker],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else errors,
            stderr=errors,
            env={**environment, "RANK": str(rank)},
        )
        for rank in range(spec.ranks)
    ]


def _listen(
    processes: list[subprocess.Popen[bytes]],
    on_event: Callable[[Event], None],
    patience_s: float,
    ranks: int,
) -> None:
    title = "start"
    last = time.monotonic()
    for line in _lines(processes[0], processes):
        if line is not None and line.startswith(EVENT_MARK):
            event: Event = json.loads(line[len(EVENT_MARK) :])
            last = time.monotonic()
            title = event.get("title", title)
            on_event(event)
        if time.monotonic() - last > patience_s:
            raise BenchFailed(f"{ranks} ranks: no progress for {patience_s:.0f} s in: {title}")
    # Rank 0's output has ended; the others, and mpirun, follow or have failed.
    deadline = time.monotonic() + _GRACE_S * 3
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code not in (None, 0)]
        if failed:
            raise BenchFailed(f"{ranks} ranks: one ended with exit code {failed[0]} in: {title}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise BenchFailed(f"{ranks} ranks: some did not end after the last case")
        time.sleep(0.02)


def _lines(speaker: subprocess.Popen[bytes], processes: list[subprocess.Popen[bytes]]) -> Iterator[str | None]:
    """The speaker's output line by line; None after each half second without any. Ends when it ends, or a rank fails.

    Sleeps in between: this process shares its cores with the ranks that it measures.
    """
    stream = speaker.stdout
    if stream is None:
        raise BenchFailed("rank 0 was started without a pipe")
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(0.5):
                if any(process.poll() not in (None, 0) for process in processes):
                    return
                yield None
                continue
            chunk = os.read(stream.fileno(), 1 << 16)
            if not chunk:
                return
            *complete, pending = (pending + chunk).split(b"\n")
            for line in complete:
                yield line.decode(errors="replace")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs. mpirun gets the chance to end its ranks; they die with it in any case."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
