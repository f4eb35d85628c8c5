"""The window: memory of a rank that its peers write, and where in it each kernel's areas are.

A window has the same layout on every rank, so an area's address at a peer is the peer's base plus one offset. It
consists of two equal halves; an operation of epoch e uses half e % 2. Its memory must be zero before the first use.
On an NPU the bases come from the communicator's windows, whose size HCCL_BUFFSIZE (MB) sets; on a CPU they are mappings
of one shared file per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernels.notify import FLAG_LANES, HEADER

# Areas start at multiples of what one copy between devices moves best.
AREA_ALIGNMENT = 512
MAX_EXPERTS = 512
MAX_TOPK = 16
MAX_HIDDEN = 8192
MAX_RANKS = 384


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` (and 1)."""
    return 1 << max(0, value - 1).bit_length()


@dataclass(frozen=True)
class WindowLayout:
    """Sizes that all ranks agree on, and the offsets that follow.

    world, experts, topk, hidden, element_bytes: of the largest call (element_bytes of unquantised rows).
    tokens: most tokens a rank sends at once. rows: most rows a rank receives at once, padding included.
    blocks: grid of the dispatch kernel, equal on all ranks: every block of every source has a flag.
    """

    world: int
    experts: int
    topk: int
    hidden: int
    element_bytes: int
    tokens: int
    rows: int
    blocks: int

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("world", self.world, 1, MAX_RANKS),
            ("experts", self.experts, 1, MAX_EXPERTS),
            ("topk", self.topk, 1, MAX_TOPK),
            ("hidden", self.hidden, 1, MAX_HIDDEN),
            ("element_bytes", self.element_bytes, 1, 4),
            ("tokens", self.tokens, 1, 1 << 20),
            ("rows", self.rows, 1, 1 << 24),
            ("blocks", self.blocks, 1, 512),
        ):
            if not low <= value <= high:
                raise LimitExceeded(f"window layout: {name} = {value}, allowed is {low} to {high}")

    def expert_range(self, rank: int) -> range:
        """Experts of a rank: contiguous, the first experts % world ranks own one more."""
        each, extra = divmod(self.experts, self.world)
        start = rank * each + min(rank, extra)
        return range(start, start + each + (rank < extra))

    def owner(self, expert: int) -> int:
        """The rank that owns an expert."""
        return next(rank for rank in range(self.world) if expert in self.expert_range(rank))

    @property
    def row_words(self) -> int:
        """int32 words of one rank's notify row."""
        return power_of_two(HEADER + self.experts)

    def _sizes(self) -> dict[str, int]:
        flag = FLAG_LANES * 4
        row = self.hidden * self.element_bytes
        return {
            "notify_rows": self.world * self.row_words * 4,
            "notify_flags": self.world * flag,
            "dispatch_meta": self.rows * flag,
            "dispatch_flags": self.world * self.blocks * flag,
            "combine_ready": self.world * flag,
            "combine_flags": self.tokens * self.topk * flag,
            "dispatch_rows": self.rows * row,
            "combine_slots": self.tokens * self.topk * row,
        }

    def offset(self, area: str, epoch: int) -> int:
        """Bytes from the start of the window to an area of this epoch's half."""
        position = epoch % 2 * self.half_bytes
        for name, size in self._sizes().items():
            if name == area:
                return position
            position += _aligned(size)
        raise KeyError(area)

    @property
    def half_bytes(self) -> int:
        return sum(_aligned(size) for size in self._sizes().values())

    @property
    def nbytes(self) -> int:
        """Bytes of the whole window."""
        return 2 * self.half_bytes

    def require(self, buffsize_mb: int) -> None:
        """Check that an HCCL window of HCCL_BUFFSIZE megabytes holds this layout. Raises LimitExceeded."""
        needed = -(-self.nbytes // (1 << 20))
        if needed > buffsize_mb:
            raise LimitExceeded(
                f"the window needs {needed} MB, HCCL_BUFFSIZE is {buffsize_mb}: set HCCL_BUFFSIZE={needed}"
            )


def _aligned(size: int) -> int:
    return -(-size // AREA_ALIGNMENT) * AREA_ALIGNMENT


class Window:
    """The own window and the addresses of all peers' windows.

    memory: int8 tensor of layout.nbytes bytes, the own window, zero before the first use on any rank.
    bases: address of each rank's window in this process (this device), the own one included.
    """

    def __init__(self, layout: WindowLayout, memory: torch.Tensor, bases: list[int]) -> None:
        if memory.dtype != torch.int8 or memory.numel() < layout.nbytes or not memory.is_contiguous():
            raise LimitExceeded(f"a window of {layout.nbytes} contiguous int8 is needed, given {memory.numel()}")
        if len(bases) != layout.world:
            raise LimitExceeded(f"{len(bases)} window addresses for {layout.world} ranks")
        self.layout = layout
        self.memory = memory
        self._bases = torch.tensor(bases, dtype=torch.int64)
        self._tables: dict[tuple[str, int], torch.Tensor] = {}

    def peers(self, area: str, epoch: int) -> torch.Tensor:
        """[world] int64 addresses of an area in every window, on the window's device."""
        key = (area, epoch % 2)
        if key not in self._tables:
            self._tables[key] = (self._bases + self.layout.offset(area, epoch)).to(self.memory.device)
        return self._tables[key]

    def own(self, area: str, epoch: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A view of the start of an own area."""
        start = self.layout.offset(area, epoch)
        elements = 1
        for size in shape:
            elements *= size
        nbytes = elements * dtype.itemsize
        return self.memory[start : start + nbytes].view(dtype).view(*shape)
