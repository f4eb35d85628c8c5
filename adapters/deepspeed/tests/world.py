"""Inside a rank: DeepSpeed with its process group, for the time of one test."""

import contextlib
import os
import zlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from adapters.deepspeed.tests.environment import variables
from tests.launcher import RankEnv


@contextlib.contextmanager
def deepspeed_world(env: RankEnv, folder: str, backend: str | None = "gloo") -> Iterator[None]:
    """deepspeed.init_distributed as a user calls it, and everything undone afterwards: ranks are used again.

    folder: an empty one for this test; the ranks meet in it. backend: None = DeepSpeed's default.
    """
    os.environ.update(
        variables(),
        RANK=str(env.rank),
        LOCAL_RANK=str(env.rank),
        WORLD_SIZE=str(env.world_size),
        MASTER_ADDR="127.0.0.1",
        # Nobody listens there, the ranks meet in a file; but DeepSpeed's own shared memory is named after it.
        MASTER_PORT=str(20000 + zlib.crc32(folder.encode()) % 40000),
    )
    import deepspeed

    torch.manual_seed(0)
    deepspeed.init_distributed(
        dist_backend=backend,
        init_method=f"file://{folder}/store",
        rank=env.rank,
        world_size=env.world_size,
        timeout=timedelta(seconds=60),
        verbose=False,
    )
    try:
        deepspeed.comm.barrier()  # a rank whose test is short must not leave while others still connect
        yield
    finally:
        if dist.is_initialized():
            deepspeed.comm.destroy_process_group()
