"""Who shares memory with whom: decided once, by all ranks alike, and every failure told to all."""

import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

import cam
from cam import host, peers
from cam.deadline import Deadline
from cam.memory.handover import Handed, Handover
from cam.memory.segment import NONCE_BYTES, Segment
from cam.peers import Links, link
from cam.rendezvous import StoreRendezvous
from tests.core.threads_as_ranks import LIMIT_S, descriptors_open, on_threads


def link_all(
    size: int, make_segment: Callable[[int, int], Segment] | None = None, limit_s: float = LIMIT_S
) -> list[Any]:
    """link() on a thread per rank, over one store. make_segment(rank, ranks on this host)."""
    store = dist.HashStore()
    make = make_segment or (lambda rank, local: Segment(f"rank{rank}", 4096 * local))

    def rank_main(rank: int) -> Links:
        rendezvous = StoreRendezvous(store, rank, size, "cam")
        return link(rendezvous, lambda local: make(rank, local), Deadline(limit_s))

    return on_threads(size, rank_main)


def close_all(linked: list[Any]) -> None:
    for links in linked:
        links.close()
        links.close()


def test_ranks_of_one_host_share_memory() -> None:
    before = descriptors_open()
    linked = link_all(4)
    for rank, links in enumerate(linked):
        assert links.unreachable == ""
        assert [peer.rank for peer in links.peers] == [0, 1, 2, 3]
        assert all(peer.shares_memory and not peer.reason for peer in links.peers)
        assert set(links.handed) == {0, 1, 2, 3} - {rank}
        assert os.pread(links.handed[(rank + 1) % 4].fd, NONCE_BYTES, 0) == linked[(rank + 1) % 4].segment.nonce
        assert links.segment.size == 4 * 4096
    close_all(linked)
    assert descriptors_open() == before


def hosts_by_thread(monkeypatch: pytest.MonkeyPatch, boots: list[str]) -> None:
    """Lets ranks believe to run on different hosts. Ranks are told apart by the order of their questions."""
    turn = iter(boots)
    lock = threading.Lock()
    by_thread: dict[int, str] = {}

    def boot_id() -> str:
        with lock:
            return by_thread.setdefault(threading.get_ident(), next(turn))

    monkeypatch.setattr(host, "boot_id", boot_id)


def test_another_host_is_told_apart_by_its_boot_id(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts_by_thread(monkeypatch, ["a", "b", "a"])
    linked = link_all(3)
    assert len({links.unreachable for links in linked}) == 1
    assert "it runs on another host" in linked[0].unreachable
    alone = [len(links.handed) for links in linked].index(0)
    for rank, links in enumerate(linked):
        for peer in links.peers:
            together = peer.rank == rank or alone not in (rank, peer.rank)
            assert peer.shares_memory == together
            assert ("another host" in peer.reason) == (not together)
    close_all(linked)


def test_a_socket_that_cannot_be_reached_is_known_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two network namespaces: rank 2 finds nobody at rank 0's address, and rank 0 does not wait
    for it."""
    knock = Handover.knock

    def broken(self: Handover, lower: dict[int, bytes], deadline: Deadline) -> dict[int, str]:
        if len(lower) == 2:  # rank 2
            lower = lower | {0: b"\0nobody"}
        return knock(self, lower, deadline)

    monkeypatch.setattr(Handover, "knock", broken)
    linked = link_all(3)
    assert len({links.unreachable for links in linked}) == 1
    assert linked[0].unreachable.startswith("rank 2 cannot share memory with rank 0: its socket cannot be")
    assert [sorted(links.handed) for links in linked] == [[1], [0, 2], [1]]
    assert "seen from there" in linked[0].peers[2].reason
    close_all(linked)


def test_memory_that_is_not_the_announced_memory_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under a sandbox that copies descriptors: rank 0's number is not found in what it handed over."""

    def make(rank: int, local: int) -> Segment:
        segment = Segment("test", 4096)
        if rank == 0:
            segment.nonce = b"?" * NONCE_BYTES
        return segment

    linked = link_all(2, make)
    assert linked[0].unreachable == linked[1].unreachable
    assert linked[1].unreachable.startswith("rank 1 cannot share memory with rank 0: its segment holds")
    assert linked[0].handed == linked[1].handed == {}
    close_all(linked)


def test_one_ranks_failure_is_everybodys_with_its_cause() -> None:
    before = descriptors_open()

    def make(rank: int, local: int) -> Segment:
        if rank == 1:
            raise OSError(12, "no memory for you")
        return Segment("test", 4096)

    first, second, third = link_all(3, make)
    assert isinstance(second, OSError)
    for error in (first, third):
        assert isinstance(error, cam.GroupAborted)
        assert "init (reach): rank 1 failed" in str(error)
        assert "no memory for you" in str(error)
    assert descriptors_open() == before


def test_the_last_step_is_common_as_well() -> None:
    linked = link_all(2)

    def rank_main(rank: int) -> None:
        def ready() -> None:
            if rank == 0:
                raise ValueError("cannot map")

        linked[rank].agree(ready, Deadline(LIMIT_S))

    first, second = on_threads(2, rank_main)
    assert isinstance(first, ValueError)
    assert isinstance(second, cam.GroupAborted)
    assert "init (ready): rank 0 failed: ValueError: cannot map" in str(second)
    close_all(linked)


class Tampered:
    """A rendezvous of two in which rank 1's first message is replaced."""

    rank, size = 0, 2

    def __init__(self, replace: Callable[[bytes], bytes]) -> None:
        self._replace = replace

    def all_gather(self, key: str, payload: bytes, timeout_s: float) -> list[bytes]:
        return [payload, self._replace(payload)]


@pytest.mark.parametrize("message", [b"", b"\xff\x00", b"x" * 5_000_000, msgspec.msgpack.encode([1, 2])])
def test_a_message_that_is_not_understood_names_its_rank(message: bytes) -> None:
    with pytest.raises(cam.CamError, match="message of rank 1 is not understood"):
        link(Tampered(lambda _: message), lambda _: Segment("test", 4096), Deadline(1.0))


def test_another_version_is_refused_by_name() -> None:
    def other(message: bytes) -> bytes:
        envelope = msgspec.msgpack.decode(message)
        return msgspec.msgpack.encode(envelope | {"protocol": peers.PROTOCOL + 1, "release": "9.9"})

    with pytest.raises(cam.Mismatch, match=r"rank 1 runs cam 9\.9") as caught:
        link(Tampered(other), lambda _: Segment("test", 4096), Deadline(1.0))
    assert (caught.value.field, caught.value.rank) == ("protocol", 1)


def test_ranks_must_agree_on_the_number_of_ranks() -> None:
    store = dist.HashStore()

    def rank_main(rank: int) -> Links:
        rendezvous = StoreRendezvous(store, rank, 2, "cam")
        rendezvous.size += rank  # rank 1 believes in 3 ranks
        if rank == 1:
            store.set("cam/cam/1/hello/2", store.get("cam/cam/1/hello/0"))
        return link(rendezvous, lambda _: Segment("test", 4096), Deadline(LIMIT_S))

    for error in on_threads(2, rank_main):
        assert isinstance(error, cam.Mismatch)
        assert error.field == "world_size"
        assert {error.mine, error.theirs} == {"2", "3"}


def test_handed_descriptors_are_closed() -> None:
    first, second = os.pipe()
    Handed(first, second, 1).close()
    for descriptor in (first, second):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
