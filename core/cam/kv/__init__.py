"""KV-cache transfer between independent processes: prefill and decode servers, and whoever keeps caches.

    engine = kv.Engine("decode-0")
    engine.register([kv.Layer(name, tensor, "pbthd") for name, tensor in caches.items()])
    remote = engine.open(description_of_prefill)                   # bytes from the other engine's describe()
    engine.read(remote, their_blocks, my_blocks, lease=lease, notify=b"request 7").wait()

One engine for each process. Blocks are read or written one-sidedly: the other process does nothing meanwhile, except
that its agent, a thread, answers questions. Loans of blocks end by release, by time, or by the reader's death.
"""

from cam.kv.blocks import Blocks
from cam.kv.engine import Engine
from cam.kv.events import Event, LeaseEnded, Notification, PeerGone
from cam.kv.geometry import Geometry, Heads, Layer
from cam.kv.options import Options
from cam.kv.prepared import Prepared
from cam.kv.remote import Remote
from cam.kv.transfer import Transfer

__all__ = [
    "Blocks",
    "Engine",
    "Event",
    "Geometry",
    "Heads",
    "Layer",
    "LeaseEnded",
    "Notification",
    "Options",
    "PeerGone",
    "Prepared",
    "Remote",
    "Transfer",
]
