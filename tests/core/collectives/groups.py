"""Process groups inside a test's ranks: `cam` as the default group, and a gloo group of the same ranks beside it."""

import itertools
from datetime import timedelta

import torch.distributed as dist

from tests.launcher import RankEnv, Ranks

# Since torch 2.13 under these names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

TIMEOUT = timedelta(seconds=30)
_gloo: list[dist.ProcessGroup] = []
_generation = itertools.count()


def ranks_of(world: int) -> Ranks:
    """Processes for these tests alone, because a default group stays in them. (The name only tells pools apart.)"""
    return Ranks(world, group=False, name="collectives")


def join_cam(env: RankEnv, timeout: timedelta = TIMEOUT) -> None:
    """The default group, made once per process, or again after leave()."""
    if not dist.is_initialized():
        store = dist.PrefixStore(f"collectives/{next(_generation)}", env.store)
        dist.init_process_group("cam", store=store, rank=env.rank, world_size=env.world_size, timeout=timeout)


def join(env: RankEnv) -> dist.ProcessGroup:
    """As join_cam; returns a gloo group of the same ranks."""
    join_cam(env)
    if not _gloo:
        _gloo.append(dist.new_group(backend="gloo", timeout=TIMEOUT))
    return _gloo[-1]


def leave() -> None:
    """For tests that break the group: the next test in these processes makes another."""
    _gloo.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
