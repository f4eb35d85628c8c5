"""Block sizes from the size of the unified buffer.

A kernel's tiles must fit UB together with the second buffer of those that are copied in or out. How many bytes of UB
one element of the tile costs is a property of the kernel and its compiler; tests measure it in the final HIVM and fail
when a number here is too small, or so large that double buffering was given up.
"""

from __future__ import annotations

from cam_kernels.ascend.errors import LimitExceeded

UB_BYTES = 192 * 1024  # A2 and A3; 950 has 248 KiB

# Bytes of UB per element of the block constant, of the worst element type. Double buffers and temporaries included.
_COST: dict[str, int] = {
    "push_rows": 9,
    "push_rows quantised": 36,
    "push_results": 9,
    "sum_results": 36,
    "clear_padding": 4,
    "quant_rows": 36,
    "dequant_rows": 14,
    "swiglu_requant": 92,
    "dequant_output": 24,
}
_SMALLEST = 32
_LARGEST = 8192


def block(kernel: str, elements: int) -> int:
    """The block constant for rows of `elements`: a power of two that covers the row or fills UB."""
    if kernel not in _COST:
        raise LimitExceeded(f"no UB cost is known for {kernel!r}; known are {sorted(_COST)}")
    cost = _COST[kernel]
    size = _SMALLEST
    while size < min(elements, _LARGEST) and 2 * size * cost <= UB_BYTES:
        size *= 2
    return size
