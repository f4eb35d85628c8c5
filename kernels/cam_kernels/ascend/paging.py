"""Host side of the KV pages: page shapes, the strides of a copy between two of them, and the copy itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernels.pages import COPY_PAGES
from cam_kernels.ascend.launch import Launcher
from cam_kernels.ascend.window import power_of_two

Order = Literal["NHD", "HND"]
_TILE_BYTES = 16 * 1024
_WORD: dict[int, torch.dtype] = {1: torch.int8, 2: torch.int16, 4: torch.int32}


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


def copy_heads(
    launcher: Launcher,
    plan: PagePlan,
    source_address: int,
    target_address: int,
    from_pages: torch.Tensor,
    to_pages: torch.Tensor,
    element_bytes: int,
) -> None:
    """Copy page from_pages[n] at source_address to page to_pages[n] at target_address, for every n.

    source_address, target_address: of page 0 of each cache, in own or peer memory as the launcher's device sees it.
    from_pages, to_pages: [N] int32 or int64 page numbers on the launcher's device. To gather into contiguous memory let
    to_pages be 0, 1, 2, ...; to scatter from it, from_pages. element_bytes: 1, 2 or 4.
    """
    if element_bytes not in _WORD:
        raise LimitExceeded(f"element_bytes = {element_bytes}, allowed are {sorted(_WORD)}")
    if from_pages.shape != to_pages.shape or from_pages.dim() != 1:
        raise LimitExceeded(f"page lists of shapes {tuple(from_pages.shape)} and {tuple(to_pages.shape)} differ")
    count = from_pages.numel()
    if count == 0:
        return
    device = from_pages.device
    bases = torch.tensor(
        [source_address + plan.from_offset * element_bytes, target_address + plan.to_offset * element_bytes],
        dtype=torch.int64,
        device=device,
    )
    run = min(power_of_two(plan.run), _TILE_BYTES // element_bytes)
    rows = min(power_of_two(plan.rows), max(1, _TILE_BYTES // element_bytes // run))
    launcher.launch(
        COPY_PAGES, min(launcher.cores, count * plan.planes), bases, from_pages, to_pages,
        torch.empty(1, dtype=_WORD[element_bytes], device=device), count, plan.planes, plan.rows, plan.run,
        plan.from_page, plan.from_plane, plan.from_row, plan.to_page, plan.to_plane, plan.to_row, BR=rows, BI=run,
    )  # fmt: skip
