"""A transport that damages what it moves: registered by the test of checksums, as any other could be."""

import ctypes

from cam.transport import Home, Offer, Target
from cam.transport.cma import Cma
from cam.transport.pieces import MY_OFFSET


class Corrupting:
    """cma, then one bit of the first piece of the first layer flips on this side."""

    name = "corrupting"

    def __init__(self, home: Home) -> None:
        self._cma = Cma(home)

    def offer(self, request: bytes) -> Offer:
        return self._cma.offer(request)

    def connect(self, target: Target) -> "_Channel":
        return _Channel(self._cma.connect(target))

    def close(self) -> None:
        self._cma.close()


class _Channel:
    reason = "for tests"

    def __init__(self, channel) -> None:
        self._channel = channel
        self.addresses = channel.addresses
        self.close = channel.close

    def prepare(self, batch, to_mine):
        return _Ready(self._channel.prepare(batch, to_mine), batch)


class _Ready:
    def __init__(self, ready, batch) -> None:
        self._ready, self._batch = ready, batch
        self.close = ready.close

    def run(self, limits):
        outcome = self._ready.run(limits)
        address = int(self._batch.mine[0] + self._batch.table[0, MY_OFFSET])
        byte = ctypes.c_uint8.from_address(address)
        byte.value ^= 1
        return outcome
