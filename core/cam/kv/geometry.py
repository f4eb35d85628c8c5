"""How one engine's KV cache lies in memory: shapes, strides and heads, never a transport.

A layer's cache has up to five dimensions, one letter each: b block, p plane (K and V), h head, t token in the
block, d channel. Geometry keeps sizes and strides of each in bytes, so every layout (NHD, HND, planes outside
or inside a block) is the same kind of thing, and two layouts meet without either of them knowing the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cam.errors import InputError

DIMENSIONS = "bphtd"

#: What a peer may announce. A description is data from outside: sizes beyond these are refused, not believed.
MAX_LAYERS = 4096
MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class Heads:
    """The KV heads of one layer that a tensor-parallel rank holds: `count` of `total`, from `first` on.

    As vLLM deals them: with at least as many heads as ranks each rank has total / ranks of them in a row;
    with fewer, each head lives on ranks / total ranks in a row (grouped-query attention).
    """

    first: int
    count: int
    total: int

    @classmethod
    def of_rank(cls, total: int, rank: int, size: int) -> "Heads":
        """Raises InputError where heads and ranks do not divide."""
        if size < 1 or not 0 <= rank < size:
            raise InputError(f"tp_rank must be in 0..tp_size-1, got rank {rank} of {size}")
        if total < 1 or (total % size and size % total):
            raise InputError(f"{total} KV heads cannot be dealt to {size} ranks: one must divide the other")
        if total >= size:
            count = total // size
            return cls(rank * count, count, total)
        return cls(rank * total // size, 1, total)

    @property
    def end(self) -> int:
        return self.first + self.count

    def __contains__(self, head: int) -> bool:
        return self.first <= head < self.end


@dataclass(frozen=True)
class Geometry:
    """One layer's cache. Sizes count elements of a dimension, strides are bytes from one to the next.

    blocks, planes, tokens: how many blocks, planes (2: K and V; 1: they share a plane or there is only one),
    tokens per block. channel_bytes: bytes of one (token, head, plane), contiguous. opaque: within one
    (block, head) the bytes have no order by token, so only whole blocks move.
    """

    heads: Heads
    blocks: int
    planes: int
    tokens: int
    channel_bytes: int
    dtype: str
    block_stride: int
    plane_stride: int
    head_stride: int
    token_stride: int
    opaque: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "planes", "tokens", "channel_bytes"):
            value = getattr(self, name)
            if not 0 < value <= MAX_SIZE:
                raise InputError(f"{name} must be in 1..{MAX_SIZE}, got {value}")
        for name in ("block_stride", "plane_stride", "head_stride", "token_stride"):
            value = getattr(self, name)
            if not 0 <= value <= MAX_SIZE:
                raise InputError(f"{name} must be in 0..{MAX_SIZE} bytes, got {value}")
        if not (self.heads.first >= 0 and self.heads.count > 0 and self.heads.end <= self.heads.total <= MAX_SIZE):
            raise InputError(f"heads {self.heads.first}..{self.heads.end - 1} of {self.heads.total} do not exist")
        if self.opaque and (self.planes != 1 or (self.tokens > 1 and self.token_stride != self.channel_bytes)):
            raise InputError(
                "an opaque layer has its planes inside the channels and its tokens one behind the other, got "
                f"{self.planes} planes and {self.token_stride} bytes from token to token of {self.channel_bytes} bytes"
            )

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last one."""
        return (
            (self.blocks - 1) * self.block_stride
            + (self.planes - 1) * self.plane_stride
            + (self.heads.count - 1) * self.head_stride
            + (self.tokens - 1) * self.token_stride
            + self.channel_bytes
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, in all planes."""
        return self.planes * self.heads.count * self.tokens * self.channel_bytes


@dataclass(frozen=True)
class Layer:
    """One layer's cache, as its owner has it.

    name: layers of two engines are paired by name. tensor: any strides; channels contiguous. dims: one letter
    for each dimension of the tensor, of b block, p plane, h head, t token, d channel (b, t and d needed):
    FlashAttention's NHD [2, B, T, H, D] is "pbthd", HND [B, 2, H, T, D] "bphtd", MLA [B, T, D] "btd", vLLM on a
    CPU [B, H, T, 2 * D] "bhtd" and opaque. total_heads: KV heads of the whole model in this layer; None: heads
    here times tensor-parallel ranks.
    """

    name: str
    tensor: torch.Tensor
    dims: str
    total_heads: int | None = None
    opaque: bool = False

    def geometry(self, tp_rank: int, tp_size: int) -> Geometry:
        """Raises InputError that names the layer."""
        try:
            return self._geometry(tp_rank, tp_size)
        except InputError as error:
            raise InputError(f"layer {self.name!r}: {error}") from None

    def _geometry(self, tp_rank: int, tp_size: int) -> Geometry:
        tensor, dims = self.tensor, self.dims
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InputError(f"the cache must be a strided CPU tensor, got {tensor.layout} on {tensor.device}")
        if len(set(dims)) != len(dims) or not set("btd") <= set(dims) <= set(DIMENSIONS):
            raise InputError(f"dims must use letters of {DIMENSIONS!r} once each, b, t and d among them; got {dims!r}")
        if len(dims) != tensor.dim():
            raise InputError(f"dims {dims!r} name {len(dims)} dimensions, the tensor has {list(tensor.shape)}")
        if 0 in tensor.shape:
            raise InputError(f"the cache is empty: {list(tensor.shape)}")
        element = tensor.element_size()
        size = dict(zip(dims, tensor.shape, strict=True))
        stride = {dim: step * element for dim, step in zip(dims, tensor.stride(), strict=True)}
        if stride["d"] != element and size["d"] > 1:
            raise InputError(f"channels must be contiguous, got strides {list(tensor.stride())} for dims {dims!r}")
        count = size.get("h", 1)
        total = count * tp_size if self.total_heads is None else self.total_heads
        heads = Heads.of_rank(total, tp_rank, tp_size)
        if heads.count != count:
            raise InputError(
                f"rank {tp_rank} of {tp_size} should hold {heads.count} of {total} KV heads, the tensor holds {count} "
                "(total_heads says how many the whole model has)"
            )
        return Geometry(
            heads=heads,
            blocks=size["b"],
            planes=size.get("p", 1),
            tokens=size["t"],
            channel_bytes=size["d"] * element,
            dtype=str(tensor.dtype).removeprefix("torch."),
            block_stride=stride["b"],
            plane_stride=stride.get("p", 0),
            head_stride=stride.get("h", 0),
            token_stride=stride["t"],
            opaque=self.opaque,
        )


def disagreement(mine: Geometry, theirs: Geometry) -> tuple[str, str, str] | None:
    """What keeps two layers from exchanging blocks, as (field, mine, theirs); None when nothing does."""
    fields: Sequence[tuple[str, object, object]] = (
        ("dtype", mine.dtype, theirs.dtype),
        ("bytes of a head", mine.channel_bytes, theirs.channel_bytes),
        ("planes", mine.planes, theirs.planes),
        ("total_heads", mine.heads.total, theirs.heads.total),
        ("opaque", mine.opaque, theirs.opaque),
    )
    for name, ours, other in fields:
        if ours != other:
            return name, str(ours), str(other)
    if mine.opaque and mine.tokens != theirs.tokens:
        return "block size (of an opaque layout)", str(mine.tokens), str(theirs.tokens)
    return None
