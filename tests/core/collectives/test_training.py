"""Training through torch's own wrappers, with cam and with gloo: the losses are equal, bit for bit at two ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.core.collectives.groups import join, ranks_of
from tests.launcher import RankEnv


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(16, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 1))


def train(net: nn.Module, rank: int, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 6, 16, generator=generator)
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def data_parallel(env: RankEnv) -> None:
    gloo = join(env)
    losses = [
        train(DistributedDataParallel(model(), process_group=group, bucket_cap_mb=0.01), env.rank)
        for group in (dist.group.WORLD, gloo)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0 if env.world_size == 2 else 1e-4)
    assert losses[0][0] != losses[0][-1]
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    for group in (dist.group.WORLD, gloo):
        net = DistributedDataParallel(model(), process_group=group)
        net.register_comm_hook(group, fp16_compress_hook)
        losses.append(train(net, env.rank))
    assert losses[2] == pytest.approx(losses[3], rel=0 if env.world_size == 2 else 1e-2)


@pytest.mark.parametrize("world", [2, 3])
def test_ddp(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(data_parallel)


def sharded(env: RankEnv) -> None:
    gloo = join(env)
    losses = []
    for group in (dist.group.WORLD, gloo):
        mesh = DeviceMesh.from_group(group, "cpu")
        net = model()
        for layer in net[1].layers:
            fully_shard(layer, mesh=mesh)
        losses.append(train(fully_shard(net, mesh=mesh), env.rank))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][-1]


def test_fsdp2() -> None:
    with ranks_of(2) as ranks:
        ranks.run(sharded)


def meshes(env: RankEnv) -> None:
    join(env)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert dist.get_backend(mesh.get_group("tp")) == "cam"
    torch.manual_seed(0)
    whole = torch.randn(8, 12)
    split = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    assert torch.equal(split.full_tensor(), whole)
    assert torch.equal(split.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), whole)
    product = split @ distribute_tensor(whole.t().contiguous(), mesh, [Replicate(), Shard(0)])
    assert isinstance(product, DTensor)
    assert torch.allclose(product.full_tensor(), whole @ whole.t(), atol=1e-5)


def test_device_mesh_and_dtensor() -> None:
    with ranks_of(4) as ranks:
        ranks.run(meshes)


def functional(env: RankEnv) -> None:
    import torch.distributed._functional_collectives as fn

    join(env)
    n, rank = env.world_size, env.rank
    group = dist.group.WORLD
    own = torch.full((4,), float(rank), requires_grad=False)
    assert (fn.all_reduce(own, "sum", group) + 0).tolist() == [sum(range(n))] * 4
    assert (fn.all_reduce(own, "avg", group) + 0).tolist() == [sum(range(n)) / n] * 4
    gathered = fn.all_gather_tensor(own, 0, group)
    assert (gathered + 0).tolist() == [float(r) for r in range(n) for _ in range(4)]
    assert (fn.reduce_scatter_tensor(gathered, "sum", 0, group) + 0).tolist() == [rank * n] * 4
    assert (fn.broadcast(own, 1, group) + 0).tolist() == [1] * 4
    sent = torch.arange(float(n)) + 10 * rank
    assert (fn.all_to_all_single(sent, None, None, group) + 0).tolist() == [10.0 * r + rank for r in range(n)]


def test_functional_collectives() -> None:
    with ranks_of(2) as ranks:
        ranks.run(functional)
