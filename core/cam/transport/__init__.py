"""Moving bytes between regions of two processes: shm, cma, nixl, mooncake, behind one small Protocol.

A transport knows addresses and lengths. It knows no blocks, layers or heads: those are cam.kv's.
"""

from cam.transport.pieces import Batch, flatten
from cam.transport.protocol import (
    Channel,
    Ended,
    Home,
    Limits,
    Offer,
    Outcome,
    Range,
    Ready,
    Settings,
    Shared,
    Target,
    Transport,
)
from cam.transport.registry import available, create, names, register

__all__ = [
    "Batch",
    "Channel",
    "Ended",
    "Home",
    "Limits",
    "Offer",
    "Outcome",
    "Range",
    "Ready",
    "Settings",
    "Shared",
    "Target",
    "Transport",
    "available",
    "create",
    "flatten",
    "names",
    "register",
]
