"""Shared memory: the owner passes the descriptors of its segments, the peer maps them and copies.

One copy, with non-temporal stores where it is large; nothing is sent. What the owner wrote stays readable after
its death, for as long as the mapping lives, so its death in the middle of a read harms nobody.
"""

import os
from collections.abc import Sequence

import msgspec
import numpy as np

from cam.errors import NotReachable
from cam.memory.segment import NONCE_BYTES, doubt
from cam.transport.copying import Copy
from cam.transport.pieces import Batch, Int64s
from cam.transport.protocol import Home, Offer, Range, Target
from cam_kernels import Mapping, Mover


class _Segment(msgspec.Struct, array_like=True):
    address: int
    nbytes: int
    nonce: bytes


_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(list[_Segment])


class Shm:
    name = "shm"

    def __init__(self, home: Home) -> None:
        self._home = home

    def offer(self, request: bytes) -> Offer:
        outside = _outside(self._home.ranges, [Range(each.address, each.nbytes) for each in self._home.shared])
        if outside:
            raise NotReachable(f"shm: {self._home.name}: {outside} of its regions are not in CAM memory")
        shared = self._home.shared
        return Offer(
            _encode([_Segment(each.address, each.nbytes, each.nonce) for each in shared]),
            tuple(each.fd for each in shared),
        )

    def connect(self, target: Target) -> "_Mapped":
        if not target.passes_fds:
            raise NotReachable(f"shm: {target.name} is not reached over a Unix socket: it is on another host")
        offer = target.ask(b"")
        try:
            return _Mapped(self._home.mover, target, _decode(target.name, offer), offer.fds)
        finally:
            for fd in offer.fds:
                os.close(fd)

    def close(self) -> None:
        """Nothing to give back."""


class _Mapped:
    """A peer's segments, mapped here."""

    def __init__(self, mover: Mover, target: Target, segments: list[_Segment], fds: tuple[int, ...]) -> None:
        self._mover = mover
        self._maps: list[tuple[int, int, Mapping]] = []
        for segment, fd in zip(segments, fds, strict=True):
            why = doubt(fd, segment.nonce, segment.nbytes)
            if why:
                raise NotReachable(f"shm: {target.name}: {why}")
            self._maps.append((segment.address, segment.nbytes, Mapping(fd, segment.nbytes)))
        outside = _outside(target.ranges, [Range(address, nbytes) for address, nbytes, _ in self._maps])
        if outside:
            raise NotReachable(f"shm: {target.name}: {outside} of its regions are not in the memory it handed over")
        size = sum(nbytes for _, nbytes, _ in self._maps)
        self.reason = f"same host, mapped {len(self._maps)} segment(s) of {size / 2**30:.2f} GiB"

    def addresses(self, theirs: Int64s) -> Int64s:
        mine = np.empty_like(theirs)
        for index, address in enumerate(theirs.tolist()):
            mine[index] = next(
                mapping.address + address - start
                for start, nbytes, mapping in self._maps
                if start <= address < start + nbytes
            )
        return mine

    def prepare(self, batch: Batch, to_mine: bool) -> Copy:
        return Copy(self._mover.copy, batch, to_mine, None)

    def close(self) -> None:
        self._maps.clear()


def _decode(name: str, offer: Offer) -> list[_Segment]:
    try:
        segments = _decoder.decode(offer.blob)
    except msgspec.MsgspecError as error:
        raise NotReachable(f"shm: {name} announces its segments in a way not understood: {error}") from None
    if len(segments) != len(offer.fds) or any(len(each.nonce) != NONCE_BYTES for each in segments):
        raise NotReachable(f"shm: {name} announces {len(segments)} segments and hands over {len(offer.fds)}")
    return segments


def _outside(ranges: Sequence[Range], segments: Sequence[Range]) -> int:
    """How many ranges do not lie in one of the segments."""
    return sum(
        not any(s.address <= r.address and r.address + r.nbytes <= s.address + s.nbytes for s in segments)
        for r in ranges
    )
