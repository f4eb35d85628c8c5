"""A group of real processes: joining, small operations, window memory, failures that are bounded and
named."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cam
from tests.launcher import PerRank, RankDied, RankEnv, Ranks, reached

#: A death has to be noticed within this time (issue 2, section 2).
NOTICED_WITHIN_S = 2.0

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


# --- joining ------------------------------------------------------------------------------------------------


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


# --- operations ---------------------------------------------------------------------------------------------


def exchange_rounds(group: cam.Group, rounds: int) -> None:
    for turn in range(rounds):
        sent = [b"%d>%d@%d" % (group.rank, peer, turn) * (turn % 3) for peer in range(group.size)]
        received = group.exchange(sent, operation="rounds")
        expected = [b"%d>%d@%d" % (peer, group.rank, turn) * (turn % 3) for peer in range(group.size)]
        assert received == expected
        group.barrier()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_exchange_delivers_to_each_its_own(size: int) -> None:
    """8 ranks outnumber the cores of the machines that this runs on."""
    with Ranks(size) as ranks:
        ranks.run(exchange_rounds, 100)


def exchange_large(group: cam.Group) -> bool:
    sent = [bytes([group.rank, peer]) * (100_000 * peer) for peer in range(group.size)]
    received = group.exchange(sent, operation="large")
    return received == [bytes([peer, group.rank]) * (100_000 * group.rank) for peer in range(group.size)]


def test_exchange_of_more_than_a_mailbox() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(exchange_large) == [True] * 3


def wrong_number_of_payloads(group: cam.Group) -> None:
    with pytest.raises(cam.InputError, match=r"one payload per rank \(2\), got 3"):
        group.exchange([b""] * 3, operation="wrong")
    group.barrier()  # nothing was sent: the group is as good as before


def test_a_bad_argument_is_raised_before_anything_is_sent() -> None:
    with Ranks(2) as ranks:
        ranks.run(wrong_number_of_payloads)


def different_operations(group: cam.Group) -> str:
    with pytest.raises(cam.Mismatch) as caught:
        group.exchange([b""] * group.size, operation="left" if group.rank == 0 else "right")
    error = caught.value
    group.barrier()
    return f"{error.field} {error.mine} {error.rank} {error.theirs}"


def test_ranks_in_different_operations_learn_of_it_and_go_on() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(different_operations) == ["operation left 1 right", "operation right 0 left"]


def ordered_submissions(group: cam.Group) -> list[int]:
    """Submitted work and direct calls pair up across ranks in program order, without any waiting in
    between."""
    log: list[int] = []

    def work(number: int) -> int:
        group.barrier()
        (first, *_) = group.exchange([b"%d" % number] * group.size, operation=f"work {number}")
        log.append(int(first))
        return number

    futures = []
    for number in range(0, 30, 3):
        futures += [group.submit(lambda n=number: work(n)), group.submit(lambda n=number + 1: work(n))]
        work(number + 2)
    assert [future.result() for future in futures] == [n for n in range(30) if n % 3 != 2]
    return log


def test_submitted_work_runs_in_program_order() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(ordered_submissions) == [list(range(30))] * 3


def failing_submission(group: cam.Group) -> None:
    def fail() -> None:
        raise ValueError("mine")

    future = group.submit(fail)
    group.barrier()
    with pytest.raises(ValueError, match="mine"):
        future.result()


def test_an_error_in_submitted_work_belongs_to_its_future() -> None:
    with Ranks(2) as ranks:
        ranks.run(failing_submission)


def close_from_inside(group: cam.Group) -> None:
    """The last thing that submitted work does is to leave; the caller finds the group closed."""

    def work() -> None:
        group.barrier()
        group.close()

    group.submit(work).result()
    with pytest.raises(cam.GroupAborted, match="has closed"):
        group.barrier()


def test_submitted_work_may_close_the_group() -> None:
    with Ranks(2) as ranks:
        ranks.kill(0, signal.SIGCONT)  # harmless; keeps the closed group from being used again
        ranks.run(close_from_inside)


def threads_in_turn(group: cam.Group, threads: int, rounds: int) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(rounds):
                with group.turn:  # two calls that belong together
                    group.exchange([b"x"] * group.size, operation="pair")
                    group.barrier()
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert errors == []


def test_threads_take_turns() -> None:
    """All threads do the same, so any order of turns pairs up; unserialised, pairs would come apart."""
    with Ranks(2) as ranks:
        ranks.run(threads_in_turn, 4, 50)


# --- window memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_window_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    with cam.init(name="dtypes") as group:
        tensor = group.empty((3, 5, 7), dtype)
        assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (3, 5, 7), True)
        tensor.view(torch.uint8).fill_(1)
        assert group.arena.offset_of(tensor.data_ptr(), tensor.nbytes) > 0
        for shape in ((0,), (0, 7), (7, 0), ()):
            assert group.empty(shape, dtype).shape == shape


def test_a_dtype_of_no_native_size_is_refused() -> None:
    with cam.init(name="wide") as group, pytest.raises(cam.InputError, match="complex128"):
        group.empty((1,), torch.complex128)


def test_memory_lives_as_long_as_its_last_view() -> None:
    with cam.init(name="views", window_limit="64MiB") as group:
        tensor = group.empty((1 << 20,), torch.float32)
        assert group.memory()["allocated"] >= 4 << 20
        view = tensor[100:200].view(10, 10).t()
        view.fill_(3)
        del tensor
        gc.collect()
        assert group.memory()["blocks"] == 1
        others = [group.empty((1 << 18,), torch.float32).fill_(i) for i in range(20)]
        assert view.eq(3).all()
        del view, others
        gc.collect()
        assert (group.memory()["allocated"], group.memory()["blocks"]) == (0, 0)
        group.trim()
        assert group.memory()["resident"] == 0


def test_freed_memory_beyond_what_is_retained_goes_back() -> None:
    with cam.init(name="retain", window_limit="64MiB", window_retain="4MiB") as group:
        tensor = group.empty((32 << 20,), torch.uint8).fill_(1)
        assert group.memory()["resident"] >= 32 << 20
        del tensor
        gc.collect()
        assert group.memory()["resident"] <= 5 << 20


def test_a_full_window_names_actual_limit_and_knob() -> None:
    with cam.init(name="full", window_limit="8MiB") as group:
        kept = group.empty((5 << 20,), torch.uint8)
        with pytest.raises(cam.OutOfWindowMemory, match="window_limit") as caught:
            group.empty((4 << 20,), torch.uint8)
        error = caught.value
        assert (error.rank, error.requested, error.limit) == (0, 4 << 20, 8 << 20)
        assert error.allocated >= 5 << 20
        assert isinstance(error, MemoryError)
        del kept
        gc.collect()
        group.empty((4 << 20,), torch.uint8)


def test_tensors_outlive_their_group() -> None:
    group = cam.init(name="outlived", window_limit="8MiB")
    tensor = group.empty((1 << 20,), torch.uint8).fill_(7)
    group.close()
    del group
    gc.collect()
    assert tensor.eq(7).all()
    tensor.fill_(8)


def test_a_closed_group_says_so() -> None:
    group = cam.init(name="closed")
    group.close()
    group.close()
    for use in (
        group.barrier,
        group.memory,
        group.trim,
        lambda: group.empty((1,), torch.int8),
        lambda: group.submit(int),
        lambda: group.endpoint,
    ):
        with pytest.raises(cam.GroupAborted, match="has closed the group"):
            use()


# --- failures -----------------------------------------------------------------------------------------------


def barrier_until_it_fails(group: cam.Group, late: int) -> BaseException:
    reached("working")
    try:
        while True:
            group.barrier(timeout=30 if group.rank == late else timedelta(seconds=0.5))
    except cam.CamError as error:
        reached("failed")
        return error


@pytest.mark.parametrize("size", [2, 4])
def test_a_late_rank_is_named_and_learns_of_it(size: int) -> None:
    late = size - 1
    punctual = range(size - 1)
    with Ranks(size) as ranks:
        run = ranks.start(barrier_until_it_fails, late)
        run.wait_reached(late, "working")
        ranks.kill(late, signal.SIGSTOP)
        for rank in punctual:
            run.wait_reached(rank, "failed")
        ranks.kill(late, signal.SIGCONT)
        errors = run.join()
    for rank in punctual:
        assert isinstance(errors[rank], cam.Timeout)
        assert (errors[rank].operation, errors[rank].phase, errors[rank].ranks) == ("barrier", "arrival", (late,))
        assert 0.4 < errors[rank].waited_s < 2
    assert isinstance(errors[late], cam.GroupAborted)
    assert "gave up on this rank" in str(errors[late])


def work_until_it_fails(group: cam.Group, use: str) -> tuple[BaseException, float]:
    """Returns the error and when it came. CLOCK_MONOTONIC is the host's: the test compares it with its
    own."""
    reached("working")
    try:
        while True:
            if use == "barrier":
                group.barrier()
            else:
                group.exchange([b"x" * 1000] * group.size, operation="chatter")
    except cam.CamError as error:
        return error, time.monotonic()


@pytest.mark.parametrize("use", ["barrier", "exchange"])
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 0), (4, 3)])
def test_a_killed_rank_is_noticed_by_all_within_two_seconds(use: str, size: int, victim: int) -> None:
    with Ranks(size) as ranks:
        run = ranks.start(work_until_it_fails, use)
        for rank in range(size):
            run.wait_reached(rank, "working")
        killed = time.monotonic()
        ranks.kill(victim)
        errors = run.join(expect_errors=True)
    assert isinstance(errors[victim], RankDied)
    operation = "barrier" if use == "barrier" else "exchange"
    for rank, result in enumerate(errors):
        if rank == victim:
            continue
        error, when = result
        assert isinstance(error, cam.PeerLost), error
        assert (error.rank, error.operation) == (victim, operation)
        assert error.phase
        assert when - killed < NOTICED_WITHIN_S


def one_leaves(group: cam.Group, leaver: int) -> str:
    if group.rank == leaver:
        group.close()
        return "left"
    with pytest.raises(cam.PeerLost) as caught:
        group.barrier(timeout=20)
    with pytest.raises(cam.GroupAborted, match=f"rank {leaver}"):
        group.barrier()
    return f"{caught.value.rank} {caught.value.operation}"


def test_a_rank_that_leaves_is_lost_and_the_group_stays_broken() -> None:
    with Ranks(3) as ranks:
        ranks.kill(1, signal.SIGCONT)  # harmless; keeps the broken group from being used again
        assert ranks.run(one_leaves, 1) == ["1 barrier", "left", "1 barrier"]


def interrupted(group: cam.Group) -> str:
    if group.rank == 1:
        return "never came"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        group.barrier(timeout=30)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return "not interrupted"


def test_ctrl_c_ends_a_wait() -> None:
    with Ranks(2) as ranks:
        ranks.kill(1, signal.SIGCONT)
        assert ranks.run(interrupted) == ["interrupted", "never came"]


def rounds_at_different_speed(group: cam.Group, delays_us: float) -> int:
    for turn in range(200):
        if turn % 10 == group.rank:
            time.sleep(delays_us / 1e6)
        group.barrier()
    return group.rank


def test_more_ranks_than_cores_keep_going() -> None:
    with Ranks(8) as ranks:
        assert ranks.run(rounds_at_different_speed, PerRank([100.0 * r for r in range(8)])) == list(range(8))
