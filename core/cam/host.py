"""What this process may use of its host: cores, memory, and which host it is."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MINE = Path("/proc/self/cgroup")


def boot_id() -> str:
    """Identifies this boot of this kernel: equal for two processes exactly when they run on the same machine.

    Host names are not used: containers share or invent them.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def usable_cores() -> int:
    """Cores that this process may run on: its affinity mask, capped by the CPU quota of its cgroup."""
    cores = len(os.sched_getaffinity(0))
    for folder in _cgroup_folders("cpu"):
        quota = _quota(folder)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, capped by the limits of its cgroups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for folder in _cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _read(folder / name)
            if limit.isdigit():  # "max" where there is none
                total = min(total, int(limit))
    return total


def _quota(folder: Path) -> float | None:
    """Cores' worth of CPU time that a cgroup may use, None without a limit. (cpu.max is version 2.)"""
    parts = _read(folder / "cpu.max").split()
    if not parts:
        parts = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
    if len(parts) != 2 or not all(part.isdigit() for part in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's cgroup of version 1 and 2 for a controller, and its ancestors: each may set a limit."""
    for line in _read(_MINE).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controller
        else:
            continue
        # Inside a container the path may name a folder of the host that is not mounted here: reads then find
        # nothing, and the root of the mount, which is this container's own cgroup, still counts.
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
