"""KV pages: gather and scatter between a paged cache and contiguous memory or another rank's cache.

A page holds `block_size` tokens of `heads` heads of `head_dim` elements, in one of two orders:

    NHD   [token, head, element]
    HND   [head, token, element]

A transfer may take only some heads, which is what ranks with unequal tensor parallelism exchange. Whatever the orders,
a page is a number of planes of rows of contiguous elements, and only the strides differ between the two sides, so one
kernel does gather, scatter, both orders, head slices and local or peer memory; `plan_pages` computes the strides.

Not run on hardware.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import triton
import triton.language as tl

from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernel import Kernel

Order = Literal["NHD", "HND"]


@triton.jit
def copy_pages(bases_ptr, from_pages_ptr, to_pages_ptr, like_ptr, N, planes, rows, run, from_page, from_plane, from_row,
               to_page, to_plane, to_row, BR: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """to[to_pages[n]] = from[from_pages[n]] for n < N, a page being planes x rows x run elements.

    bases [2] int64: addresses of element 0 of the source and of the destination, either of them in a peer's window;
    from_pages, to_pages [N] int32 or int64 page numbers; like: any tensor of the element type (never read).
    Strides are in elements (int64): of a page, a plane and a row on each side. Elements are bits of 1, 2 or 4 bytes.
    Grid: any; the (page, plane) pairs are dealt out in turn. Tiling: BR rows of BI elements, UB 2 tiles.
    Visibility: the launch ends the copy; a flag for a peer is a launch of its own after it (bucket.raise_flag).
    """
    row = tl.arange(0, BR)
    lane = tl.arange(0, BI)
    source = tl.load(bases_ptr).to(tl.pointer_type(like_ptr.dtype.element_ty))
    target = tl.load(bases_ptr + 1).to(tl.pointer_type(like_ptr.dtype.element_ty))
    for item in range(tl.program_id(0), N * planes, tl.num_programs(0)):
        n = item // planes
        plane = (item % planes).to(tl.int64)
        get = tl.load(from_pages_ptr + n).to(tl.int64) * from_page + plane * from_plane
        put = tl.load(to_pages_ptr + n).to(tl.int64) * to_page + plane * to_plane
        for r in range(0, rows, BR):
            for i in range(0, run, BI):
                mask = (r + row < rows)[:, None] & (i + lane < run)[None, :]
                tile = tl.load(source + (get + r * from_row + i + row[:, None] * from_row + lane[None, :]), mask=mask)
                tl.store(target + (put + r * to_row + i + row[:, None] * to_row + lane[None, :]), tile, mask=mask)


COPY_PAGES = Kernel(copy_pages, wide=("from_page", "from_plane", "from_row", "to_page", "to_plane", "to_row"))


@dataclass(frozen=True)
class PageShape:
    """How one side stores a page: [block_size, heads, head_dim] in one of the two orders."""

    block_size: int
    heads: int
    head_dim: int
    order: Order = "NHD"

    def __post_init__(self) -> None:
        if min(self.block_size, self.heads, self.head_dim) < 1 or self.order not in ("NHD", "HND"):
            raise LimitExceeded(f"not a page: {self}")

    @property
    def elements(self) -> int:
        return self.block_size * self.heads * self.head_dim

    def strides(self) -> tuple[int, int]:
        """Elements between neighbouring tokens, and between neighbouring heads."""
        if self.order == "NHD":
            return self.heads * self.head_dim, self.head_dim
        return self.head_dim, self.block_size * self.head_dim


@dataclass(frozen=True)
class PagePlan:
    """Arguments of copy_pages for one pair of page shapes."""

    planes: int
    rows: int
    run: int
    from_page: int
    from_plane: int
    from_row: int
    to_page: int
    to_plane: int
    to_row: int
    from_offset: int
    """Elements from the start of a page to its first wanted head."""
    to_offset: int


def plan_pages(source: PageShape, target: PageShape, *, heads: int, from_head: int = 0, to_head: int = 0) -> PagePlan:
    """Plan the copy of `heads` heads, starting at from_head of the source page, to to_head of the target page.

    Raises LimitExceeded when the shapes do not match or the heads are not there.
    """
    if (source.block_size, source.head_dim) != (target.block_size, target.head_dim):
        raise LimitExceeded(f"pages differ in block_size or head_dim: {source} and {target}")
    if heads < 1 or not 0 <= from_head <= source.heads - heads or not 0 <= to_head <= target.heads - heads:
        raise LimitExceeded(f"heads [{from_head}, +{heads}) of {source} do not fit at {to_head} of {target}")
    tokens, dim = source.block_size, source.head_dim
    (from_token, from_next), (to_token, to_next) = source.strides(), target.strides()
    if source.order == target.order == "NHD":
        # The wanted heads of a token are neighbours on both sides: a run.
        planes, rows, run = 1, tokens, heads * dim
        strides = (0, from_token), (0, to_token)
    elif source.order == target.order:
        # All tokens of a head are neighbours on both sides. Heads are the planes, so that a page spreads over cores.
        planes, rows, run = heads, 1, tokens * dim
        strides = (from_next, 0), (to_next, 0)
    else:
        planes, rows, run = heads, tokens, dim
        strides = (from_next, from_token), (to_next, to_token)
    return PagePlan(
        planes, rows, run, source.elements, *strides[0], target.elements, *strides[1],
        from_head * from_next, to_head * to_next,
    )  # fmt: skip
