"""Which bytes go where when blocks of one geometry become blocks of another.

Knows shapes and ranks, never addresses or transports: everything here is a pure function. Both sides can
therefore compute the same plan by themselves; the checksums of a transfer rely on that.

A plan for one layer is a table of pieces, one row each. A piece is a small rectangle of bytes: `rows` runs of
`nbytes`, each side with its own stride from run to run. That is enough for every pair of layouts: what is
contiguous on both sides is merged, the longest remaining dimension becomes the rows, the others are spelled out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cam.errors import InputError
from cam.kv.geometry import Geometry, Heads
from cam.transport.pieces import COLUMNS, MY_OFFSET, NBYTES, ROWS, THEIR_OFFSET, Int64s


@dataclass(frozen=True)
class Span:
    """Which tokens move: tokens of mine from `my_start` on and of theirs from `their_start` on, `count` of each,
    counted over each side's blocks laid end to end."""

    my_start: int
    their_start: int
    count: int


@dataclass(frozen=True)
class Plan:
    """Pieces of one layer. table: int64 [pieces, COLUMNS]. block: int64 [pieces], position in the caller's list
    of own blocks that each piece belongs to."""

    table: Int64s
    block: Int64s

    @property
    def nbytes(self) -> int:
        return int((self.table[:, NBYTES] * self.table[:, ROWS]).sum())


def read_sources(mine: Heads, theirs: Sequence[Heads | None], spread: int) -> list[tuple[int, range]]:
    """Which of the remote ranks each head of mine is read from: (position in `theirs`, heads).

    theirs: heads of each remote rank; None where it does not have this layer. Heads that several of them hold
    are read from one, chosen by `spread` (this rank's number), so that readers do not all ask the same.
    Raises InputError when nobody holds a head.
    """
    chosen: dict[int, list[int]] = {}
    for head in range(mine.first, mine.end):
        holders = [part for part, heads in enumerate(theirs) if heads is not None and head in heads]
        if not holders:
            raise InputError(f"no remote rank holds KV head {head}")
        chosen.setdefault(holders[spread % len(holders)], []).append(head)
    return [(part, run) for part, heads in chosen.items() for run in _runs(heads)]


def write_targets(mine: Heads, rank: int, size: int, theirs: Sequence[Heads | None]) -> list[tuple[int, range]]:
    """Which remote ranks this rank (of `size`) writes its heads to: (position in `theirs`, heads).

    Every remote holder of a head gets it. Where several of my ranks hold the same head, they share its targets.
    Raises InputError when nobody holds a head.
    """
    copies = max(1, size // mine.total)
    chosen: dict[int, list[int]] = {}
    for head in range(mine.first, mine.end):
        holders = [part for part, heads in enumerate(theirs) if heads is not None and head in heads]
        if not holders:
            raise InputError(f"no remote rank holds KV head {head}")
        for part in holders[rank % copies :: copies]:
            chosen.setdefault(part, []).append(head)
    return [(part, run) for part, heads in chosen.items() for run in _runs(heads)]


def plan(mine: Geometry, theirs: Geometry, heads: range, my_blocks: Int64s, their_blocks: Int64s, span: Span) -> Plan:
    """The pieces that carry `heads` of the span's tokens between my_blocks and their_blocks (block ids).

    Raises InputError for blocks that do not exist, a span beyond the blocks, or parts of opaque blocks.
    """
    _check_ids("block", my_blocks, mine.blocks)
    _check_ids("remote block", their_blocks, theirs.blocks)
    check_span(span, len(my_blocks) * mine.tokens, len(their_blocks) * theirs.tokens)
    if span.count == 0:
        return Plan(np.empty((0, COLUMNS), np.int64), np.empty(0, np.int64))
    whole = mine.tokens == theirs.tokens and span.my_start == 0 == span.their_start
    if whole and span.count == len(my_blocks) * mine.tokens:
        count = span.count // mine.tokens
        starts = my_blocks * mine.block_stride, their_blocks[:count] * theirs.block_stride
        return Plan(*_spread(pattern(mine, theirs, heads, mine.tokens), *starts, np.arange(count)))
    my_index, their_index, my_token, their_token, counts = _segments(mine.tokens, theirs.tokens, span)
    if mine.opaque and not (counts == mine.tokens).all():
        raise InputError(
            "opaque blocks move whole: tokens and starts must be multiples of the block size "
            f"{mine.tokens}, got {span.count} tokens from {span.my_start} (mine) and {span.their_start} (theirs)"
        )
    my_start = my_blocks[my_index] * mine.block_stride + my_token * mine.token_stride
    their_start = their_blocks[their_index] * theirs.block_stride + their_token * theirs.token_stride
    tables, blocks = [], []
    for count in np.unique(counts):
        which = counts == count
        pieces = pattern(mine, theirs, heads, int(count))
        table, block = _spread(pieces, my_start[which], their_start[which], my_index[which])
        tables.append(table)
        blocks.append(block)
    return Plan(np.concatenate(tables), np.concatenate(blocks))


def check_span(span: Span, my_tokens: int, their_tokens: int) -> None:
    """Raises InputError unless both sides have the span's tokens."""
    for whose, start, has in (("local", span.my_start, my_tokens), ("remote", span.their_start, their_tokens)):
        if start < 0 or span.count < 0 or start + span.count > has:
            raise InputError(
                f"{span.count} tokens from token {start} on do not fit the {has} tokens of the {whose} blocks given"
            )


def pattern(mine: Geometry, theirs: Geometry, heads: range, tokens: int) -> Int64s:
    """Pieces of one run of tokens inside one block: int64 [pieces, COLUMNS], offsets from the run's first byte."""
    first = (heads.start - mine.heads.first) * mine.head_stride
    their_first = (heads.start - theirs.heads.first) * theirs.head_stride
    dims = [
        (mine.planes, mine.plane_stride, theirs.plane_stride),
        (len(heads), mine.head_stride, theirs.head_stride),
        (tokens, mine.token_stride, theirs.token_stride),
    ]
    # Innermost first: then what continues the run on both sides makes the run longer.
    dims = sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1])
    run = mine.channel_bytes
    left: list[tuple[int, int, int]] = []
    for count, my_step, their_step in dims:
        if my_step == run == their_step and not left:
            run *= count
        else:
            left.append((count, my_step, their_step))
    left.sort()
    rows, my_stride, their_stride = left.pop() if left else (1, 0, 0)
    return np.array(
        [
            (
                first + sum(i * step for i, (_, step, _) in zip(at, left, strict=True)),
                their_first + sum(i * step for i, (_, _, step) in zip(at, left, strict=True)),
                run,
                rows,
                my_stride,
                their_stride,
            )
            for at in product(*(range(count) for count, _, _ in left))
        ],
        dtype=np.int64,
    )


def _segments(my_tokens: int, their_tokens: int, span: Span) -> tuple[Int64s, ...]:
    """The span cut at every block boundary of either side."""
    mine = np.arange(-(span.my_start % my_tokens), span.count, my_tokens)
    theirs = np.arange(-(span.their_start % their_tokens), span.count, their_tokens)
    cuts = np.unique(np.concatenate([[0], mine[mine > 0], theirs[theirs > 0]])).astype(np.int64)
    counts = np.diff(np.append(cuts, span.count))
    my_at, their_at = cuts + span.my_start, cuts + span.their_start
    return my_at // my_tokens, their_at // their_tokens, my_at % my_tokens, their_at % their_tokens, counts


def _spread(pieces: Int64s, my_start: Int64s, their_start: Int64s, block: Int64s) -> tuple[Int64s, Int64s]:
    """The pieces of one block, repeated for every block."""
    table = np.tile(pieces, (len(my_start), 1))
    table[:, MY_OFFSET] += np.repeat(my_start, len(pieces))
    table[:, THEIR_OFFSET] += np.repeat(their_start, len(pieces))
    return table, np.repeat(block, len(pieces))


def _check_ids(what: str, ids: Int64s, blocks: int) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= blocks):
        wrong = ids[(ids < 0) | (ids >= blocks)][:4].tolist()
        raise InputError(f"{what} ids must be in 0..{blocks - 1}, got {', '.join(map(str, wrong))}")


def _runs(heads: Sequence[int]) -> list[range]:
    """Heads in ascending order as contiguous ranges."""
    runs: list[range] = []
    for head in heads:
        if runs and runs[-1].stop == head:
            runs[-1] = range(runs[-1].start, head + 1)
        else:
            runs.append(range(head, head + 1))
    return runs
