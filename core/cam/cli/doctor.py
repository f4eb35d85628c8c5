"""`cam doctor`: what this machine offers to CAM, tried out rather than looked up."""

import functools
import importlib
import importlib.util
import os
import select
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import cam
from cam import host
from cam.bench import machine
from cam.bench.launch import Mpi
from cam.config import Config
from cam.errors import CamError, ConfigError
from cam.npu import status as npu

#: Found to be missing, and why: raised by the checks below.
Problem = (OSError, RuntimeError, ImportError, AttributeError, CamError)


def command() -> None:
    """What this machine offers: kernels, cores, memory, ways to share memory, configuration, versions.

    Exits with 1 when something that CAM cannot do without is missing.
    """
    console = Console()
    console.print(_machine_table())
    console.print(_versions_table())
    sound = True
    for title, checks in (("Needed", _NEEDED), ("Optional", _OPTIONAL)):
        table = _table(title)
        for name, check in checks.items():
            found, detail = _try(check)
            table.add_row(name, "[green]yes[/green]" if found else "[red]no[/red]", detail)
            sound = sound and (found or title == "Optional")
        console.print(table)
    try:
        console.print(_configuration_table(Config()))
    except ConfigError as error:
        console.print("[bold red]Configuration[/bold red]: ", end="")
        console.print(str(error), markup=False, highlight=False)
        sound = False
    console.print(_npu_table())
    console.print(f"CAM serves the CPU, and Ascend NPUs with torch_npu. {npu.NOT_RUN}", style="dim")
    if not sound:
        console.print("[bold red]CAM cannot work here[/bold red]: see above.")
        raise typer.Exit(1)
    console.print("[bold green]CAM can work here.[/bold green]")


def check_memfd() -> str:
    """Makes an anonymous segment, hands it over a Unix socket and reads it there."""
    page = os.sysconf("SC_PAGE_SIZE")
    segment = os.memfd_create("cam-doctor", os.MFD_CLOEXEC)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    received: list[int] = []
    try:
        os.ftruncate(segment, page)
        os.pwrite(segment, b"cam", 0)
        socket.send_fds(ours, [b"segment"], [segment])
        _, received, _, _ = socket.recv_fds(theirs, 16, 1)
        if not received or os.pread(received[0], 3, 0) != b"cam":
            raise RuntimeError("a segment sent over a Unix socket did not arrive")
    finally:
        for fd in (segment, *received):
            os.close(fd)
        ours.close()
        theirs.close()
    return "anonymous segments, handed over a Unix socket; /dev/shm is not used"


def check_pidfd() -> str:
    """Watches a child through a pidfd until it ends."""
    read_end, write_end = os.pipe()
    reads_pipe = [(os.POSIX_SPAWN_DUP2, read_end, 0)]
    child = os.posix_spawn("/bin/sh", ["sh", "-c", "read _"], {}, file_actions=reads_pipe)
    try:
        watch = os.pidfd_open(child)
        try:
            poller = select.poll()
            poller.register(watch, select.POLLIN)
            if poller.poll(0):
                raise RuntimeError("a pidfd says that a living process has ended")
            os.close(write_end)
            write_end = -1
            if not poller.poll(5000):
                raise RuntimeError("a pidfd does not tell that a process has ended")
        finally:
            os.close(watch)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
        os.waitpid(child, 0)
    return "the end of a peer is noticed at once"


def check_kernels() -> str:
    kernels: Any = importlib.import_module("cam_kernels")
    return f"CPU kernels for {', '.join(kernels.isas())} (best first)"


def check_boot_id() -> str:
    return f"{host.boot_id()[:8]}...: tells which ranks share this host"


def check_dispatch() -> str:
    """Tokens to their experts and back, with this process as the only rank."""
    x = torch.arange(12, dtype=torch.float32).view(3, 4)
    with cam.init(store=dist.HashStore(), rank=0, world_size=1, name="cam-doctor") as group:  # type: ignore[attr-defined]
        buffer = cam.ep.Buffer(group, num_experts=2)
        received, handle = buffer.dispatch(x, torch.tensor([[1], [0], [1]]))
        if not torch.equal(buffer.combine(received.x, handle), x):
            raise RuntimeError("tokens came back changed")
    return "tokens to their experts and back, alone in a group of one"


def check_gloo() -> str:
    if not dist.is_available() or not dist.is_gloo_available():
        raise RuntimeError("this torch has no Gloo")
    return "rendezvous by process group; the baseline of benchmarks"


def check_mpi() -> str:
    mpi = Mpi.find()
    if mpi.version is None:
        raise RuntimeError(mpi.reason)
    return f"{mpi.version}: measured by cam bench"


def check_kv(transport: str) -> str:
    """Reads one block between two engines over this transport."""
    kv: Any = importlib.import_module("cam.kv")
    with kv.Engine("owner") as owner, kv.Engine("reader") as reader:
        caches = []
        for engine, value in ((owner, 1.0), (reader, 0.0)):
            caches.append(engine.empty((2, 16, 64), torch.float32).fill_(value))
            engine.register([kv.Layer("layer", caches[-1], "btd")])
        remote = reader.open(owner.describe(), transport=transport)
        reader.read(remote, [0], [1]).wait()
        if not bool((caches[1][1] == 1).all()):
            raise RuntimeError("a block did not arrive")
        reason: str = remote.reason
    return f"moves KV-cache blocks: {reason.partition(': ')[2]}"


def check_library(transport: str) -> str:
    """Only loads it: starting its engine would leave threads and ports behind."""
    transports: Any = importlib.import_module("cam.transport")
    reason = transports.available()[transport]
    if reason:
        raise RuntimeError(reason)
    return "moves KV-cache blocks between hosts"


def check_matplotlib() -> str:
    if importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("pip install 'cam[bench]' for the pictures of cam bench")
    return "pictures of cam bench"


_NEEDED: dict[str, Callable[[], str]] = {
    "kernels": check_kernels,
    "memfd": check_memfd,
    "pidfd": check_pidfd,
    "boot id": check_boot_id,
    "dispatch": check_dispatch,
}
_OPTIONAL: dict[str, Callable[[], str]] = {
    "Gloo": check_gloo,
    "MPI": check_mpi,
    "KV over shm": functools.partial(check_kv, "shm"),
    "KV over cma": functools.partial(check_kv, "cma"),
    "KV over NIXL": functools.partial(check_library, "nixl"),
    "KV over Mooncake": functools.partial(check_library, "mooncake"),
    "matplotlib": check_matplotlib,
}


def _try(check: Callable[[], str]) -> tuple[bool, str]:
    try:
        return True, check()
    except Problem as error:
        return False, str(error)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"[bold]{title}[/bold]", title_justify="left", show_header=bool(columns), box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns or ("", "", "")):
        table.add_column(column, style="cyan" if number == 0 else None, overflow="fold")
    return table


def _pairs(title: str) -> Table:
    table = Table(title=f"[bold]{title}[/bold]", title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    return table


def _machine_table() -> Table:
    about = machine.describe()
    table = _pairs("Machine")
    table.add_row("processor", f"{about['cpu']}, {about['architecture']}")
    table.add_row("cores", f"{about['usable_cores']} usable of {about['cores']}")
    table.add_row("memory", f"{_gib(about['memory_bytes'])} usable, {_gib(about['available_bytes'])} available now")
    table.add_row("kernel", f"Linux {about['kernel']}")
    private, shared = about["transparent_hugepages"], about["shared_memory_hugepages"]
    table.add_row("huge pages", f"private memory: {private}, shared memory: {shared}")
    table.add_row("/dev/shm", f"{_dev_shm()} (not needed)")
    return table


def _npu_table() -> Table:
    table = _pairs("Ascend NPU")
    for what, found in npu.lines():
        table.add_row(what, escape(found))
    return table


def _versions_table() -> Table:
    table = _pairs("Versions")
    for name, version in machine.versions().items():
        table.add_row(name, version)
    return table


def _configuration_table(config: Config) -> Table:
    """Every setting with its value in force and where that comes from."""
    table = _table("Configuration", "setting", "value", "from")
    file = os.environ.get("CAM_CONFIG")
    given = {name.upper() for name, value in os.environ.items() if value}
    for name in type(config).model_fields:
        value = getattr(config, name)
        variable = f"CAM_{name.upper()}"
        source = f"default ({variable})"
        if variable in given:
            source = variable
        elif name in config.model_fields_set and file:
            source = file
        shown = "auto" if value is None else str(value)
        table.add_row(name, shown, source, style="" if source.startswith("default") else "bold")
    return table


def _dev_shm() -> str:
    if not Path("/dev/shm").is_dir():
        return "absent"
    usage = shutil.disk_usage("/dev/shm")
    return f"{_gib(usage.free)} free of {_gib(usage.total)}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
