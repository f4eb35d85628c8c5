"""What torch.distributed promises beyond the results: asynchronous calls, groups of some ranks, messages, objects."""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import cam
from tests.core.collectives.groups import all_gather_single, join_cam, leave, ranks_of, reduce_scatter_single
from tests.launcher import RankEnv


def asynchronous(env: RankEnv) -> None:
    join_cam(env)
    n, rank = env.world_size, env.rank
    tensors = [torch.full((size,), float(rank + i)) for i, size in enumerate((1, 10, 100_000, 3_000_000, 7))]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    after = torch.full((2,), float(rank))
    dist.all_reduce(after)  # synchronous, after five in flight: the order of calls is kept
    assert all(work.is_completed() for work in works)
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert work.wait(timedelta(seconds=5))
        assert bool((tensor == sum(r + i for r in range(n))).all())
    chained = torch.ones(3)
    future = dist.all_reduce(chained, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    assert future.wait().tolist() == [2.0 * n] * 3
    pieces = [torch.empty(2) for _ in range(n)]
    gather = dist.all_gather(pieces, torch.full((2,), float(rank)), async_op=True)
    assert [float(each[0]) for each in gather.result()] == list(range(n))
    assert gather.is_success()
    assert gather.exception() is None
    # A call of one rank alone: its wait is limited, and it goes on until the others have come.
    if rank == 0:
        waiting = dist.barrier(async_op=True)
        with pytest.raises(cam.Timeout, match="barrier"):
            waiting.wait(timedelta(seconds=0.2))
        assert not waiting.is_completed()
    dist.send(torch.ones(1), 1) if rank == 0 else None
    dist.recv(torch.ones(1), 0) if rank == 1 else None
    if rank == 0:
        for peer in range(2, n):
            dist.send(torch.ones(1), peer)
        dist.barrier()
        assert waiting.wait()
    else:
        if rank > 1:
            dist.recv(torch.ones(1), 0)
        dist.barrier()
        dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_asynchronous_calls_keep_their_order(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(asynchronous)


def failed_work(env: RankEnv) -> None:
    join_cam(env)
    work = dist.all_reduce(torch.ones(4 + env.rank), async_op=True)
    with pytest.raises(cam.Mismatch):
        work.wait()
    assert not work.is_success()
    assert isinstance(work.exception(), cam.Mismatch)
    with pytest.raises(RuntimeError, match="size"):
        dist.all_reduce(torch.ones(4 + env.rank), async_op=True).get_future().wait()


def test_errors_reach_work_and_future() -> None:
    with ranks_of(2) as ranks:
        ranks.run(failed_work)


def coalesced(env: RankEnv) -> None:
    join_cam(env)
    n, rank = env.world_size, env.rank
    tensors = [torch.full((i + 1,), float(rank)) for i in range(5)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    total = float(sum(range(n)))
    assert all(bool((tensor == total).all()) for tensor in tensors)
    outs = [torch.empty(n * (i + 1)) for i in range(3)]
    with c10d._coalescing_manager():
        for i, out in enumerate(outs):
            all_gather_single(out, torch.full((i + 1,), float(rank)))
    for i, out in enumerate(outs):
        assert out.tolist() == [float(r) for r in range(n) for _ in range(i + 1)]
    outs = [torch.empty(i + 1) for i in range(3)]
    with c10d._coalescing_manager():
        for i, out in enumerate(outs):
            reduce_scatter_single(out, torch.ones(n * (i + 1)))
    assert all(bool((out == n).all()) for out in outs)
    mixed = [torch.ones(3), torch.ones(2, dtype=torch.int64)]
    dist.all_reduce_coalesced([mixed[0]])
    assert mixed[0].tolist() == [n] * 3
    lists = [[torch.empty(2), torch.empty(3)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), float(rank))])
    assert all(bool((each == r).all()) for r in range(n) for each in lists[r])
    group = dist.group.WORLD
    old = torch.empty(2 * n)
    group._allgather_base(old, torch.full((2,), float(rank)), c10d.AllgatherOptions()).wait()
    assert old.tolist() == [float(r) for r in range(n) for _ in range(2)]
    single = torch.empty(2)
    group._reduce_scatter_base(single, torch.ones(2 * n), c10d.ReduceScatterOptions()).wait()
    assert single.tolist() == [n, n]
    group.alltoall_base(old, torch.full((2 * n,), float(rank)), [], [], c10d.AllToAllOptions()).wait()
    assert old.tolist() == [float(r) for r in range(n) for _ in range(2)]
    group.allreduce(single).wait()  # the short forms
    group.broadcast(single, 0).wait()
    group.barrier().wait()
    assert single.tolist() == [n * n] * 2


def test_coalescing_and_older_names() -> None:
    with ranks_of(3) as ranks:
        ranks.run(coalesced)


def groups_of_some(env: RankEnv) -> None:
    join_cam(env)
    n, rank = env.world_size, env.rank
    even, odd = dist.new_group(range(0, n, 2)), dist.new_group(range(1, n, 2))
    mine = odd if rank % 2 else even
    members = dist.get_process_group_ranks(mine)
    found = torch.tensor(float(rank))
    dist.all_reduce(found, group=mine)
    assert float(found) == sum(members)
    dist.broadcast(found.fill_(rank), members[-1], group=mine)
    assert float(found) == members[-1]
    # Two groups at once, in different orders on different ranks: they do not wait for each other.
    whole, part = torch.ones(1000), torch.ones(1000)
    first, second = (mine, None) if rank < 2 else (None, mine)
    works = [dist.all_reduce(part if g is mine else whole, group=g, async_op=True) for g in (first, second)]
    for work in works:
        work.wait()
    assert float(whole[0]) == n
    assert float(part[0]) == len(members)
    dist.destroy_process_group(mine)
    alone, *_ = dist.new_subgroups(1)
    found = torch.ones(3)
    dist.all_reduce(found, group=alone)
    assert found.tolist() == [1, 1, 1]
    assert dist.get_backend() == "cam"


def test_groups_of_some_ranks() -> None:
    with ranks_of(4) as ranks:
        ranks.run(groups_of_some)


def messages(env: RankEnv) -> None:
    join_cam(env)
    n, rank = env.world_size, env.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    # Everybody sends first, much more than any buffer between the ranks.
    big = torch.full((4_000_000,), float(rank))
    dist.send(big, right)
    found = torch.empty_like(big)
    assert dist.recv(found, left) == left
    assert bool((found == left).all())
    # Tags out of order, and order within a tag.
    for value, tag in ((1, 5), (2, 6), (3, 5)):
        dist.send(torch.tensor([float(value)]), right, tag=tag)
    seen = []
    for tag in (6, 5, 5):
        dist.recv(one := torch.empty(1), left, tag=tag)
        seen.append(float(one))
    assert seen == [2, 1, 3]
    # Several receives posted at once are served in the order of posting, whichever is waited for first.
    receives = [(torch.empty(1), i) for i in range(3)]
    works = [dist.irecv(tensor, left, tag=9) for tensor, _ in receives]
    for i in range(3):
        dist.isend(torch.tensor([float(i)]), right, tag=9).wait()
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
    assert [float(tensor) for tensor, _ in receives] == [0, 1, 2]
    # From anybody, strided, empty, 0-dim.
    if rank == 0:
        sources = {dist.recv(torch.empty(3, 2).t(), tag=3) for _ in range(n - 1)}
        assert sources == set(range(1, n))
    else:
        dist.send(torch.ones(2, 3), 0, tag=3)
    operations = [
        dist.P2POp(dist.isend, torch.tensor(float(rank)), right),
        dist.P2POp(dist.irecv, scalar := torch.tensor(-1.0), left),
        dist.P2POp(dist.isend, torch.empty(0), right, tag=1),
        dist.P2POp(dist.irecv, torch.empty(0), left, tag=1),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert float(scalar) == left
    future = dist.irecv(scalar, left, tag=11).get_future()
    dist.send(torch.tensor(5.0), right, tag=11)
    future.wait()
    assert float(scalar) == 5
    # Messages and collectives do not disturb each other.
    dist.isend(torch.ones(4), right, tag=20)
    dist.all_reduce(total := torch.ones(4))
    dist.recv(found4 := torch.zeros(4), left, tag=20)
    assert total.tolist() == [n] * 4
    assert found4.tolist() == [1] * 4
    before = dist.group.WORLD.group.memory()["allocated"]
    for _ in range(20):
        dist.send(big, right)
        dist.recv(found, left)
    dist.barrier()
    dist.send(torch.ones(1), right)  # what was received is freed with the next send
    dist.recv(torch.empty(1), left)
    assert dist.group.WORLD.group.memory()["allocated"] <= before + big.nbytes // 2


@pytest.mark.parametrize("world", [2, 4])
def test_messages_between_two_ranks(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(messages)


def objects(env: RankEnv) -> None:
    join_cam(env)
    n, rank = env.world_size, env.rank
    everyone: list[object] = [None] * n
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    assert [each["rank"] for each in everyone] == list(range(n))  # type: ignore[index]
    told: list[object] = [{"a": 1}, "b"] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    assert told == [{"a": 1}, "b"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(n)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    collected: list[object] | None = [None] * n if rank == 0 else None
    dist.gather_object(rank, collected, dst=0)
    assert collected is None or collected == list(range(n))
    if rank == 0:
        dist.send_object_list(["hello", 3], dst=1)
    elif rank == 1:
        received: list[object] = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == ["hello", 3]
    dist.group.WORLD.monitored_barrier(timedelta(seconds=5))


def test_objects() -> None:
    with ranks_of(3) as ranks:
        ranks.run(objects)


def beside_another(env: RankEnv) -> None:
    """As "cpu:cam,npu:hccl"; meta and torch's fake backend stand for the other device."""
    from torch.testing._internal.distributed.fake_pg import FakeProcessGroup

    made: list[object] = []

    def other(store: object, rank: int, size: int, timeout: timedelta) -> object:
        made.append((rank, size))
        return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())

    dist.Backend.register_backend("elsewhere", other, devices=["meta"])
    leave()
    store = dist.PrefixStore("beside", env.store)
    names = "cpu:cam,meta:elsewhere"
    dist.init_process_group(names, store=store, rank=env.rank, world_size=env.world_size)
    dist.all_reduce(found := torch.ones(3))
    assert found.tolist() == [env.world_size] * 3
    assert not made
    away = torch.ones(4, device="meta")
    dist.all_reduce(away)
    all_gather_single(torch.ones(4 * env.world_size, device="meta"), away)
    dist.broadcast(away, 0)
    assert made == [(env.rank, env.world_size)]
    with pytest.raises(cam.InputError, match="cpu:cam,meta:elsewhere"):
        dist.group.WORLD._get_backend(torch.device("xpu"))
    dist.destroy_process_group()


def test_a_backend_for_another_device_beside_cam() -> None:
    with ranks_of(2) as ranks:
        ranks.run(beside_another)


def again(env: RankEnv) -> None:
    """Groups are made and destroyed, over one store; nothing of them stays."""
    leave()
    store = dist.PrefixStore("again", env.store)
    for _ in range(3):
        dist.init_process_group("cpu:cam", store=store, rank=env.rank, world_size=env.world_size)
        dist.all_reduce(found := torch.ones(3))
        assert found.tolist() == [env.world_size] * 3
        dist.destroy_process_group()
        with pytest.raises(cam.InputError):
            cam.group("torch")
    assert not [name for name in os.listdir("/dev/shm") if "cam" in name]


def test_groups_come_and_go() -> None:
    with ranks_of(2) as ranks:
        ranks.run(again)


def test_import_torch_neither_fails_nor_loads_cam() -> None:
    program = (
        "import sys, torch, torch.distributed as d\n"
        "assert 'cam' in d.Backend.backend_list and not [m for m in sys.modules if m.split('.')[0] == 'cam']\n"
        "defaults = d.Backend.default_device_backend_map\n"
        "assert defaults['cpu'] == 'gloo' and 'npu' not in defaults\n"
        "import cam_autoload; cam_autoload.register(); cam_autoload.register()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    off = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = "import torch, torch.distributed as d; assert 'cam' not in d.Backend.backend_list"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=off)


def test_a_program_that_ends_without_waiting_does_not_hang() -> None:
    program = (
        "import torch, torch.distributed as d, sys\n"
        "d.init_process_group('cam', init_method=f'file://{sys.argv[2]}', rank=int(sys.argv[1]), world_size=2)\n"
        "d.barrier()\n"
        "if sys.argv[1] == '0': d.all_reduce(torch.ones(3), async_op=True)\n"
        "else: d.recv(torch.ones(3), 0)\n"
    )
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-c", program]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{directory}/store"], stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        errors = [rank.communicate(timeout=40)[1] for rank in ranks]
    assert ranks[1].returncode != 0
    assert "PeerLost" in errors[1] or "GroupAborted" in errors[1], errors[1]
