"""What the processes of the transport conformance suite do. Every program is (env, meeting name, transport, ...)."""

import contextlib
import os
import time

import pytest
import torch

from cam import PeerLost, TransferCancelled, TransferFailed, kv
from cam.deadline import Deadline
from cam.kv import messages
from tests.core.kv.meeting import TIMEOUT_S, Meeting, make
from tests.core.kv.oracle import Shape, content, fill, model
from tests.launcher import RankEnv, reached

LAYERS = 3


def _shared(transport: str) -> bool:
    return transport != "cma"


def _pattern(shape: Shape):
    """Fills a pool with numbers that differ everywhere and by layer."""

    def write(tensor: torch.Tensor, layer: int) -> None:
        count = tensor.numel()
        tensor.copy_((torch.arange(count) * 31 + layer * 7919 + 1).remainder(30011).view(tensor.shape))

    return write


def _zeros(tensor: torch.Tensor, _layer: int) -> None:
    tensor.zero_()


def _pair(env: RankEnv, name: str, transport: str, shape: Shape, layers: int = LAYERS, **options):
    """Rank 0 owns, rank 1 moves. Returns (meeting, engine, tensors, remote or None)."""
    meeting = Meeting(env, name)
    if env.rank == 0:
        engine, tensors = make(
            "owner", shape, layers, shared=_shared(transport), fill=_pattern(shape), transports=(transport,), **options
        )
        meeting.put("owner", engine.describe())
        return meeting, engine, tensors, None
    engine, tensors = make("mover", shape, layers, shared=False, fill=_zeros, transports=(transport,), **options)
    return meeting, engine, tensors, engine.open(meeting.get("owner"), transport=transport)


def _expected(shape: Shape, layer: int) -> torch.Tensor:
    tensor = torch.empty(shape.sizes(), dtype=shape.dtype)
    _pattern(shape)(tensor, layer)
    return tensor


SHAPE = Shape("pbthd", blocks=12, tokens=16, total_heads=2, channels=32, dtype=torch.float32)


def read_and_write(env: RankEnv, name: str, transport: str) -> None:
    """Reads some blocks, writes some: exactly those arrive, with a word about each."""
    meeting, engine, tensors, remote = _pair(env, name, transport, SHAPE)
    with engine:
        if remote is None:
            meeting.get("moved")
            words = [event.payload for event in engine.poll() if isinstance(event, kv.Notification)]
            assert words == [b"read", b"written"]
            for layer, tensor in enumerate(tensors):
                expected = _expected(SHAPE, layer)
                expected[:, [8, 3]] = expected[:, [1, 11]]  # what was read there comes back here
                assert torch.equal(tensor, expected)
            meeting.put("looked")
            return
        assert remote.transport == transport
        assert remote.reason.startswith(transport)
        engine.read(remote, [1, 11, 5], [0, 7, 2], notify=b"read").wait()
        for layer, tensor in enumerate(tensors):
            expected = torch.zeros_like(tensor)
            expected[:, [0, 7, 2]] = _expected(SHAPE, layer)[:, [1, 11, 5]]
            assert torch.equal(tensor, expected)
        engine.write(remote, [8, 3], [0, 7], notify=b"written").wait()
        meeting.put("moved")
        meeting.get("looked")


def prepared_layer_by_layer(env: RankEnv, name: str, transport: str) -> None:
    """Prepared once, posted for each layer, then for all, again and again."""
    meeting, engine, tensors, remote = _pair(env, name, transport, SHAPE)
    with engine:
        if remote is None:
            meeting.get("done")
            return
        prepared = engine.prepare("read", remote, [4, 2], [9, 10])
        for layer in range(LAYERS):
            prepared.post(layers=[layer]).wait()
            assert [bool(tensor.any()) for tensor in tensors] == [index <= layer for index in range(LAYERS)]
        for _ in range(20):
            for tensor in tensors:
                tensor.zero_()
            prepared.post().wait()
            for layer, tensor in enumerate(tensors):
                assert torch.equal(tensor[:, [9, 10]], _expected(SHAPE, layer)[:, [4, 2]])
        prepared.close()
        prepared.close()
        meeting.put("done")


def nothing_to_move(env: RankEnv, name: str, transport: str) -> None:
    """No blocks: only the word is passed on, and the lease released."""
    meeting, engine, tensors, remote = _pair(env, name, transport, SHAPE)
    with engine:
        if remote is None:
            engine.lease("empty", tag=b"tag")
            meeting.put("leased")
            meeting.get("done")
            events = engine.poll()
            assert [type(event) for event in events] == [kv.Notification, kv.LeaseEnded]
            assert (events[1].tag, events[1].reason) == (b"tag", "released")
            meeting.put("looked")
            return
        meeting.get("leased")
        engine.read(remote, [], [], lease="empty", notify=b"hit").wait()
        assert not any(bool(tensor.any()) for tensor in tensors)
        meeting.put("done")
        meeting.get("looked")


def other_geometry(env: RankEnv, name: str, transport: str) -> None:
    """Two ranks with heads divided hand over to one with other layout and block size, and take back."""
    meeting = Meeting(env, name)
    truth = [model(77, 4, 8, 2, layer) for layer in range(LAYERS)]
    if env.rank < 2:
        shape = Shape("bpthd", 9, 16, 4, env.rank, 2)
        blocks = [7, 1, 3, 8, 0]
    else:
        shape = Shape("bphtd", 4, 64, 4)
        blocks = [3, 0]

    def prefill(tensor: torch.Tensor, layer: int) -> None:
        tensor.zero_()
        if env.rank < 2:
            fill(shape, tensor, blocks, truth[layer])

    engine, tensors = make(
        f"rank{env.rank}", shape, LAYERS, shared=_shared(transport), fill=prefill, transports=(transport,)
    )
    with engine:
        if env.rank < 2:
            meeting.put(f"owner{env.rank}", engine.describe())
            meeting.get("written")
            for layer, tensor in enumerate(tensors):
                got = content(shape, tensor, blocks, range(77))
                heads = slice(shape.heads.first, shape.heads.end)
                assert torch.equal(got[10:74], truth[layer][:64].roll(1, 0)[:, :, heads])
                assert torch.equal(got[:10], truth[layer][:10, :, heads])
            meeting.together("looked")
            return
        remote = engine.open(meeting.get("owner1"), meeting.get("owner0"))
        engine.read(remote, [7, 1, 3, 8, 0], blocks, tokens=77, checksum=True).wait()
        for layer, tensor in enumerate(tensors):
            assert torch.equal(content(shape, tensor, blocks, range(77)), truth[layer])
            fill(shape, tensor, blocks, truth[layer][:64].roll(1, 0))
        engine.write(remote, [7, 1, 3, 8, 0], blocks, tokens=64, remote_start=10, checksum=True).wait()
        meeting.put("written")
        meeting.together("looked")


BIG = Shape("pbthd", blocks=512, tokens=16, total_heads=8, channels=64, dtype=torch.float32)  # 32 MiB a layer


def cancelled(env: RankEnv, name: str, transport: str) -> None:
    """Cancelled at once, or when all was done: either way nothing moves after done(), and the next one works."""
    meeting, engine, tensors, remote = _pair(env, name, transport, BIG, layers=2)
    with engine:
        if remote is None:
            meeting.get("done")
            return
        blocks = list(range(BIG.blocks))
        outcomes = set()
        for _ in range(4):
            transfer = engine.read(remote, blocks, blocks)
            transfer.cancel()
            transfer.cancel()
            try:
                transfer.wait(TIMEOUT_S)
                outcomes.add("done")
            except TransferCancelled:
                outcomes.add("cancelled")
                assert transfer.failed_blocks == tuple(blocks)
            assert transfer.done()
            for tensor in tensors:
                tensor.fill_(-1)
            assert all(bool((tensor == -1).all()) for tensor in tensors)
        assert "cancelled" in outcomes
        engine.read(remote, [3], [5]).wait()
        assert torch.equal(tensors[1][:, 5], _expected(BIG, 1)[:, 3])
        assert engine.metrics()["flows"][0]["cancelled"] >= 1
        meeting.put("done")


def owner_dies(env: RankEnv, name: str, transport: str) -> float:
    """Killed while it is being read, again and again: the reader gets an answer soon, and names the peer."""
    _, engine, _, remote = _pair(env, name, transport, BIG, layers=2, timeout_s=20.0)
    if remote is None:
        reached("owner is up")
        while True:
            time.sleep(60)
    with engine:
        blocks = list(range(BIG.blocks))
        prepared = engine.prepare("read", remote, blocks, blocks)
        prepared.post().wait()
        reached("reading")
        transfer, until = None, time.monotonic() + 30
        while (transfer is None or not transfer.error) and time.monotonic() < until:
            started = time.monotonic()
            transfer = prepared.post(notify=b"still there?")
            with contextlib.suppress(TransferFailed):
                transfer.wait(90)
        took = time.monotonic() - started
        assert isinstance(transfer.error, TransferFailed), "no transfer failed although the owner was killed"
        assert isinstance(transfer.error.cause, PeerLost), transfer.error
        assert "owner" in str(transfer.error)
        assert transfer.failed_blocks == tuple(blocks)
        assert not remote.alive
        with pytest.raises(PeerLost):
            remote.notify(b"hello?")
        with pytest.raises((TransferFailed, PeerLost)):
            engine.read(remote, [0], [0], notify=b"x").wait(90)
        prepared.close()
        return took


def owner_stops(env: RankEnv, name: str, transport: str) -> tuple[float, str]:
    """Stopped (SIGSTOP) while it is being read: the blocks arrive, where that takes nobody's help, or the transfer ends
    soon after its deadline. Returns (seconds, what became of it)."""
    os.environ["MC_TRANSFER_TIMEOUT"] = "5"  # Mooncake's own, which decides when nobody answers
    _, engine, _, remote = _pair(env, name, transport, BIG, layers=2)
    if remote is None:
        reached("owner is up")
        while True:
            time.sleep(60)
    blocks = list(range(BIG.blocks))
    prepared = engine.prepare("read", remote, blocks, blocks, checksum=False)
    prepared.post().wait()
    reached("reading")
    until = time.monotonic() + 2
    outcome, took = "done", 0.0
    while outcome == "done" and time.monotonic() < until:
        started = time.monotonic()
        transfer = prepared.post(timeout=TIMEOUT_S if transport in ("shm", "cma") else 2)
        try:
            transfer.wait(90)
        except TransferFailed:
            outcome = str(transfer.error)
        took = time.monotonic() - started
    with pytest.raises(TransferFailed, match="did not answer" if transport in ("shm", "cma") else "owner"):
        engine.read(remote, [0], [0], checksum=False, notify=b"asleep?", timeout=1).wait(90)
    reached("through")
    return took, outcome


def reader_dies(env: RankEnv, name: str, transport: str) -> None:
    """Rank 1 is killed while it reads under a lease; the owner hears of it, and serves rank 2."""
    meeting = Meeting(env, name)
    if env.rank == 0:
        meeting_, engine, tensors, _ = _pair(env, name, transport, BIG, layers=2)
        del meeting_
        with engine:
            engine.lease("loan", tag=b"blocks", ttl_s=300)
            meeting.put("leased")
            events: list[kv.Event] = []
            until = time.monotonic() + TIMEOUT_S
            while len(events) < 2 and time.monotonic() < until:
                events += engine.poll()
                time.sleep(0.01)
            kinds = {type(event): event for event in events}
            assert kinds[kv.LeaseEnded].reason == "readers lost", events
            assert kinds[kv.PeerGone].name == "mover"
            assert engine.metrics()["leases"]["readers lost"] == 1
            meeting.put("go on")
            meeting.get("done")
        return
    if env.rank == 2:
        meeting.get("go on")
        _, engine, tensors, remote = _pair(env, name, transport, BIG, layers=2)
        with engine:
            engine.read(remote, [1], [2]).wait()
            assert torch.equal(tensors[0][:, 2], _expected(BIG, 0)[:, 1])
            meeting.put("done")
        return
    _, engine, tensors, remote = _pair(env, name, transport, BIG, layers=2)
    meeting.get("leased")
    blocks = list(range(BIG.blocks))
    # Touched by a transfer that will not end: the last of its three runs is interrupted by the kill.
    remote.parts[0].link.ask(messages.Touch("loan"), messages.LeaseAnswer, Deadline(10), "lease")
    reached("reading")
    while True:
        engine.read(remote, blocks, blocks).wait()


def late(env: RankEnv, name: str, transport: str) -> None:
    """A deadline that cannot be met ends the transfer as a failed one; the next one works."""
    meeting, engine, tensors, remote = _pair(env, name, transport, BIG, layers=2)
    with engine:
        if remote is None:
            meeting.get("done")
            return
        blocks = list(range(BIG.blocks))
        transfer = engine.read(remote, blocks, blocks, timeout=1e-9)
        with pytest.raises(TransferFailed, match="not done in time"):
            transfer.wait(TIMEOUT_S)
        assert transfer.failed_blocks == tuple(blocks)
        engine.read(remote, [3], [5]).wait()
        assert torch.equal(tensors[1][:, 5], _expected(BIG, 1)[:, 3])
        meeting.put("done")
