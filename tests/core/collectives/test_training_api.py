"""cam.all_reduce and its relatives, and the worked example: its losses are those of torch's DDP."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import cam
from tests.core.collectives.groups import join, ranks_of
from tests.launcher import RankEnv, Ranks

EXAMPLE = Path(__file__).parents[3] / "core" / "examples" / "data_parallel.py"


class OnlyDlpack:
    """An array of a home-grown framework."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def reduces(group: cam.Group) -> None:
    n, rank = group.size, group.rank
    name, total = group.name, float(sum(range(n)))
    tensor = torch.full((5,), float(rank))
    assert cam.all_reduce(tensor, group=group) is tensor
    assert tensor.tolist() == [total] * 5
    mixed = {
        "fp32": torch.full((3,), float(rank)),
        "bf16": torch.full((2, 2), float(rank), dtype=torch.bfloat16),
        "numpy": np.full((4, 3), rank, dtype=np.int64),
        "float64": np.full(7, float(rank)),
        "dlpack": OnlyDlpack(np.full(6, float(rank), dtype=np.float32)),
        "strided": torch.full((4, 2), float(rank)).t(),
    }
    cam.all_reduce(mixed, group=name, op="max")
    for key, value in mixed.items():
        array = value.array if isinstance(value, OnlyDlpack) else value
        assert bool((array == n - 1).all()), key
    flags = np.array([rank == 0, True, False])
    cam.all_reduce(flags, group=name)
    assert flags.tolist() == [True, True, False]
    handles = [cam.all_reduce_async([np.full(100, float(i + rank))], group=group) for i in range(3)]
    last = torch.full((10,), float(rank))
    handles.append(cam.all_reduce_async(last, group=group, op="avg"))
    cam.wait(handles)
    assert all(handle.done() for handle in handles)
    assert torch.allclose(last, torch.full((10,), total / n))
    own = np.full(5, rank)
    cam.broadcast([own, torch.zeros(2)], root=n - 1, group=group)
    assert own.tolist() == [n - 1] * 5
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for bad, message in (
        (frozen, "writable"),
        (np.zeros((4, 4))[:, :2], "C order"),
        (3, "iterable"),
        (["text"], "among them"),
    ):
        with pytest.raises(cam.InputError, match=message):
            cam.all_reduce(bad, group=group)
    with pytest.raises(cam.InputError, match="open are"):
        cam.all_reduce(tensor, group="nobody")
    with pytest.raises(cam.InputError, match="reduction 'median'"):
        cam.all_reduce(tensor, group=group, op="median")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_tensors_numpy_and_dlpack(world: int) -> None:
    with Ranks(world) as ranks:
        ranks.run(reduces)


def batches(group: cam.Group) -> None:
    n, rank = group.size, group.rank
    shapes = [(i % 7, 3 + i % 5) for i in range(300)]
    generator = torch.Generator().manual_seed(rank)
    gradients: list[torch.Tensor | None] = [torch.randn(shape, generator=generator) for shape in shapes]
    gradients[10] = None
    gradients[20] = torch.randn(4, generator=generator, dtype=torch.float64)
    alone = [None if g is None else g.clone() for g in gradients]
    cam.all_reduce_batch(gradients, group=group, op="avg")
    for one, other in zip(gradients, alone, strict=True):
        if one is not None and other is not None:
            cam.all_reduce(other, group=group, op="avg")
            assert torch.equal(one, other)
    if n > 1:
        with pytest.raises(cam.Mismatch):
            cam.all_reduce_batch([torch.ones(3), torch.ones(2 + (rank > 0))], group=group)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_batch_equals_its_tensors(world: int) -> None:
    with Ranks(world) as ranks:
        ranks.run(batches)


def groups(group: cam.Group) -> None:
    pair = cam.create_group("pair", [3, 1], strategy="direct", parent=group)
    assert (pair is None) == (group.rank in (0, 2))
    if pair is not None:
        assert (pair.size, pair.rank) == (2, 0 if group.rank == 3 else 1)
        assert pair.config.collective_algorithm == "direct"
        found = torch.tensor([float(group.rank)])
        cam.all_reduce(found, group="pair")
        assert float(found) == 4
        pair.close()
    everybody = cam.create_group("everybody", parent=group)
    assert everybody is not None
    everybody.barrier()
    everybody.close()
    for ranks, message in (([0, 0], "different ranks"), ([9], "different ranks"), ([], "different ranks")):
        with pytest.raises(cam.InputError, match=message):
            cam.create_group("bad", ranks, parent=group)
    with pytest.raises(cam.InputError, match="strategy must be"):
        cam.create_group("bad", strategy="magic", parent=group)


def test_groups_of_some_ranks() -> None:
    with Ranks(4) as ranks:
        ranks.run(groups)


def sized(group: cam.Group) -> None:
    buffers = cam.buffers(group)
    assert cam.buffers(group) is buffers
    gradients = buffers.gradient.like([torch.ones(3, 4), torch.ones(5, dtype=torch.float64)])
    assert [tuple(g.shape) for g in gradients] == [(3, 4), (5,)]
    assert all(not g.any() for g in gradients)
    assert buffers.gradient.size == 1_000_000
    with pytest.raises(cam.OutOfWindowMemory, match="CAM_GRADIENT_BUFFER"):
        buffers.gradient.empty((300_000,))
    address = gradients[0].data_ptr()
    buffers.gradient.reset()
    assert buffers.gradient.used == 0
    assert buffers.gradient.like([torch.ones(2)])[0].data_ptr() == address, "kept memory is used again"
    cam.all_reduce_batch(gradients, group=group)
    before = group.memory()["allocated"]
    del gradients
    assert group.memory()["allocated"] == before


def test_buffers() -> None:
    with Ranks(2, gradient_buffer="1MB", window_limit="64MB") as ranks:
        ranks.run(sized)
    with pytest.raises(cam.ConfigError, match="together more than window_limit"):
        cam.Config(gradient_buffer="4GB", parameter_buffer="2GB", window_limit="5GB")
    with pytest.raises(cam.ConfigError, match="gradient_buffer"):
        cam.Config(gradient_buffer="4 elephants")
    assert int(cam.Config(gradient_buffer="4GB").gradient_buffer or 0) == 4_000_000_000


def released(group: cam.Group) -> None:
    buffer = cam.buffers(group).temporary
    before = group.memory()["allocated"]
    taken = buffer.empty((1000, 1000))
    assert group.memory()["allocated"] >= before + 4_000_000
    del taken
    buffer.reset()
    assert group.memory()["allocated"] == before


def test_released_buffers() -> None:
    with Ranks(1, buffer_reuse="release") as ranks:
        ranks.run(released)


def test_init_takes_a_config_path(tmp_path: Path) -> None:
    path = tmp_path / "cam.yaml"
    path.write_text("name: from-file\ngradient_buffer: 2MB\n")
    with cam.init(config_path=path) as group:
        assert group.name == "from-file"
        cam.all_reduce(found := torch.ones(2), group="from-file")
        assert found.tolist() == [1, 1]
        with pytest.raises(cam.InputError, match="not both"):
            cam.init(config=cam.Config(), config_path=path)


def example(env: RankEnv) -> None:
    spec = importlib.util.spec_from_file_location("data_parallel", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    gloo = join(env)
    store = dist.PrefixStore("example", env.store)
    with cam.init(store=store, rank=env.rank, world_size=env.world_size, name="example") as group:
        ours = program.train_with_cam(group, 20)
    theirs = program.train_with_ddp(gloo, 20)
    assert ours == pytest.approx(theirs, rel=0 if env.world_size == 2 else 1e-4)
    assert ours[-1] < 0.8 * ours[0]


@pytest.mark.parametrize("world", [2, 3])
def test_the_example_has_the_losses_of_ddp(world: int) -> None:
    with ranks_of(world) as ranks:
        ranks.run(example)
