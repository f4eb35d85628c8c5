"""Mooncake's transfer engine: other hosts over TCP or RDMA, and Ascend NPUs (protocol "ascend", not run on hardware
here).

The engine starts when the first peer asks for this transport. It picks its own port, which the offer publishes.

A batch that has begun cannot be called back: deadlines and cancellations are looked at between batches, and when a peer
neither answers nor dies, a transfer lasts until Mooncake gives up by itself (30 s; its environment variable
MC_TRANSFER_TIMEOUT, in seconds).
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from mooncake.engine import TransferEngine

from cam.errors import BackendUnavailable, NotReachable
from cam.transport.liveness import lost_soon
from cam.transport.pieces import Batch, Int64s, runs
from cam.transport.protocol import Ended, Home, Limits, Offer, Outcome, Target

#: Runs of one call. Its queue overflows between 2048 and 8192 (version 0.3.13); few also means that a
#: cancellation is noticed soon.
_RUNS = 1024
_BYTES = 64 << 20


class _Address(msgspec.Struct, array_like=True):
    session: str
    protocol: str


_decoder = msgspec.msgpack.Decoder(_Address)


class Mooncake:
    name = "mooncake"

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._engine: Any = None

    def offer(self, request: bytes) -> Offer:
        engine = self._started()
        settings = self._home.settings
        session = f"{settings.advertise}:{engine.get_rpc_port()}"
        return Offer(msgspec.msgpack.encode(_Address(session, settings.mooncake_protocol)))

    def connect(self, target: Target) -> "_Session":
        engine = self._started()
        try:
            address = _decoder.decode(target.ask(b"").blob)
        except msgspec.MsgspecError as error:
            raise NotReachable(f"mooncake: {target.name} answers in a way not understood: {error}") from None
        mine = self._home.settings.mooncake_protocol
        if address.protocol != mine:
            raise NotReachable(f"mooncake: the protocol is {mine} here and {address.protocol} at {target.name}")
        return _Session(engine, address, target)

    def close(self) -> None:
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                for each in self._home.ranges:
                    with contextlib.suppress(Exception):  # the engine goes in any case
                        engine.unregister_memory(each.address)

    def _started(self) -> Any:
        with self._lock:
            if self._engine is None:
                settings = self._home.settings
                engine = TransferEngine()
                code = engine.initialize(
                    settings.advertise, "P2PHANDSHAKE", settings.mooncake_protocol, settings.mooncake_device
                )
                if code != 0:
                    raise BackendUnavailable(
                        f"transport 'mooncake' does not start: initialize gave {code} for address "
                        f"{settings.advertise}, protocol {settings.mooncake_protocol!r}, device "
                        f"{settings.mooncake_device!r} (knobs: advertise, mooncake_protocol, mooncake_device)"
                    )
                for each in self._home.ranges:
                    code = engine.register_memory(each.address, each.nbytes)
                    if code != 0:
                        raise BackendUnavailable(
                            f"transport 'mooncake' does not register {each.nbytes} bytes of memory: {code}"
                        )
                self._engine = engine
            return self._engine


class _Session:
    """A peer's engine."""

    def __init__(self, engine: Any, address: _Address, target: Target) -> None:
        self._engine, self._session, self._target = engine, address.session, target
        self.reason = f"Mooncake over {address.protocol} to {address.session}"

    def addresses(self, theirs: Int64s) -> Int64s:
        return theirs

    def prepare(self, batch: Batch, to_mine: bool) -> "_Chunks":
        engine = self._engine
        call = engine.batch_transfer_sync_read if to_mine else engine.batch_transfer_sync_write
        return _Chunks(call, self._session, self._target, batch)

    def close(self) -> None:
        """Nothing to give back: the engine keeps its connections."""


class _Chunks:
    """A batch in parts that the engine's queue takes."""

    def __init__(self, call: Callable[..., int], session: str, target: Target, batch: Batch) -> None:
        self._call, self._session, self._target = call, session, target
        mine, theirs, nbytes, steps = runs(batch)
        self._chunks: list[tuple[int, list[int], list[int], list[int]]] = []
        begin, size = 0, 0
        for index, length in enumerate(nbytes.tolist()):
            if index > begin and (index - begin == _RUNS or size + length > _BYTES):
                self._add(begin, index, mine, theirs, nbytes, steps)
                begin, size = index, 0
            size += length
        if begin < len(nbytes):
            self._add(begin, len(nbytes), mine, theirs, nbytes, steps)

    def _add(self, begin: int, end: int, mine: Int64s, theirs: Int64s, nbytes: Int64s, steps: Int64s) -> None:
        part = slice(begin, end)
        self._chunks.append((int(steps[begin]), mine[part].tolist(), theirs[part].tolist(), nbytes[part].tolist()))

    def run(self, limits: Limits) -> Outcome:
        for step, mine, theirs, nbytes in self._chunks:
            if limits.is_cancelled():
                return Outcome(Ended.CANCELLED, step)
            if time.monotonic_ns() > limits.deadline_ns:
                return Outcome(Ended.LATE, step)
            lost = self._target.lost()
            if lost:
                return Outcome(Ended.LOST, step, lost)
            code = self._call(self._session, mine, theirs, nbytes)
            if code != 0:
                lost = lost_soon(self._target.lost)
                return Outcome(Ended.LOST if lost else Ended.FAILED, step, lost or f"Mooncake reports {code}")
        return Outcome(Ended.DONE)

    def close(self) -> None:
        self._chunks = []
