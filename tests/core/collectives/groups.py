"""Process groups inside a test's ranks: `cam` as the default group, and a gloo group of the same ranks beside it."""

from datetime import timedelta

import torch.distributed as dist

from tests.launcher import RankEnv

TIMEOUT = timedelta(seconds=30)
_gloo: list[dist.ProcessGroup] = []


def join(env: RankEnv, timeout: timedelta = TIMEOUT) -> dist.ProcessGroup:
    """The default group, made once per process. Returns the gloo group."""
    if not dist.is_initialized():
        store = dist.PrefixStore("collectives", env.store)
        dist.init_process_group("cam", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)
        _gloo.append(dist.new_group(backend="gloo", timeout=timeout))
    return _gloo[-1]
