"""What one transfer moves: a table of pieces, and the base addresses of the layers that it is applied to."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

#: Columns of a table. A piece is ROWS runs of NBYTES each, with a stride on each side. Offsets are from the
#: bases of a Batch.
MY_OFFSET, THEIR_OFFSET, NBYTES, ROWS, MY_STRIDE, THEIR_STRIDE = range(6)
COLUMNS = 6


@dataclass(frozen=True, eq=False)
class Batch:
    """table: int64 [pieces, COLUMNS], C-contiguous. mine, theirs: int64 [layers], addresses in this process and
    in the peer's (as its channel's `addresses` gave them). Every layer moves the whole table."""

    table: Int64s
    mine: Int64s
    theirs: Int64s

    @property
    def nbytes(self) -> int:
        return int(self.table[:, NBYTES] @ self.table[:, ROWS]) * len(self.mine)

    @property
    def steps(self) -> int:
        """One for each piece of each layer: step = layer * pieces + piece."""
        return len(self.table) * len(self.mine)


def flatten(table: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """A table as single runs, for transports that know no rectangles: (my offset, their offset, nbytes, piece),
    each int64 [runs]; piece: the row of the table that a run comes from."""
    rows = table[:, ROWS]
    piece = np.repeat(np.arange(len(table)), rows)
    step = np.arange(len(piece)) - np.repeat(np.cumsum(rows) - rows, rows)
    mine = table[piece, MY_OFFSET] + step * table[piece, MY_STRIDE]
    theirs = table[piece, THEIR_OFFSET] + step * table[piece, THEIR_STRIDE]
    return mine, theirs, table[piece, NBYTES], piece


def runs(batch: Batch) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """All runs of a batch with absolute addresses: (mine, theirs, nbytes, step), each int64 [runs]."""
    mine, theirs, nbytes, piece = flatten(batch.table)
    layers = len(batch.mine)
    steps = np.arange(layers)[:, None] * len(batch.table) + piece
    return (
        (batch.mine[:, None] + mine).ravel(),
        (batch.theirs[:, None] + theirs).ravel(),
        np.tile(nbytes, layers),
        steps.ravel(),
    )
