"""The planner alone: tables of pieces, applied with plain loops over byte arrays."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cam import InputError
from cam.kv import Heads
from cam.kv.planner import Span, plan, read_sources, write_targets
from cam.transport.pieces import NBYTES, ROWS, flatten
from tests.core.kv.oracle import LAYOUTS, Shape, content, fill, model

SIZES = (1, 2, 4, 8)
PLANES = tuple(dims for dims in LAYOUTS if "p" in dims)


def _apply(table, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies every run of the table, checking that it stays inside both pools."""
    to, fro = (t.reshape(-1).view(torch.uint8) for t in (target, source))
    mine, theirs, nbytes, _ = flatten(table)
    for a, b, n in zip(mine.tolist(), theirs.tolist(), nbytes.tolist(), strict=True):
        assert a >= 0
        assert a + n <= len(to)
        assert b >= 0
        assert b + n <= len(fro)
        to[a : a + n] = fro[b : b + n]


def _ids(blocks):
    return np.array(blocks, np.int64)


def _move(mine: Shape, target, my_blocks, theirs: list[Shape], sources, their_blocks, span: Span) -> int:
    """A whole read of one rank from all ranks of the other side. Returns the number of pieces."""
    geometry = mine.layer("l", target).geometry(mine.tp_rank, mine.tp_size)
    others = [s.layer("l", t).geometry(s.tp_rank, s.tp_size) for s, t in zip(theirs, sources, strict=True)]
    pieces = 0
    for part, heads in read_sources(geometry.heads, [g.heads for g in others], mine.tp_rank):
        found = plan(geometry, others[part], heads, _ids(my_blocks), _ids(their_blocks), span)
        _apply(found.table, target, sources[part])
        pieces += len(found.table)
    return pieces


def _check(mine, my_blocks, theirs, their_blocks, tokens, my_start=0, their_start=0):
    """Fills the other side from the model, reads, compares what was asked for and that nothing else changed."""
    planes = 2 if "p" in mine.dims else 1
    truth = model(their_start + tokens, mine.total_heads, mine.channels, planes)
    sources = [torch.full(each.sizes(), -1.0, dtype=each.dtype) for each in theirs]
    for shape, tensor in zip(theirs, sources, strict=True):
        fill(shape, tensor, their_blocks, truth)
    target = torch.full(mine.sizes(), 7.0, dtype=mine.dtype)
    pieces = _move(mine, target, my_blocks, theirs, sources, their_blocks, Span(my_start, their_start, tokens))
    heads = slice(mine.heads.first, mine.heads.end)
    if tokens:
        got = content(mine, target, my_blocks, range(my_start, my_start + tokens))
        assert torch.equal(got, truth[their_start:, :, heads])
    touched = tokens * planes * mine.heads.count * mine.channels
    assert int((target == 7.0).sum()) >= target.numel() - touched
    untouched = set(range(mine.blocks)) - set(my_blocks)
    assert bool((mine.view(target)[sorted(untouched)] == 7.0).all())
    return pieces


def _instance(dims, blocks, tokens, heads, size):
    return [Shape(dims, blocks, tokens, heads, rank, size, channels=2) for rank in range(size)]


@pytest.mark.parametrize("heads", SIZES)
@pytest.mark.parametrize(("theirs", "mine"), list(itertools.product(SIZES, SIZES)))
def test_tensor_parallel_any_against_any_with_replicated_heads(theirs, mine, heads):
    others = _instance("bpthd", 6, 4, heads, theirs)
    for each in _instance("pbhtd", 7, 4, heads, mine):
        _check(each, [6, 0, 3], others, [1, 5, 2], tokens=11)


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product((16, 32, 64, 128), (16, 32, 64, 128))))
@pytest.mark.parametrize("tokens", [1, 77, 128, 131])
def test_block_sizes_any_against_any_with_odd_lengths(mine, theirs, tokens):
    my_blocks = list(range(10))[::-1][: -(-tokens // mine)]
    their_blocks = list(range(1, 11))[: -(-tokens // theirs)]
    local = Shape("bpthd", 11, mine, 2, channels=1)
    _check(local, my_blocks, [Shape("bphtd", 12, theirs, 2, channels=1)], their_blocks, tokens)


@pytest.mark.parametrize(("mine", "theirs"), list(itertools.product(PLANES, PLANES)))
def test_layouts_any_against_any(mine, theirs):
    _check(Shape(mine, 5, 4, 2), [4, 1], [Shape(theirs, 6, 4, 2)], [0, 3], 8)


def test_mla_has_no_heads_and_every_rank_reads_all_of_it():
    others = [Shape("btd", 4, 16, 1, rank, 2) for rank in range(2)]
    for rank in range(4):
        _check(Shape("btd", 5, 32, 1, rank, 4), [2], others, [3, 0], tokens=29)


@settings(max_examples=60, deadline=None)
@given(
    mine=st.sampled_from([1, 3, 4, 16]),
    theirs=st.sampled_from([1, 2, 5, 16]),
    my_start=st.integers(0, 20),
    their_start=st.integers(0, 20),
    tokens=st.integers(0, 40),
    dims=st.sampled_from(["bpthd", "pbhtd"]),
)
def test_any_part_of_any_blocks(mine, theirs, my_start, their_start, tokens, dims):
    my_count, their_count = -(-(my_start + tokens) // mine), -(-(their_start + tokens) // theirs)
    my_blocks = list(range(my_count))[::-1]
    their_blocks = [(i * 7) % max(1, their_count) for i in range(their_count)]
    if len(set(their_blocks)) < their_count:
        their_blocks = list(range(their_count))
    local = Shape(dims, my_count + 1, mine, 2, channels=1)
    remote = Shape("bphtd", their_count + 1, theirs, 2, channels=1)
    _check(local, my_blocks, [remote], their_blocks, tokens, my_start, their_start)


@pytest.mark.parametrize(("dims", "runs"), [("bpthd", 1), ("bphtd", 1), ("pbthd", 2), ("bhtd", 1), ("btd", 1)])
def test_equal_geometries_take_the_straight_path(dims, runs):
    """One piece for each block: one run, or one for each plane where the planes lie outside the blocks."""
    shape = Shape(dims, 8, 16, 1 if dims == "btd" else 4)
    geometry = shape.layer("l", torch.empty(shape.sizes())).geometry(0, 1)
    found = plan(geometry, geometry, range(geometry.heads.count), _ids([7, 1, 4]), _ids([0, 2, 6]), Span(0, 0, 48))
    assert len(found.table) == 3
    assert (found.table[:, ROWS] == runs).all()
    assert (found.table[:, NBYTES] == geometry.block_bytes // runs).all()
    assert found.nbytes == 3 * geometry.block_bytes


def test_half_the_heads_are_a_rectangle_for_each_block_and_plane():
    whole = Shape("bpthd", 4, 16, 8)
    half = Shape("bpthd", 4, 16, 8, tp_rank=1, tp_size=2)
    mine = half.layer("l", torch.empty(half.sizes())).geometry(1, 2)
    theirs = whole.layer("l", torch.empty(whole.sizes())).geometry(0, 1)
    found = plan(mine, theirs, range(4, 8), _ids([0, 1]), _ids([2, 3]), Span(0, 0, 32))
    # Planes and tokens follow each other on my side without a gap, on the other with equal ones.
    assert len(found.table) <= 4
    assert found.nbytes == 2 * mine.block_bytes


def test_offsets_are_64_bit():
    """A pool of 4 TiB that nobody allocates."""
    shape = Shape("bpthd", 8, 16, 4)
    small = shape.layer("l", torch.empty(shape.sizes())).geometry(0, 1)
    huge = type(small)(**{**vars(small), "block_stride": 1 << 39})
    found = plan(huge, small, range(4), _ids([7]), _ids([1]), Span(0, 0, 16))
    assert int(found.table[0, 0]) == 7 << 39


@pytest.mark.parametrize(
    ("my_blocks", "their_blocks", "span", "says"),
    [
        ([8], [0], Span(0, 0, 16), "block ids must be in 0..7, got 8"),
        ([0], [-1], Span(0, 0, 16), "remote block ids must be in 0..7, got -1"),
        ([0], [0], Span(0, 0, 17), "17 tokens from token 0 on do not fit the 16 tokens"),
        ([0], [0, 1], Span(1, 0, 16), "local blocks"),
        ([0, 1], [0], Span(0, 5, 12), "remote blocks"),
        ([0], [0], Span(-1, 0, 1), "do not fit"),
        ([0], [0], Span(0, 0, -1), "do not fit"),
    ],
)
def test_blocks_and_tokens_that_do_not_exist_are_refused(my_blocks, their_blocks, span, says):
    shape = Shape("bpthd", 8, 16, 4)
    geometry = shape.layer("l", torch.empty(shape.sizes())).geometry(0, 1)
    with pytest.raises(InputError, match=says):
        plan(geometry, geometry, range(4), _ids(my_blocks), _ids(their_blocks), span)


@pytest.mark.parametrize("span", [Span(0, 0, 15), Span(1, 1, 16), Span(0, 16, 8)])
def test_parts_of_opaque_blocks_are_refused(span):
    shape = Shape("bhtd", 8, 16, 4)
    geometry = shape.layer("l", torch.empty(shape.sizes())).geometry(0, 1)
    with pytest.raises(InputError, match="opaque blocks move whole"):
        plan(geometry, geometry, range(4), _ids([0, 1]), _ids([0, 1]), span)


def test_opaque_blocks_of_other_heads_and_strides_move_whole():
    whole = Shape("bhtd", 6, 32, 4)
    for rank in range(2):
        _check(Shape("bhtd", 5, 32, 4, rank, 2), [3, 1], [whole], [2, 5], 64)


@pytest.mark.parametrize(("mine", "theirs", "total"), list(itertools.product(SIZES, SIZES, SIZES)))
def test_writers_together_reach_every_holder_of_every_head_once(mine, theirs, total):
    holders = [Heads.of_rank(total, rank, theirs) for rank in range(theirs)]
    written = [
        (part, head)
        for rank in range(mine)
        for part, heads in write_targets(Heads.of_rank(total, rank, mine), rank, mine, holders)
        for head in heads
    ]
    assert sorted(written) == sorted(
        (part, head) for part, heads in enumerate(holders) for head in range(total) if head in heads
    )


def test_readers_of_replicated_heads_do_not_all_ask_the_same_rank():
    holders = [Heads.of_rank(2, rank, 4) for rank in range(4)]
    asked = {part for rank in range(4) for part, _ in read_sources(Heads.of_rank(2, rank, 4), holders, rank)}
    assert len(asked) > 2


def test_a_head_that_nobody_holds_is_an_error():
    with pytest.raises(InputError, match="head 1"):
        read_sources(Heads(0, 2, 2), [Heads(0, 1, 2), None], 0)
    with pytest.raises(InputError, match="head 1"):
        write_targets(Heads(0, 2, 2), 0, 1, [Heads(0, 1, 2)])
