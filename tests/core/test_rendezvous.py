"""How ranks find each other and hand over memory: everything before the native module has a say.

Ranks are threads here: these pieces know nothing of processes, and a thread can play a stranger or a liar.
"""

import contextlib
import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

import cam
from cam import host, peers
from cam.deadline import Deadline
from cam.memory.handover import SECRET_BYTES, Handed, Handover
from cam.memory.segment import NONCE_BYTES, Segment, doubt
from cam.peers import Links, link
from cam.rendezvous import Alone, StoreRendezvous, from_environment

LIMIT_S = 20.0
SECRET = b"s" * SECRET_BYTES


def on_threads(size: int, fn: Callable[[int], Any]) -> list[Any]:
    """fn(rank) on as many threads as there are ranks; exceptions are returned in place of results."""

    def run(rank: int) -> Any:
        try:
            return fn(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def descriptors_open() -> int:
    gc.collect()  # stores of earlier tests hold sockets
    return len(os.listdir("/proc/self/fd"))


# --- rendezvous over stores ---------------------------------------------------------------------------------


@pytest.fixture(params=["hash", "file", "tcp", "prefix"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """Makes a rank's own connection to one store, for each kind of store that torch has."""
    if request.param == "hash":
        shared = dist.HashStore()
        yield lambda: shared
    elif request.param == "file":
        yield lambda: dist.FileStore(str(tmp_path / "store"), -1)
    else:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        prefix = "job/" if request.param == "prefix" else ""
        yield lambda: dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", server.port, is_master=False))


@pytest.mark.parametrize("size", [2, 5])
def test_every_rank_gets_every_payload(connect: Callable[[], Any], size: int) -> None:
    def rank_main(rank: int) -> list[list[bytes]]:
        rendezvous = StoreRendezvous(connect(), rank, size, "cam")
        return [
            rendezvous.all_gather("first", bytes([rank, 0, 255]), LIMIT_S),
            rendezvous.all_gather("second", b"" if rank else b"only rank 0 speaks", LIMIT_S),
        ]

    expected = [[bytes([rank, 0, 255]) for rank in range(size)], [b"only rank 0 speaks"] + [b""] * (size - 1)]
    assert on_threads(size, rank_main) == [expected] * size


def test_groups_on_one_store_do_not_collide(connect: Callable[[], Any]) -> None:
    """The same name begun again, and another name, each see their own payloads."""

    def rank_main(rank: int) -> list[list[bytes]]:
        store = connect()
        return [
            StoreRendezvous(store, rank, 2, name).all_gather("hello", f"{name}{turn}".encode(), LIMIT_S)
            for turn, name in enumerate(["cam", "cam", "other", "cam"])
        ]

    expected = [[f"{name}{turn}".encode()] * 2 for turn, name in enumerate(["cam", "cam", "other", "cam"])]
    assert on_threads(2, rank_main) == [expected] * 2


def test_late_ranks_are_named(connect: Callable[[], Any]) -> None:
    def rank_main(rank: int) -> list[bytes] | None:
        rendezvous = StoreRendezvous(connect(), rank, 4, "cam")
        return rendezvous.all_gather("hello", b"x", 0.3) if rank in (0, 2) else None

    first, _, third, _ = on_threads(4, rank_main)
    for error in (first, third):
        assert isinstance(error, cam.Timeout)
        assert (error.operation, error.phase, error.ranks) == ("init", "hello", (1, 3))
        assert 0.25 < error.waited_s < 10
        assert "ranks 1, 3 did not arrive" in str(error)


def test_a_store_that_goes_away_is_an_error_at_once() -> None:
    server = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = server[0].port
    client = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2))
    rendezvous = StoreRendezvous(client, 0, 2, "cam")
    server.clear()
    deadline = Deadline(LIMIT_S)
    with pytest.raises(cam.GroupAborted, match="store"):
        rendezvous.all_gather("hello", b"x", LIMIT_S)
    assert not deadline.passed


# --- torchrun's environment ---------------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_variables(**variables: str) -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_variables()
    return set_variables


def test_no_environment_is_no_rendezvous(environment: Callable[..., None]) -> None:
    assert from_environment("cam", 1.0) is None
    environment(MASTER_ADDR="localhost")  # batch systems set it by themselves
    assert from_environment("cam", 1.0) is None


def test_half_an_environment_names_the_missing_half(environment: Callable[..., None]) -> None:
    environment(RANK="1", WORLD_SIZE="2", MASTER_PORT="1")
    with pytest.raises(cam.ConfigError, match="not set: MASTER_ADDR"):
        from_environment("cam", 1.0)
    environment(RANK="0")
    with pytest.raises(cam.ConfigError, match="not set: WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        from_environment("cam", 1.0)


def test_one_rank_needs_no_store(environment: Callable[..., None]) -> None:
    environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="nowhere.invalid", MASTER_PORT="1")
    assert isinstance(from_environment("cam", 1.0), Alone)


def test_the_agents_store_is_used(environment: Callable[..., None]) -> None:
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment(
        RANK="0",  # without the agent, rank 0 would serve a store itself, and the address is taken
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(agent.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    other = dist.TCPStore("127.0.0.1", agent.port, world_size=2, is_master=False, wait_for_workers=False)
    other.add("init/", 1)  # torch's own count of the ranks that connected
    rendezvous = from_environment("cam", LIMIT_S)
    assert isinstance(rendezvous, StoreRendezvous)
    assert rendezvous.all_gather("hello", b"x", LIMIT_S) if rendezvous.size == 1 else True
    assert other.get("cam/cam/begun/0") == b"1"


def test_nobody_at_the_address(environment: Callable[..., None]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(unused.getsockname()[1]))
        with pytest.raises(cam.Timeout, match="found no store"):
            from_environment("cam", 1.0)


# --- segments -----------------------------------------------------------------------------------------------


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


# --- handing over -------------------------------------------------------------------------------------------


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


# --- the decision who shares memory -------------------------------------------------------------------------


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
