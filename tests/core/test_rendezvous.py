"""How ranks exchange their first messages: over any torch Store, and by torchrun's environment."""

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import cam
from cam.deadline import Deadline
from cam.rendezvous import Alone, StoreRendezvous, from_environment
from tests.core.threads_as_ranks import LIMIT_S, on_threads


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
