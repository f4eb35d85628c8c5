"""Every collective against gloo, on the same inputs: ops x dtypes x shapes x ranks, exact wherever gloo's order of
additions cannot differ, else within the rounding of the sums. Where gloo has no such operation, against plain torch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.core.collectives.groups import all_gather_single, join, ranks_of, reduce_scatter_single
from tests.launcher import RankEnv

WORLDS = (2, 3, 4, 8)
REDUCED = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
FLOATING = REDUCED[:4]
MOVED = (*REDUCED, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)
#: 0-dim, empty, odd, one cache line more than a vector, several pieces of the pipeline.
SHAPES = ((), (0,), (1,), (3, 5), (257,), (1000, 129), (700_001,))
OPS = ("SUM", "PRODUCT", "MIN", "MAX")
BITWISE = ("BAND", "BOR", "BXOR")


def numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype.is_complex:
        return torch.complex(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)).to(dtype)
    whole = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator)
    return whole.to(torch.float32).to(dtype) if dtype.is_floating_point else whole.to(dtype)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not in one run of memory."""
    holder = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    holder[..., 0] = tensor
    return holder[..., 0]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).reshape(-1).view(torch.uint8)


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One after another along dimension 0, for dtypes that torch.cat does not know too."""
    shape = (len(tensors) * tensors[0].shape[0], *tensors[0].shape[1:])
    return torch.cat([raw(each) for each in tensors]).view(tensors[0].dtype).reshape(shape)


def gathered(own: torch.Tensor, gloo: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every rank's tensor, through gloo as plain bytes: what the expectations are computed from."""
    flat = raw(own)
    parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    if flat.numel():
        dist.all_gather(parts, flat, group=gloo)
    return [part.view(own.dtype).reshape(own.shape) for part in parts]


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """What CAM promises: rank order, fp32 for half floats, one rounding."""
    dtype = tensors[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    pair: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "SUM": torch.add,
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    result = tensors[0].to(wide)
    for each in tensors[1:]:
        result = pair[op](result, each.to(wide))
    return result.to(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape, what
    assert torch.equal(raw(found), raw(wanted)), f"{what}: {found} instead of {wanted}"


def close(found: torch.Tensor, wanted: torch.Tensor, scale: torch.Tensor, what: str) -> None:
    """Within one rounding per rank of the largest partial result."""
    if not found.dtype.is_floating_point:
        same(found, wanted, what)
        return
    bound = torch.finfo(found.dtype).eps * dist.get_world_size() * scale.double() + 1e-30
    error = (found.double() - wanted.double()).abs()
    assert bool((error <= bound).all()), f"{what}: off by {float(error.max())}"


def all_reduce_agrees(env: RankEnv, op: str, dtype: torch.dtype) -> None:
    gloo = join(env)
    for shape in SHAPES:
        if op == "PRODUCT" and len(shape) == 1 and shape[0] > 10_000:
            continue
        own = numbers(shape, dtype, env.rank)
        if op == "PRODUCT" and dtype.is_floating_point:
            own = own.clamp(-1, 1) + 2  # gloo rounds each partial product: it must not become denormal
        everyone = gathered(own, gloo)
        found = own.clone()
        dist.all_reduce(found, getattr(dist.ReduceOp, op))
        same(found, reduced(everyone, op), f"{op} {dtype} {shape}")
        scattered = strided(own)
        dist.all_reduce(scattered, getattr(dist.ReduceOp, op))
        same(scattered, found, f"{op} {dtype} {shape}, strided")
        theirs = own.clone()
        if theirs.numel():
            dist.all_reduce(theirs, getattr(dist.ReduceOp, op), group=gloo)
            magnitude = reduced([each.double().abs() for each in everyone], "SUM" if op == "SUM" else "PRODUCT")
            close(found, theirs, magnitude, f"{op} {dtype} {shape} against gloo")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("op", OPS)
def test_all_reduce(world: int, op: str) -> None:
    with ranks_of(world) as ranks:
        for dtype in REDUCED:
            ranks.run(all_reduce_agrees, op, dtype)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("op", BITWISE)
def test_bitwise(world: int, op: str) -> None:
    with ranks_of(world) as ranks:
        for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64):
            ranks.run(all_reduce_agrees, op, dtype)


def other_reductions(env: RankEnv) -> None:
    """What gloo does not have."""
    gloo, world = join(env), env.world_size
    for dtype in FLOATING:
        own = numbers((1000,), dtype, env.rank)
        everyone = gathered(own, gloo)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        total = everyone[0].to(wide)
        for each in everyone[1:]:
            total = total + each.to(wide)
        found = own.clone()
        dist.all_reduce(found, dist.ReduceOp.AVG)
        same(found, (total / world).to(dtype), f"AVG {dtype}")
        found = own.clone()
        dist.all_reduce(found, torch._C._distributed_c10d._make_nccl_premul_sum(0.25))
        scaled = everyone[0].to(wide) * 0.25
        for each in everyone[1:]:
            scaled = scaled + each.to(wide) * 0.25
        same(found, scaled.to(dtype), f"PREMUL_SUM {dtype}")
    own = numbers((1000,), torch.int32, env.rank) - 50
    found = own.clone()
    dist.all_reduce(found, dist.ReduceOp.AVG)
    total = sum(gathered(own, gloo))
    same(found, torch.div(total, world, rounding_mode="trunc").to(torch.int32), "AVG int32")
    flags = numbers((1000,), torch.bool, env.rank)
    everyone = gathered(flags, gloo)
    for op, wanted in (("SUM", torch.stack(everyone).any(0)), ("MIN", torch.stack(everyone).all(0))):
        found = flags.clone()
        dist.all_reduce(found, getattr(dist.ReduceOp, op))
        same(found, wanted, f"{op} bool")
    own = numbers((300,), torch.complex64, env.rank)
    found = own.clone()
    dist.all_reduce(found)
    everyone = gathered(own, gloo)
    total = everyone[0]
    for each in everyone[1:]:
        total = total + each
    same(found, total, "SUM complex64")
    special = torch.tensor([1.0, float("nan"), -0.0]) if env.rank == world - 1 else torch.tensor([2.0, 3.0, 0.0])
    found = special.clone()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert found[0] == 2.0
    assert bool(found[1].isnan()), "MAX hides a NaN"


@pytest.mark.parametrize("world", WORLDS)
def test_average_premultiplied_bool_and_complex(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(other_reductions)


def reduce_agrees(env: RankEnv, dtype: torch.dtype) -> None:
    gloo, world, rank = join(env), env.world_size, env.rank
    for shape in SHAPES:
        own = numbers(shape, dtype, rank)
        everyone = gathered(own, gloo)
        for root in (0, world - 1):
            found = own.clone()
            dist.reduce(found, root)
            same(found, reduced(everyone, "SUM") if rank == root else own, f"reduce {dtype} {shape} to {root}")
        parts = [numbers(shape, dtype, rank, seed=1 + r) for r in range(world)]
        out = torch.empty_like(own)
        dist.reduce_scatter(out, parts)
        wanted = reduced([numbers(shape, dtype, r, seed=1 + rank) for r in range(world)], "SUM")
        same(out, wanted, f"reduce_scatter {dtype} {shape}")
        if shape and shape[0]:
            whole = torch.cat(parts)
            single = strided(out)
            reduce_scatter_single(single, whole)
            same(single, wanted, f"reduce_scatter_single {dtype} {shape}")
            chunk = whole.chunk(world)[rank]
            reduce_scatter_single(chunk, whole)
            same(chunk, wanted, f"reduce_scatter_single {dtype} {shape} in place")


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_and_reduce_scatter(world: int) -> None:
    with ranks_of(world) as ranks:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            ranks.run(reduce_agrees, dtype)


def moves_agree(env: RankEnv, dtype: torch.dtype) -> None:
    join(env)
    world, rank = env.world_size, env.rank
    for shape in SHAPES:
        own = numbers(shape, dtype, rank)
        everyone = [numbers(shape, dtype, r) for r in range(world)]
        what = f"{dtype} {shape}"
        for root in (0, world - 1):
            found = strided(own)
            dist.broadcast(found, root)
            same(found, everyone[root], f"broadcast {what}")
        outs = [torch.empty_like(own) for _ in range(world)]
        outs[0] = strided(torch.empty_like(own))
        dist.all_gather(outs, own)
        for r in range(world):
            same(outs[r], everyone[r], f"all_gather {what}")
        root = world - 1
        outs = [torch.empty_like(own) for _ in range(world)] if rank == root else None
        dist.gather(own, outs, root)
        for r in range(world if outs else 0):
            same(outs[r], everyone[r], f"gather {what}")
        found = torch.empty_like(own)
        dist.scatter(found, [numbers(shape, dtype, r, seed=9) for r in range(world)] if rank == 0 else None, 0)
        same(found, numbers(shape, dtype, rank, seed=9), f"scatter {what}")
        sent = [numbers(shape, dtype, rank, seed=20 + r) for r in range(world)]
        outs = [torch.empty_like(own) for _ in range(world)]
        dist.all_to_all(outs, sent)
        for r in range(world):
            same(outs[r], numbers(shape, dtype, r, seed=20 + rank), f"all_to_all {what}")
        if not shape:
            continue
        single = torch.empty((world * shape[0], *shape[1:]), dtype=dtype)
        all_gather_single(single, own)
        same(single, joined(everyone), what)
        dist.all_to_all_single(single, joined(sent))
        same(single, joined([numbers(shape, dtype, r, seed=20 + rank) for r in range(world)]), f"all_to_all {what}")


@pytest.mark.parametrize("world", WORLDS)
def test_moves(world: int) -> None:
    with ranks_of(world) as ranks:
        for dtype in MOVED:
            ranks.run(moves_agree, dtype)


def uneven(env: RankEnv) -> None:
    gloo, world, rank = join(env), env.world_size, env.rank
    generator = torch.Generator().manual_seed(7)
    for size in (1, 50, 3000):
        counts = torch.randint(0, size + 1, (world, world), generator=generator)  # some are 0
        sent, received = counts[rank].tolist(), counts[:, rank].tolist()
        own = torch.randn(sum(sent), 33, generator=torch.Generator().manual_seed(rank))
        mine, theirs = torch.empty(sum(received), 33), torch.empty(sum(received), 33)
        dist.all_to_all_single(mine, own, received, sent)
        dist.all_to_all_single(theirs, own, received, sent, group=gloo)
        same(mine, theirs, f"all_to_all_single with splits, {size}")
        outs = [torch.empty(n, 33) for n in received]
        dist.all_to_all(outs, list(own.split(sent)))
        same(torch.cat(outs), theirs, f"all_to_all with a list, {size}")
    outs = [torch.empty(100_000 * r + 1) for r in range(world)]
    dist.all_gather(outs, torch.full((100_000 * rank + 1,), float(rank)))
    for r in range(world):
        assert bool((outs[r] == r).all()), "all_gather of different sizes"


@pytest.mark.parametrize("world", WORLDS)
def test_sizes_that_differ_between_ranks(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(uneven)


def variants(env: RankEnv, settings: Any) -> None:
    from cam.collectives.engine import Engine
    from cam.collectives.reductions import reduction

    gloo = join(env)
    engine = Engine(dist.group.WORLD.group, algorithm=settings[0], piece=settings[1])
    for dtype in (torch.float32, torch.bfloat16):
        for elements in (0, 1, 63, 5000, 100_001):
            own = numbers((elements,), dtype, env.rank)
            wanted = reduced(gathered(own, gloo), "SUM")
            found = own.clone()
            engine.all_reduce([found], reduction("sum"))()
            same(found, wanted, f"{settings} {dtype} {elements}")
            split = [part.clone() for part in own.tensor_split(7)]
            engine.all_reduce(split, reduction("sum"))()
            same(torch.cat(split), wanted, f"{settings} {dtype} {elements} in 7 tensors")
            found = own.clone()
            engine.reduce([found], 1, reduction("sum"))()
            same(found, wanted if env.rank == 1 else own, f"{settings} reduce {dtype} {elements}")


@pytest.mark.parametrize("world", [2, 3, 8])
def test_algorithms_and_pieces_give_the_same_bits(world: int) -> None:
    with ranks_of(world) as ranks:
        for settings in (("flat", 0), ("direct", 0), ("flat", 4096), ("direct", 4096), ("auto", 1)):
            ranks.run(variants, settings)
