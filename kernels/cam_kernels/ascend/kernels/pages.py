"""KV pages: gather and scatter between a paged cache and contiguous memory or another rank's cache.

A page holds `block_size` tokens of `heads` heads of `head_dim` elements, in one of two orders:

    NHD   [token, head, element]
    HND   [head, token, element]

A transfer may take only some heads, which is what ranks with unequal tensor parallelism exchange. Whatever the orders,
a page is a number of planes of rows of contiguous elements, and only the strides differ between the two sides, so one
kernel does gather, scatter, both orders, head slices and local or peer memory; cam_kernels.ascend.paging computes the
strides.

Not run on hardware.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cam_kernels.ascend.kernel import Kernel


@triton.jit
def copy_pages(bases_ptr, from_pages_ptr, to_pages_ptr, like_ptr, N, planes, rows, run, from_page, from_plane, from_row,
               to_page, to_plane, to_row, BR: tl.constexpr, BI: tl.constexpr):  # fmt: skip
    """to[to_pages[n]] = from[from_pages[n]] for n < N, a page being planes x rows x run elements.

    bases [2] int64: addresses of element 0 of the source and of the destination, either of them in a peer's window;
    from_pages, to_pages [N] int32 or int64 page numbers; like: any tensor of the element type (never read).
    Strides are in elements (int64): of a page, a plane and a row on each side. Elements are bits of 1, 2 or 4 bytes.
    Grid: any; the (page, plane) pairs are dealt out in turn. Tiling: BR rows of BI elements, UB 2 tiles.
    Visibility: the launch ends the copy; a flag for a peer is a launch of its own after it (notify.raise_flag).
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
