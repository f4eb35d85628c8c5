"""The cache's geometry: what is derived from tensors, what is refused."""

import itertools

import pytest
import torch

from cam import InputError
from cam.kv import Geometry, Heads, Layer
from cam.kv.geometry import disagreement
from tests.core.kv.oracle import LAYOUTS, Shape

SIZES = (1, 2, 4, 8)


@pytest.mark.parametrize(("total", "size"), list(itertools.product(SIZES, SIZES)))
def test_every_head_lives_on_as_many_ranks_as_replication_says(total, size):
    holders = [Heads.of_rank(total, rank, size) for rank in range(size)]
    for head in range(total):
        assert sum(head in each for each in holders) == max(1, size // total)
    assert [each.first for each in holders] == sorted(each.first for each in holders)
    assert all(each.count == max(1, total // size) for each in holders)


@pytest.mark.parametrize(("total", "rank", "size"), [(3, 0, 2), (2, 0, 3), (4, 4, 4), (4, -1, 4), (0, 0, 1)])
def test_heads_that_cannot_be_dealt_are_refused(total, rank, size):
    with pytest.raises(InputError):
        Heads.of_rank(total, rank, size)


@pytest.mark.parametrize("dims", LAYOUTS)
def test_strides_are_those_of_the_tensor(dims):
    shape = Shape(dims, blocks=5, tokens=16, total_heads=1 if dims == "btd" else 4, dtype=torch.bfloat16)
    tensor = torch.zeros(shape.sizes(), dtype=shape.dtype)
    geometry = shape.layer("l", tensor).geometry(0, 1)
    base = tensor.data_ptr()
    view = shape.view(tensor)
    for block, plane, head, token in itertools.product(*(range(n) for n in view.shape[:4])):
        offset = (
            block * geometry.block_stride
            + plane * geometry.plane_stride
            + head * geometry.head_stride
            + token * geometry.token_stride
        )
        assert base + offset == view[block, plane, head, token].data_ptr()
    assert geometry.span == tensor.nbytes
    assert geometry.block_bytes * geometry.blocks == tensor.nbytes


def test_a_strided_part_of_a_larger_tensor_has_its_own_strides():
    whole = torch.zeros(4, 2, 16, 8, 32)
    part = whole[:, :, :, 2:6]  # some heads of [b, p, t, h, d]
    geometry = Layer("l", part, "bpthd").geometry(0, 1)
    assert geometry.heads.count == 4
    assert geometry.token_stride == 8 * 32 * 4
    assert geometry.span < whole.nbytes


@pytest.mark.parametrize(
    ("tensor", "dims", "opaque", "says"),
    [
        (torch.zeros(2, 3, 4), "btdh", False, "4 dimensions"),
        (torch.zeros(2, 3, 4), "bth", False, "b, t and d"),
        (torch.zeros(2, 3, 4), "bbd", False, "b, t and d"),
        (torch.zeros(2, 3, 4), "bxd", False, "b, t and d"),
        (torch.zeros(2, 3, 4).transpose(1, 2), "btd", False, "contiguous"),
        (torch.zeros(0, 3, 4), "btd", False, "empty"),
        (torch.zeros(2, 2, 3, 4), "bptd", True, "opaque"),
        (torch.zeros(2, 3, 4, device="meta"), "btd", False, "CPU tensor"),
    ],
)
def test_wrong_layers_are_refused_by_name(tensor, dims, opaque, says):
    with pytest.raises(InputError, match=f"layer 'deep'.*{says}"):
        Layer("deep", tensor, dims, opaque=opaque).geometry(0, 1)


def test_heads_here_must_fit_the_whole_models():
    tensor = torch.zeros(2, 16, 4, 8)
    with pytest.raises(InputError, match=r"should hold 2 of 8 KV heads, the tensor holds 4"):
        Layer("l", tensor, "bthd", total_heads=8).geometry(1, 4)


def _geometry(**changes):
    base = {
        "heads": Heads(0, 2, 2), "blocks": 4, "planes": 2, "tokens": 16, "channel_bytes": 64, "dtype": "float16",
        "block_stride": 8192, "plane_stride": 4096, "head_stride": 64, "token_stride": 128,
    }  # fmt: skip
    return Geometry(**(base | changes))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"channel_bytes": 32}, "bytes of a head"),
        ({"planes": 1}, "planes"),
        ({"heads": Heads(0, 2, 4)}, "total_heads"),
    ],
)
def test_what_keeps_two_layers_apart_is_named_with_both_values(change, field):
    found = disagreement(_geometry(), _geometry(**change))
    assert found is not None
    assert found[0] == field
    assert found[1] != found[2]


def test_opaque_blocks_need_one_block_size():
    opaque = {"planes": 1, "opaque": True, "token_stride": 64, "head_stride": 2048}
    assert disagreement(_geometry(**opaque), _geometry(**opaque)) is None
    found = disagreement(_geometry(**opaque), _geometry(**opaque, tokens=32))
    assert found is not None
    assert found[0].startswith("block size")
    assert found[1:] == ("16", "32")


@pytest.mark.parametrize(
    "change", [{"blocks": 0}, {"block_stride": -1}, {"heads": Heads(1, 2, 2)}, {"tokens": 1 << 50}]
)
def test_geometries_from_outside_are_checked(change):
    with pytest.raises(InputError):
        _geometry(**change)
