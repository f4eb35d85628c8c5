"""CAM: communication ops for large models, with one semantics on every device.

    import cam
    group = cam.init()      # torchrun's environment; or a torch ProcessGroup, a Store; or alone
    buffer = cam.ep.Buffer(group, num_experts=64)

    cam.all_reduce_batch(gradients, op="avg")   # data-parallel training; NumPy and DLPack arrays as well

See the docstrings of `cam.init`, `cam.Group`, `cam.Config` and `cam.ep.Buffer`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from cam.config import Config
from cam.errors import (
    BackendUnavailable,
    CamError,
    ConfigError,
    ForkedProcess,
    GroupAborted,
    InputError,
    Mismatch,
    NotReachable,
    OutOfWindowMemory,
    PeerLost,
    Timeout,
    TransferCancelled,
    TransferFailed,
)
from cam.group import Group
from cam.joining import init
from cam.peers import Peer
from cam.registry import group

if TYPE_CHECKING:
    from cam import collectives as collectives
    from cam import ep as ep
    from cam import kv as kv
    from cam.collectives.training import (
        all_reduce,
        all_reduce_async,
        all_reduce_batch,
        broadcast,
        buffers,
        create_group,
        wait,
    )

__all__ = [
    "BackendUnavailable",
    "CamError",
    "Config",
    "ConfigError",
    "ForkedProcess",
    "Group",
    "GroupAborted",
    "InputError",
    "Mismatch",
    "NotReachable",
    "OutOfWindowMemory",
    "Peer",
    "PeerLost",
    "Timeout",
    "TransferCancelled",
    "TransferFailed",
    "all_reduce",
    "all_reduce_async",
    "all_reduce_batch",
    "broadcast",
    "buffers",
    "collectives",
    "create_group",
    "ep",
    "group",
    "init",
    "kv",
    "wait",
]

__version__ = "0.1.0"

#: The jobs: loaded when first used, because registering their ops costs time that other jobs need not pay.
_JOBS = frozenset({"collectives", "ep", "kv"})

#: The training API, likewise.
_TRAINING = frozenset(
    {"all_reduce", "all_reduce_async", "all_reduce_batch", "broadcast", "buffers", "create_group", "wait"}
)


def __getattr__(name: str) -> Any:
    if name in _TRAINING:
        return getattr(importlib.import_module("cam.collectives.training"), name)
    if name in _JOBS:
        return importlib.import_module(f"cam.{name}")
    raise AttributeError(f"module 'cam' has no attribute {name!r}")
