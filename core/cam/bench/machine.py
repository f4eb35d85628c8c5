"""What a result was measured on: hardware, kernel settings that matter for copying memory, versions."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from cam import host


def describe() -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": host.usable_cores(),
        "memory_bytes": host.usable_memory(),
        "available_bytes": available_memory(),
        "kernel": platform.release(),
        "transparent_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "shared_memory_hugepages": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "load": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Of what takes part; "not installed" where it is not."""
    found = {"python": platform.python_version()}
    for distribution in ("cam", "cam-kernels", "torch", "mpi4py", "matplotlib"):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[distribution] = "not installed"
    return found


def available_memory() -> int:
    """Bytes that can be used now without swapping, capped by what this process may use at all."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) << 10, host.usable_memory())
    return host.usable_memory()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _chosen(path: str) -> str:
    """The bracketed word of a kernel setting such as "always [madvise] never"."""
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    return text.partition("[")[2].partition("]")[0] or text.strip()
