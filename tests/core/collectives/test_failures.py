"""What goes wrong is told to every rank, with who and what, and soon: deaths, lateness, differing calls, no memory."""

# ruff: noqa: ARG005  (every call takes rank and size, used or not)

import importlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import cam
from tests.core.collectives.groups import all_gather_single, join_cam, leave, ranks_of, reduce_scatter_single
from tests.launcher import RankDied, RankEnv, Ranks


def parts(count: int) -> list[torch.Tensor]:
    return [torch.ones(4) for _ in range(count)]


def only(condition: bool, count: int) -> list[torch.Tensor] | None:
    return parts(count) if condition else None


#: Each collective as rank r of n calls it, with what its error says.
CALLS: dict[str, tuple[Callable[[int, int], object], str]] = {
    "all_reduce": (lambda r, n: dist.all_reduce(torch.ones(4)), "all_reduce"),
    "all_reduce of many pieces": (lambda r, n: dist.all_reduce(torch.ones(3_000_000)), "all_reduce"),
    "all_reduce, asynchronous": (lambda r, n: dist.all_reduce(torch.ones(4), async_op=True).wait(), "all_reduce"),
    "reduce": (lambda r, n: dist.reduce(torch.ones(4), 0), "reduce"),
    "broadcast": (lambda r, n: dist.broadcast(torch.ones(4), n - 1), "broadcast"),
    "all_gather": (lambda r, n: dist.all_gather(parts(n), torch.ones(4)), "all_gather"),
    "all_gather_single": (lambda r, n: all_gather_single(torch.ones(4 * n), torch.ones(4)), "all_gather"),
    "gather": (lambda r, n: dist.gather(torch.ones(4), only(r == 0, n), 0), "gather"),
    "scatter": (lambda r, n: dist.scatter(torch.ones(4), only(r == 0, n), 0), "scatter"),
    "reduce_scatter": (lambda r, n: dist.reduce_scatter(torch.ones(4), parts(n)), "reduce_scatter"),
    "reduce_scatter_single": (
        lambda r, n: reduce_scatter_single(torch.ones(4), torch.ones(4 * n)),
        "reduce_scatter",
    ),
    "all_to_all": (lambda r, n: dist.all_to_all(parts(n), parts(n)), "all_to_all"),
    "all_to_all_single": (lambda r, n: dist.all_to_all_single(torch.ones(4 * n), torch.ones(4 * n)), "all_to_all"),
    "barrier": (lambda r, n: dist.barrier(), "barrier"),
    "all_gather_object": (lambda r, n: dist.all_gather_object([None] * n, "x"), "all_gather"),
    "monitored_barrier": (lambda r, n: dist.group.WORLD.monitored_barrier(timedelta(seconds=20)), "barrier"),
    "recv": (lambda r, n: dist.recv(torch.ones(4), n - 1), "recv"),
    "recv from anybody": (lambda r, n: r == 0 and dist.recv(torch.ones(4)), "recv"),
}


def last_rank_dies(env: RankEnv, name: str) -> float:
    join_cam(env, timedelta(seconds=30))
    last = env.world_size - 1
    dist.barrier()
    if env.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(cam.PeerLost) as caught:
        CALLS[name][0](env.rank, env.world_size)
    assert caught.value.rank == last
    assert CALLS[name][1] in str(caught.value)
    return time.monotonic() - started


@pytest.mark.parametrize("name", [name for name in CALLS if name != "recv from anybody"])
def test_survivors_of_a_death_raise_soon(name: str) -> None:
    with ranks_of(3) as ranks:
        *waited, died = ranks.run(last_rank_dies, name, expect_errors=True)
        assert isinstance(died, RankDied)
        for seconds in waited:
            assert isinstance(seconds, float), seconds
            assert seconds < 5, "the deadline of 30 s was waited for"


def all_others_die(env: RankEnv) -> None:
    join_cam(env)
    dist.barrier()
    if env.rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(cam.PeerLost, match="recv"):
        dist.recv(torch.ones(4))


def test_a_receive_from_anybody_ends_when_nobody_is_left() -> None:
    with ranks_of(3) as ranks:
        survivor, *_ = ranks.run(all_others_die, expect_errors=True)
        assert survivor is None, survivor


def one_is_late(env: RankEnv) -> None:
    leave()
    join_cam(env, timedelta(seconds=1))
    dist.barrier()
    if env.rank == 1:
        time.sleep(2.5)  # the lateness itself is what is tested
        with pytest.raises(cam.GroupAborted, match="gave up on this rank"):
            dist.all_reduce(torch.ones(4))
        leave()
        return
    with pytest.raises(cam.Timeout) as caught:
        dist.all_reduce(torch.ones(4))
    assert caught.value.ranks == (1,)
    assert caught.value.operation == "all_reduce"
    assert 0.5 < caught.value.waited_s < 2.4
    with pytest.raises(cam.GroupAborted, match="rank 1"):
        dist.all_reduce(torch.ones(4))
    leave()


def test_late_ranks_are_named_and_break_the_group() -> None:
    with ranks_of(3) as ranks:
        ranks.run(one_is_late)


def a_message_is_late(env: RankEnv) -> None:
    join_cam(env)
    if env.rank == 0:
        receive = dist.irecv(torch.empty(4), 1, tag=7)
        with pytest.raises(cam.Timeout, match="tag 7") as caught:
            receive.wait(timedelta(seconds=0.3))
        assert caught.value.ranks == (1,)
    dist.barrier()
    if env.rank == 1:
        dist.send(torch.ones(4), 0, tag=7)
    if env.rank == 0:  # what timed out has not taken the message, and the group is whole
        found = torch.empty(4)
        assert dist.recv(found, 1, tag=7) == 1
        assert found.tolist() == [1, 1, 1, 1]


def test_a_late_message_does_not_break_the_group() -> None:
    with ranks_of(2) as ranks:
        ranks.run(a_message_is_late)


def calls_differ(env: RankEnv) -> None:
    join_cam(env)
    n, odd = env.world_size, env.rank == env.world_size - 1
    differing: list[tuple[str, Callable[[], object]]] = [
        ("size", lambda: dist.all_reduce(torch.ones(5 if odd else 4))),
        ("dtype", lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if odd else torch.float32))),
        ("reduction", lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)),
        ("root", lambda: dist.broadcast(torch.ones(4), 1 if odd else 0)),
        ("operation", lambda: dist.barrier() if odd else dist.all_reduce(torch.ones(4))),
        ("size", lambda: dist.all_gather([torch.ones(5 if odd else 4)] * n, torch.ones(5 if odd else 4))),
        ("bytes", lambda: dist.all_to_all_single(torch.ones(2 * n), torch.ones(3 * n if odd else 2 * n))),
        ("bytes", lambda: dist.scatter(torch.ones(5 if odd else 4), parts(n) if env.rank == 0 else None, 0)),
    ]
    for field, call in differing:
        with pytest.raises(cam.Mismatch) as caught:
            call()
        assert field in caught.value.field
        found = torch.full((3,), float(env.rank))
        dist.all_reduce(found)  # all ranks raised in the same round: the group goes on
        assert found[0] == sum(range(n))
    if env.rank == 0:
        dist.send(torch.ones(5), 1)
    elif env.rank == 1:
        with pytest.raises(cam.Mismatch) as caught:
            dist.recv(torch.ones(4), 0)
        assert (caught.value.mine, caught.value.theirs) == ("16", "20")
    dist.barrier()


def test_calls_that_differ_between_ranks() -> None:
    with ranks_of(3) as ranks:
        ranks.run(calls_differ)


def bad_arguments(env: RankEnv) -> None:
    join_cam(env)
    n = env.world_size
    cases: list[tuple[str, Callable[[], object]]] = [
        ("bit_and is not defined for torch.float32", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)),
        ("avg is not defined for torch.bool", lambda: dist.all_reduce(torch.ones(2).bool(), dist.ReduceOp.AVG)),
        ("cannot be reduced", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
        ("dense CPU tensors", lambda: dist.all_reduce(torch.ones(2).to_sparse())),
        ("dense CPU tensors", lambda: dist.all_reduce(torch.ones(2, device="meta"))),
        ("add up to the 4 rows", lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * n, [1] * n)),
        ("cannot share equally", lambda: dist.all_to_all_single(torch.ones(n + 1), torch.ones(n))),
    ]
    for message, call in cases:
        with pytest.raises(cam.InputError, match=message):
            call()
    if env.rank == 0:  # nothing was sent, so one rank alone may be wrong
        with pytest.raises(cam.InputError, match="no pg_options"):
            dist.new_group([0], pg_options=dist.ProcessGroupGloo._Options(), backend="cam")
    dist.barrier()


def test_bad_arguments_are_refused_before_anything_is_sent() -> None:
    with ranks_of(3) as ranks:
        ranks.run(bad_arguments)


def window_too_small(group: cam.Group) -> None:
    from cam.collectives.engine import Engine
    from cam.collectives.reductions import reduction

    engine = Engine(group)
    small = torch.ones(100)
    engine.all_reduce([small], reduction("sum"))()
    assert small[0] == group.size
    with pytest.raises(cam.OutOfWindowMemory, match="CAM_WINDOW_LIMIT") as caught:
        engine.all_reduce([torch.ones(1_000_000)], reduction("sum"))()
    assert caught.value.rank >= 0
    engine.all_reduce([small], reduction("sum"))()
    assert small[0] == group.size**2


def test_lack_of_window_memory_is_agreed_on() -> None:
    with Ranks(2, window_limit=512 * 1024) as ranks:
        ranks.run(window_too_small)


def abort_wakes_everybody(env: RankEnv) -> None:
    join_cam(env)
    dist.barrier()
    if env.rank == 0:
        dist.group.WORLD.abort()
    started = time.monotonic()
    with pytest.raises(cam.GroupAborted, match="rank 0"):
        dist.all_reduce(torch.ones(4))
    assert time.monotonic() - started < 5
    leave()


def test_abort() -> None:
    with ranks_of(3) as ranks:
        ranks.run(abort_wakes_everybody)


def on_another_host(env: RankEnv) -> None:
    leave()
    host = importlib.import_module("cam.host")
    real, host.boot_id = host.boot_id, lambda: "another" if env.rank == 1 else "this"
    try:
        with pytest.raises(cam.NotReachable, match="it runs on another host"):
            dist.init_process_group(
                "cam",
                store=dist.PrefixStore("hosts", env.store),
                rank=env.rank,
                world_size=env.world_size,
                timeout=timedelta(seconds=20),
            )
    finally:
        host.boot_id = real


def test_ranks_of_different_hosts_are_told_so_at_once() -> None:
    with ranks_of(2) as ranks:
        ranks.run(on_another_host)
