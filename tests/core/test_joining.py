"""cam.init: every way to join a group, and how joining fails."""

import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cam
from tests.launcher import RankEnv, Ranks


def who(group: cam.Group) -> tuple[int, int, str, list[tuple[int, int, bool, str]]]:
    return (
        group.rank,
        group.size,
        group.name,
        [(p.rank, p.pid, p.shares_memory, p.reason) for p in group.peers],
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_know_each_other(size: int) -> None:
    with Ranks(size) as ranks:
        pids = ranks.pids
        expected = [(rank, pids[rank], True, "") for rank in range(size)]
        assert ranks.run(who) == [(rank, size, "cam", expected) for rank in range(size)]


def automatic(group: cam.Group) -> cam.Config:
    return group.config


def test_automatic_settings_are_decided_and_shown() -> None:
    with Ranks(2) as ranks:
        config = ranks.run(automatic)[0]
    assert config.window_limit is not None
    assert config.window_limit > 1 << 20
    assert config.spin_us in (2, 50)
    assert config.threads is not None
    assert config.threads >= 1


def test_one_rank_needs_no_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with cam.init(timeout_s=5, name="alone") as group:
        assert (group.rank, group.size) == (0, 1)
        group.barrier()
        assert group.exchange([b"to myself"], operation="note") == [b"to myself"]
        assert cam.group("alone") is group
        assert group.config.timeout_s == 5


def test_names_are_unique_while_open() -> None:
    with cam.init(name="a") as first:
        with pytest.raises(cam.InputError, match="'a' is open"):
            cam.init(name="a")
        with cam.init(name="b"), pytest.raises(cam.InputError, match=r"no group 'c' is open.*: a, b"):
            cam.group("c")
        with pytest.raises(cam.InputError, match="'b'"):
            cam.group("b")
        assert cam.group("a") is first
    with cam.init(name="a"):
        pass


def test_a_failed_start_frees_the_name() -> None:
    store = dist.HashStore()
    with pytest.raises(cam.Timeout) as caught:
        cam.init(store=store, rank=0, world_size=2, timeout=0.2, name="late")
    assert caught.value.ranks == (1,)
    with cam.init(name="late"):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 0},
        {"world_size": 2},
        {"store": dist.HashStore(), "rank": 0},
        {"store": dist.HashStore(), "rank": 2, "world_size": 2},
        {"store": dist.HashStore(), "rank": -1, "world_size": 2},
        {"timeout": 0},
    ],
)
def test_arguments_of_init_are_checked_locally(arguments: dict[str, Any]) -> None:
    with pytest.raises(cam.InputError):
        cam.init(**arguments)


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(cam.ConfigError, match="'timeout_s'"):
        cam.init(timeouts=3)


def test_configuration_by_file_by_object_and_by_field(tmp_path: Path) -> None:
    path = tmp_path / "cam.yaml"
    path.write_text("name: from file\nwindow_limit: 8MiB\ntimeout_s: 7\n")
    with cam.init(config=path, timeout_s=8) as group:
        assert cam.group("from file") is group
        assert (group.config.timeout_s, group.memory()["limit"]) == (8, 8 << 20)
    with cam.init(config=cam.Config(window_limit="4MiB", threads=1), name="from object") as group:
        assert (group.name, group.config.threads, group.memory()["limit"]) == ("from object", 1, 4 << 20)


def join_again(env: RankEnv, rounds: int) -> list[int]:
    """Groups of one name one after another, two names at the same time, and a late rank 0."""
    sizes = []
    for _ in range(rounds):
        with (
            cam.init(store=env.store, rank=env.rank, world_size=env.world_size) as first,
            cam.init(store=env.store, rank=env.rank, world_size=env.world_size, name="second") as second,
        ):
            second.barrier()
            first.barrier()
            sizes.append(first.size + second.size)
    return sizes


def test_groups_on_one_store_one_after_another() -> None:
    with Ranks(3, group=False) as ranks:
        assert ranks.run(join_again, 10) == [[6] * 10] * 3


def start_gloo(env: RankEnv, name: str) -> None:
    # Ranks outlive a test, and torch would find the addresses of the process group before.
    store = dist.PrefixStore(name, env.store)
    dist.init_process_group("gloo", store=store, rank=env.rank, world_size=env.world_size)


def join_process_group(env: RankEnv) -> tuple[list[int], int | None]:
    start_gloo(env, "whole and part")
    try:
        with cam.init(dist.group.WORLD) as group:
            everybody = [int(x) for x in group.exchange([b"%d" % env.rank] * group.size, operation="rank")]
        odd = dist.new_group([1, 2])
        inside = None
        if env.rank in (1, 2):
            with cam.init(odd, name="odd") as group:
                group.barrier()
                inside = group.rank
        else:
            with pytest.raises(cam.InputError, match="not a member"):
                cam.init(odd, name="odd")
        dist.barrier()
        return everybody, inside
    finally:
        dist.destroy_process_group()


def test_an_existing_process_group_and_a_part_of_it() -> None:
    with Ranks(3, group=False) as ranks:
        assert ranks.run(join_process_group) == [([0, 1, 2], inside) for inside in (None, 0, 1)]


def join_alone(env: RankEnv) -> None:
    """Only rank 0 joins; the others wait until it has given up."""
    start_gloo(env, "alone")
    if env.rank == 0:
        try:
            cam.init(dist.group.WORLD, timeout=1.0)
        finally:
            env.store.set("rank 0 gave up", "")
    env.store.wait(["rank 0 gave up"], timedelta(seconds=30))


def test_late_ranks_of_a_process_group_are_named() -> None:
    with Ranks(3, group=False) as ranks:
        first, *_ = ranks.run(join_alone, expect_errors=True)
    assert isinstance(first, cam.Timeout)
    assert (first.operation, first.phase, first.ranks) == ("init", "hello", (1, 2))


def join_by_environment(env: RankEnv) -> tuple[int, int, int]:
    """Without torchrun's agent: rank 0 serves the store. The port was free a moment ago."""
    if env.rank == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env.store.set("port", str(probe.getsockname()[1]))
    os.environ |= {
        "RANK": str(env.rank),
        "WORLD_SIZE": str(env.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": env.store.get("port").decode(),
    }
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        with cam.init() as first:
            first.barrier()
        with cam.init(name="second") as second:
            dist.init_process_group("gloo")  # torch's own group on the same address
            dist.destroy_process_group()
            return first.rank, first.size, second.rank
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


def test_environment_without_torchrun() -> None:
    with Ranks(2, group=False) as ranks:
        assert ranks.run(join_by_environment) == [(0, 2, 0), (1, 2, 1)]


def test_torchrun() -> None:
    program = "import cam\nwith cam.init() as g: g.barrier(); print(f'<{g.rank} of {g.size}>')\n"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    # Port 0: torchrun's rendezvous lets the kernel choose.
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--no-python", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("<.*?>", done.stdout)) == ["<0 of 2>", "<1 of 2>"]


def join_with_a_broken_rank(env: RankEnv) -> str:
    limit = "1KiB" if env.rank == 1 else "64MiB"  # less than a window can be
    try:
        cam.init(store=env.store, rank=env.rank, world_size=env.world_size, window_limit=limit)
    except cam.CamError as error:
        return f"{type(error).__name__}: {error}"
    return "joined"


def test_one_ranks_failure_to_start_is_everybodys_with_its_cause() -> None:
    with Ranks(3, group=False) as ranks:
        first, second, third = ranks.run(join_with_a_broken_rank)
    assert second.startswith("InputError")
    assert "window_limit" in second
    for text in (first, third):
        assert text.startswith("GroupAborted")
        assert "rank 1 failed" in text
        assert "window_limit" in text


def join_across_hosts(env: RankEnv) -> list[Any]:
    real, cam.host.boot_id = cam.host.boot_id, lambda: "another" if env.rank == 2 else "this"
    try:
        with cam.init(store=env.store, rank=env.rank, world_size=env.world_size) as group:
            with pytest.raises(cam.NotReachable) as caught:
                group.barrier()
            tensor = group.empty((4,), torch.float32)  # the own window is there all the same
            return [str(caught.value), [p.shares_memory for p in group.peers], tensor.numel()]
    finally:
        cam.host.boot_id = real


def test_ranks_that_share_no_memory_are_refused_by_name() -> None:
    with Ranks(3, group=False) as ranks:
        results = ranks.run(join_across_hosts)
    assert len({text for text, _, _ in results}) == 1
    assert "rank 0 cannot share memory with rank 2: it runs on another host" in results[0][0]
    assert [sees for _, sees, _ in results] == [[True, True, False], [True, True, False], [False, False, True]]
