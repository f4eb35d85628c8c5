"""What callers say about blocks, as the planner takes it."""

from collections.abc import Sequence

import numpy as np
import torch

from cam.errors import InputError
from cam.kv.geometry import Geometry
from cam.kv.planner import Span
from cam.transport.pieces import Int64s

#: Block ids.
Blocks = Sequence[int] | torch.Tensor | Int64s


def block_ids(name: str, blocks: Blocks) -> Int64s:
    """As int64. Raises InputError."""
    array = blocks.numpy() if isinstance(blocks, torch.Tensor) else np.asarray(blocks)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(f"{name} must be a list of block ids, got {array.dtype} of shape {list(array.shape)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def span_of(
    mine: Geometry,
    theirs: Geometry,
    my_blocks: int,
    their_blocks: int,
    tokens: int | None,
    start: int,
    their_start: int,
) -> Span:
    """The tokens that move, of so many blocks on each side. Raises InputError."""
    if tokens is not None:
        return Span(start, their_start, tokens)
    if start or their_start:
        raise InputError("local_start and remote_start need tokens: how many of them move")
    here, there = my_blocks * mine.tokens, their_blocks * theirs.tokens
    if here != there:
        raise InputError(
            f"{my_blocks} local blocks of {mine.tokens} tokens and {their_blocks} remote blocks of {theirs.tokens} do "
            "not hold equally many tokens: give tokens="
        )
    return Span(0, 0, here)
