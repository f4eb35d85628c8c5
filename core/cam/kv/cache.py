"""This process's KV cache: the memory, the layers, and what peers may know of both."""

import threading
from collections.abc import Iterable, Sequence

import torch

from cam.errors import InputError
from cam.kv import messages as m
from cam.kv.geometry import Layer
from cam.kv.routes import Mine
from cam.memory.pool import Pool
from cam.transport import Home, Range, Settings, Shared
from cam_kernels import Mover


class Cache:
    """Thread-safe. Layers are registered once: peers rely on where they are."""

    def __init__(self, who: m.Who, pool: Pool, settings: Settings, mover: Mover) -> None:
        self._who, self._pool, self._settings, self._mover = who, pool, settings, mover
        self._lock = threading.Lock()
        self._layers: tuple[Layer, ...] = ()
        self._mine: Mine | None = None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            return self._pool.empty(shape, dtype)

    def adopt(self, tensors: Sequence[torch.Tensor], keep: bool) -> int:
        with self._lock:
            if self._mine is not None:
                raise InputError("adopt comes before register: peers may know the addresses already")
            return self._pool.adopt(tensors, keep=keep)

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._pool.holds(tensor)

    def register(self, layers: Sequence[Layer]) -> None:
        if not layers or len({layer.name for layer in layers}) != len(layers):
            raise InputError("register takes at least one layer, all with different names")
        mine = Mine(
            tuple(layer.name for layer in layers),
            tuple(layer.geometry(self._who.tp_rank, self._who.tp_size) for layer in layers),
            tuple(layer.tensor.data_ptr() for layer in layers),
            self._who.tp_rank,
            self._who.tp_size,
        )
        with self._lock:
            if self._mine is not None:
                raise InputError("register was called before: an engine registers its cache once")
            self._layers, self._mine = tuple(layers), mine

    def close(self) -> None:
        """Lets go of the tensors; nothing is handed out from now on."""
        self._layers = ()
        self._pool.close()

    @property
    def mine(self) -> Mine:
        """Raises InputError before `register`."""
        if self._mine is None:
            raise InputError(f"engine {self._who.name}: register the cache first")
        return self._mine

    def positions(self, layers: Iterable[str | int]) -> frozenset[int]:
        """The places in the order of registration that these names or places mean. Raises InputError."""
        known = self.mine.names
        chosen = []
        for layer in layers:
            if isinstance(layer, str) and layer in known:
                chosen.append(known.index(layer))
            elif isinstance(layer, int) and 0 <= layer < len(known):
                chosen.append(layer)
            else:
                raise InputError(f"there is no layer {layer!r}: there are {len(known)}, {known[0]!r} to {known[-1]!r}")
        return frozenset(chosen)

    def describe(self, boot_id: str, socket: bytes, address: tuple[str, int] | None, secret: bytes) -> bytes:
        mine = self.mine
        distinct = list(dict.fromkeys(mine.geometries))
        host, port = address or ("", 0)
        layers = [
            m.LayerEntry(name, distinct.index(geometry), at)
            for name, geometry, at in zip(mine.names, mine.geometries, mine.addresses, strict=True)
        ]
        return m.encode_description(
            m.Description(m.VERSION, self._who, boot_id, socket, host, port, secret, distinct, layers)
        )

    def home(self) -> Home:
        """For transports."""
        mine = self.mine
        # One range for each storage: layers may share one, and every registration costs.
        ranges: dict[Range, None] = {}
        for layer, geometry, address in zip(self._layers, mine.geometries, mine.addresses, strict=True):
            storage = layer.tensor.untyped_storage()
            whole = storage.data_ptr() <= address and address + geometry.span <= storage.data_ptr() + storage.nbytes()
            where = Range(storage.data_ptr(), storage.nbytes()) if whole else Range(address, geometry.span)
            ranges[where] = None
        segment = self._pool.segment
        shared = [] if segment is None else [Shared(segment[0].fd, segment[1], segment[0].size, segment[0].nonce)]
        return Home(self._who.engine_id, tuple(ranges), shared, self._settings, self._mover)
