"""Kernels of CAM: raw memory in, raw memory out.

The native module moves rows between windows that several processes map, and waits for their flags. It takes addresses
and sizes and gives DLPack arrays over window memory. It knows no framework and never links one, so one build serves
every torch. `cam_kernels.reference` is the golden that says what is right; it alone needs torch.
"""

from cam_kernels._native import (
    Aborted,
    Arena,
    BadInput,
    Channels,
    Endpoint,
    Mapping,
    Mover,
    OutOfMemory,
    ParameterMismatch,
    PeerDied,
    WaitTimeout,
    array_facts,
    control_bytes,
    copy,
    isas,
    row_offset,
)

__all__ = [
    "Aborted",
    "Arena",
    "BadInput",
    "Channels",
    "Endpoint",
    "Mapping",
    "Mover",
    "OutOfMemory",
    "ParameterMismatch",
    "PeerDied",
    "WaitTimeout",
    "array_facts",
    "control_bytes",
    "copy",
    "isas",
    "row_offset",
]
__version__ = "0.1.0"
