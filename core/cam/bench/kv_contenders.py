"""Who moves cache blocks between two processes: CAM, and the engines that others use, each by its own API.

A contender is two objects, one in each process: the owner's makes its pool reachable and answers `serve`; the
mover's fetches all pieces of the case in one `round`. What can be prepared is prepared before.
"""

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from cam import kv
from cam.bench.kv_plan import CHANNELS, HEADS, PLANES, KvCase


class Owner(Protocol):
    """announcement: what the mover's side needs."""

    pool: torch.Tensor
    announcement: Any

    def serve(self) -> None:
        """Called once for each round of the other side."""
        ...

    def close(self) -> None: ...


class Mover(Protocol):
    def round(self) -> None: ...

    def close(self) -> None: ...


def missing(contender: str) -> str:
    """Why a contender cannot take part here; "" when it can."""
    module, distribution = {
        "nixl": ("nixl_cu12", "nixl-cu12"),
        "mooncake": ("mooncake", "mooncake-transfer-engine-non-cuda"),
    }.get(contender, ("cam_kernels", "cam-kernels"))
    return "" if importlib.util.find_spec(module) is not None else f"{distribution} is not installed"


def owner(contender: str, case: KvCase, threads: int | None) -> Owner:
    if contender.startswith("cam-"):
        return _CamOwner(case, contender.removeprefix("cam-"), threads)
    kinds: dict[str, Any] = {"nixl": _NixlOwner, "mooncake": _MooncakeOwner, "gloo": _GlooOwner}
    made: Owner = kinds[contender](case)
    return made


def mover(contender: str, case: KvCase, pool: torch.Tensor, announcement: Any, threads: int | None) -> Mover:
    if contender.startswith("cam-"):
        return CamMover(case, pool, announcement, contender.removeprefix("cam-"), threads)
    kinds: dict[str, Any] = {"nixl": NixlMover, "mooncake": MooncakeMover, "gloo": GlooMover}
    made: Mover = kinds[contender](case, pool, announcement)
    return made


def empty_pool(case: KvCase) -> torch.Tensor:
    """[layers, planes, pool, tokens, heads, channels], private memory of this process, not touched yet."""
    return torch.empty(_pool_shape(case), dtype=torch.bfloat16)


def _pool_shape(case: KvCase) -> tuple[int, ...]:
    return (case.layers, PLANES, case.pool, case.tokens, HEADS, CHANNELS)


def _layers(pool: torch.Tensor) -> list[kv.Layer]:
    return [kv.Layer(f"layer.{index}", each, "pbthd") for index, each in enumerate(pool)]


def _addresses(case: KvCase, base: int, blocks: "np.ndarray[Any, np.dtype[np.int64]]") -> Any:
    return case.offsets(blocks) + base


class _Passive:
    """An owner that does nothing while others read."""

    def serve(self) -> None:
        """One-sided."""


class _CamOwner(_Passive):
    def __init__(self, case: KvCase, transport: str, threads: int | None) -> None:
        self._engine = kv.Engine("owner", options=kv.Options(threads=threads))
        shape = _pool_shape(case)
        self.pool = self._engine.empty(shape, torch.bfloat16) if transport == "shm" else empty_pool(case)
        self._engine.register(_layers(self.pool))
        self.announcement = self._engine.describe()

    def close(self) -> None:
        self._engine.close()


class CamMover:
    """Engine.read of everything, as a connector calls it: block ids in, one transfer. engine, remote: for latency."""

    def __init__(self, case: KvCase, pool: torch.Tensor, announcement: bytes, transport: str, threads: int | None):
        self.engine = kv.Engine("mover", options=kv.Options(threads=threads, timeout_s=120))
        self.engine.register(_layers(pool))
        self.announcement, self.transport = announcement, transport
        self.remote = self.engine.open(announcement, transport=transport)
        self.source, self.target = case.source(), case.target()

    def round(self) -> None:
        self.engine.read(self.remote, self.source, self.target).wait()

    def close(self) -> None:
        self.engine.close()


class _NixlOwner(_Passive):
    def __init__(self, case: KvCase) -> None:
        self.pool = empty_pool(case)
        self._agent = _nixl_agent("owner", self.pool)
        self.announcement = self._agent.get_agent_metadata(), self.pool.data_ptr()

    def close(self) -> None:
        """The process ends next."""


class NixlMover:
    """READ of prepared descriptor lists."""

    def __init__(self, case: KvCase, pool: torch.Tensor, announcement: tuple[bytes, int]) -> None:
        metadata, base = announcement
        self._agent = agent = _nixl_agent("mover", pool)
        peer = agent.add_remote_agent(metadata)
        mine = _addresses(case, pool.data_ptr(), case.target())
        theirs = _addresses(case, base, case.source())
        self._indices = np.arange(len(mine), dtype=np.int32)
        self._lists = [
            agent.prep_xfer_dlist(who, agent.get_xfer_descs(_nixl_rows(addresses, case.piece), "DRAM"))
            for who, addresses in (("NIXL_INIT_AGENT", mine), (peer, theirs))
        ]

    def round(self) -> None:
        agent, indices = self._agent, self._indices
        handle = agent.make_prepped_xfer("READ", self._lists[0], indices, self._lists[1], indices)
        state = agent.transfer(handle)
        while state != "DONE":
            state = agent.check_xfer_state(handle)
            if state == "ERR":
                raise RuntimeError("NIXL reports an error")
        agent.release_xfer_handle(handle)

    def close(self) -> None:
        """The process ends next."""


def _nixl_agent(name: str, pool: torch.Tensor) -> Any:
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
    agent.register_memory([(pool.data_ptr(), pool.nbytes, 0, "")], "DRAM")
    return agent


def _nixl_rows(addresses: Any, nbytes: int) -> Any:
    return np.stack([addresses, np.full_like(addresses, nbytes), np.zeros_like(addresses)], axis=1).astype(np.uint64)


class _MooncakeOwner(_Passive):
    def __init__(self, case: KvCase) -> None:
        self.pool = empty_pool(case)
        self._engine = _mooncake_engine(self.pool)
        self.announcement = f"127.0.0.1:{self._engine.get_rpc_port()}", self.pool.data_ptr()

    def close(self) -> None:
        """The process ends next."""


class MooncakeMover:
    """batch_transfer_sync_read, in batches that its queue takes."""

    _BATCH = 2048

    def __init__(self, case: KvCase, pool: torch.Tensor, announcement: tuple[str, int]) -> None:
        self._session, base = announcement
        self._engine = _mooncake_engine(pool)
        mine = _addresses(case, pool.data_ptr(), case.target()).tolist()
        theirs = _addresses(case, base, case.source()).tolist()
        self._batches = [
            (mine[i : i + self._BATCH], theirs[i : i + self._BATCH], [case.piece] * len(mine[i : i + self._BATCH]))
            for i in range(0, len(mine), self._BATCH)
        ]

    def round(self) -> None:
        for mine, theirs, sizes in self._batches:
            code = self._engine.batch_transfer_sync_read(self._session, mine, theirs, sizes)
            if code != 0:
                raise RuntimeError(f"Mooncake reports {code}")

    def close(self) -> None:
        """The process ends next."""


def _mooncake_engine(pool: torch.Tensor) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    for code in (
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
        engine.register_memory(pool.data_ptr(), pool.nbytes),
    ):
        if code != 0:
            raise RuntimeError(f"Mooncake reports {code}")
    return engine


class _GlooOwner:
    """Gathers and sends layer by layer."""

    def __init__(self, case: KvCase) -> None:
        self.pool = empty_pool(case)
        self._ids = torch.from_numpy(case.source())
        self._staging = torch.empty_like(self.pool[0, :, : case.blocks])
        directory = tempfile.mkdtemp(prefix="cam-bench-kv-")
        self.announcement = os.path.join(directory, "store")
        self._joined = False

    def serve(self) -> None:
        if not self._joined:
            _join_gloo(self.announcement, 0)
            self._joined = True
        for layer in self.pool:
            torch.index_select(layer, 1, self._ids, out=self._staging)
            dist.send(self._staging, 1)

    def close(self) -> None:
        if self._joined:
            dist.destroy_process_group()
        shutil.rmtree(os.path.dirname(self.announcement), ignore_errors=True)


class GlooMover:
    """Receives and scatters layer by layer."""

    def __init__(self, case: KvCase, pool: torch.Tensor, announcement: str) -> None:
        self._pool, self._path = pool, announcement
        self._ids = torch.from_numpy(case.target())
        self._staging = torch.empty_like(pool[0, :, : case.blocks])
        self._joined = False

    def round(self) -> None:
        if not self._joined:  # together with the owner's first `serve`, in a round that is not timed
            _join_gloo(self._path, 1)
            self._joined = True
        for layer in self._pool:
            dist.recv(self._staging, 0)
            layer.index_copy_(1, self._ids, self._staging)

    def close(self) -> None:
        if self._joined:
            dist.destroy_process_group()


def _join_gloo(path: str, rank: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))


class Floor:
    """One plain copy of as many bytes without gaps, within the mover's process."""

    def __init__(self, case: KvCase, pool: torch.Tensor, *, nontemporal: bool, threads: int) -> None:
        from cam_kernels import Mover as NativeMover

        self._source = torch.ones(case.nbytes, dtype=torch.uint8)
        self._target = pool
        self._mover = NativeMover(threads, "auto", 0 if nontemporal else 1 << 62)
        chunk = 1 << 20
        starts = np.arange(0, case.nbytes, chunk, dtype=np.int64)
        sizes = np.minimum(chunk, case.nbytes - starts)
        ones, zeros = np.ones_like(starts), np.zeros_like(starts)
        self._table = np.ascontiguousarray(np.stack([starts, starts, sizes, ones, zeros, zeros], axis=1))
        self._bases = np.array([pool.data_ptr()], np.int64), np.array([self._source.data_ptr()], np.int64)

    def round(self) -> None:
        mine, theirs = self._bases
        self._mover.copy(self._table.ctypes.data, len(self._table), mine.ctypes.data, theirs.ctypes.data, 1, True, 0, 0)

    def close(self) -> None:
        """Nothing to give back."""


def timed(round_: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    round_()
    return time.perf_counter() - began
