"""Segments, and how they are handed over: to every peer, and to nobody else."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cam
from cam.deadline import Deadline
from cam.memory.handover import SECRET_BYTES, Handover
from cam.memory.segment import NONCE_BYTES, Segment, doubt
from tests.core.threads_as_ranks import LIMIT_S, descriptors_open, on_threads

SECRET = b"s" * SECRET_BYTES


def test_a_segment_has_no_name_and_a_fixed_size() -> None:
    before = os.listdir("/dev/shm")
    segment = Segment("test", 1 << 20)
    try:
        assert os.readlink(f"/proc/self/fd/{segment.fd}").startswith("/memfd:cam-test")
        assert not os.get_inheritable(segment.fd)
        assert os.listdir("/dev/shm") == before
        for size in (0, 1 << 21):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
        assert doubt(segment.fd, segment.nonce, 1 << 20) == ""
    finally:
        segment.close()
        segment.close()


def test_what_is_not_the_announced_segment_is_noticed() -> None:
    segment = Segment("test", 4096)
    unsealed = os.memfd_create("other")
    try:
        assert "another number" in doubt(segment.fd, b"x" * NONCE_BYTES, 4096)
        assert "4096 bytes" in doubt(segment.fd, segment.nonce, 8192)
        os.ftruncate(unsealed, 4096)
        os.pwrite(unsealed, segment.nonce, 0)
        assert "not sealed" in doubt(unsealed, segment.nonce, 4096)
    finally:
        segment.close()
        os.close(unsealed)
    assert "cannot be read" in doubt(unsealed, b"", 0)


@contextlib.contextmanager
def handovers(size: int) -> Iterator[list[Handover]]:
    with contextlib.ExitStack() as stack:
        made = [Handover(rank) for rank in range(size)]
        for handover in made:
            stack.callback(handover.close)
        yield made


def exchange_all(
    made: list[Handover], secrets: list[bytes], strangers: Callable[[bytes], None] | None = None
) -> list[Any]:
    """Knocks and exchanges on a thread per rank; every rank hands over a segment. Returns what each sees."""
    size = len(made)
    segments = [Segment(f"rank{rank}", 4096) for rank in range(size)]
    knocked = threading.Barrier(size)

    def rank_main(rank: int) -> dict[int, str]:
        deadline = Deadline(LIMIT_S)
        refusals = made[rank].knock({peer: made[peer].address for peer in range(rank)}, deadline)
        assert refusals == {}
        if strangers is not None:
            strangers(made[rank].address)
        knocked.wait(LIMIT_S)
        handed, refusals = made[rank].exchange(segments[rank].fd, secrets[rank], range(rank + 1, size), deadline)
        for peer, each in handed.items():
            assert doubt(each.fd, segments[peer].nonce, 4096) == ""
            assert each.pid == os.getpid()
            each.close()
        assert set(handed) | set(refusals) == set(range(size)) - {rank}
        return refusals

    try:
        return on_threads(size, rank_main)
    finally:
        for segment in segments:
            segment.close()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_pair_swaps_segments(size: int) -> None:
    before = descriptors_open()
    with handovers(size) as made:
        assert exchange_all(made, [SECRET] * size) == [{}] * size
    assert descriptors_open() == before


def test_strangers_neither_stall_nor_receive_anything() -> None:
    """Silent ones, babblers, one that hangs up, one that claims to be a rank, one that floods descriptors."""
    received: list[bytes] = []
    connections: list[socket.socket] = []

    def strangers(address: bytes) -> None:
        for message in (
            None,
            b"",
            b"x" * 100_000,
            b"cam-call" + b"\1\0\0\0" + b"n" * 32,
            "hang up",
            "descriptors",
        ):
            stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stranger.connect(address)
            connections.append(stranger)
            if message == "hang up":
                stranger.close()
            elif message == "descriptors":
                socket.send_fds(stranger, [b"cam-call"], [0] * 50)
            elif isinstance(message, bytes):
                stranger.send(message)

    before = descriptors_open()
    with handovers(3) as made:
        assert exchange_all(made, [SECRET] * 3, strangers) == [{}] * 3
    for connection in connections:
        if connection.fileno() >= 0:
            connection.setblocking(False)
            with contextlib.suppress(OSError):
                message, descriptors, _, _ = socket.recv_fds(connection, 1000, 10)
                received.append(message)
                assert descriptors == []
        connection.close()
    assert descriptors_open() == before


def test_a_peer_without_the_secret_is_refused() -> None:
    """The caller notices; the host sees a stranger who never proves to be rank 1, until its deadline."""
    with handovers(2) as made:
        segment = Segment("test", 4096)
        assert made[1].knock({0: made[0].address}, Deadline(LIMIT_S)) == {}

        def rank_main(rank: int) -> Any:
            secret = SECRET if rank == 0 else b"t" * SECRET_BYTES
            return made[rank].exchange(segment.fd, secret, [1] if rank == 0 else [], Deadline(0.5))

        at_host, at_caller = on_threads(2, rank_main)
        segment.close()
    assert isinstance(at_host, cam.Timeout)
    assert (at_host.phase, at_host.ranks) == ("handover", (1,))
    assert at_caller[0] == {}
    assert "it does not know this rendezvous's secret" in at_caller[1][0]


def test_a_host_does_not_give_its_segment_to_a_caller_without_the_secret() -> None:
    with handovers(1) as made, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        segment = Segment("test", 4096)
        caller.connect(made[0].address)
        caller.send(b"cam-call" + b"\1\0\0\0" + b"n" * 32)
        socket.send_fds(caller, [b"p" * 32], [segment.fd])
        before = descriptors_open()
        with pytest.raises(cam.Timeout):
            made[0].exchange(segment.fd, SECRET, [1], Deadline(0.3))
        assert descriptors_open() == before
        answer, descriptors, _, _ = socket.recv_fds(caller, 1000, 10)
        assert (len(answer), descriptors) == (64, [])
        assert socket.recv_fds(caller, 1000, 10)[:2] == (b"", [])
        segment.close()


def test_who_does_not_listen_is_not_waited_for() -> None:
    with handovers(2) as made:
        address = made[0].address
        made[0].close()
        refusals = made[1].knock({0: address}, Deadline(LIMIT_S))
        assert "nobody listens there" in refusals[0]
        assert made[1].exchange(0, SECRET, [], Deadline(LIMIT_S)) == ({}, {})


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.geteuid()
    with handovers(2) as made:
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        refusals = made[1].knock({0: made[0].address}, Deadline(LIMIT_S))
    assert f"it runs as user {mine}, this rank as user {mine + 1}" in refusals[0]
