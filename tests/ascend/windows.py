"""Windows over shared memory for ranks that are processes of the tests' launcher."""

from __future__ import annotations

import mmap
import os

import torch

from cam_kernels.ascend.window import Window, WindowLayout
from tests.launcher import RankEnv

_kept: list[mmap.mmap] = []


def shared_window(env: RankEnv, layout: WindowLayout, key: str) -> Window:
    """Create the own window as a memfd and map those of all peers. `key` is new for every call.

    A rank opens a peer's memory through /proc/<pid>/fd, so nothing has a name in a file system.
    """
    fd = os.memfd_create(f"cam-window-{env.rank}")
    os.ftruncate(fd, layout.nbytes)
    env.store.set(f"{key}/{env.rank}", f"{os.getpid()}:{fd}")
    mappings = []
    for rank in range(env.world_size):
        pid, number = env.store.get(f"{key}/{rank}").decode().split(":")
        peer = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        mapping = mmap.mmap(peer, layout.nbytes)
        os.close(peer)
        mappings.append(torch.frombuffer(mapping, dtype=torch.int8))
        _kept.append(mapping)
    # Nobody may close or go before all have mapped.
    env.store.set(f"{key}/mapped/{env.rank}", "")
    env.store.wait([f"{key}/mapped/{rank}" for rank in range(env.world_size)])
    os.close(fd)
    return Window(layout, mappings[env.rank], [m.data_ptr() for m in mappings])
