"""What blocks mean, in plain loops: the truth that plans and transfers are compared with.

A model's cache is a function: value(layer, request token, plane, head, channel). A pool of any geometry is filled from
it, and read back into it, one element at a time as far as the layout goes.
"""

from dataclasses import dataclass

import torch

from cam.kv import Heads, Layer

#: dims, opaque
LAYOUTS = {
    "pbthd": False,
    "bpthd": False,
    "bphtd": False,
    "pbhtd": False,
    "bthpd": False,
    "bhtd": True,
    "btd": False,
}


@dataclass(frozen=True)
class Shape:
    """One rank's cache of one model. channels: of a head; dims "bhtd" keeps K and V in them, "btd" is MLA."""

    dims: str
    blocks: int
    tokens: int
    total_heads: int
    tp_rank: int = 0
    tp_size: int = 1
    channels: int = 8
    dtype: torch.dtype = torch.float32

    @property
    def heads(self) -> Heads:
        return Heads.of_rank(self.total_heads, self.tp_rank, self.tp_size)

    def sizes(self) -> tuple[int, ...]:
        size = {"b": self.blocks, "p": 2, "h": self.heads.count, "t": self.tokens, "d": self.channels}
        return tuple(size[dim] for dim in self.dims)

    def layer(self, name: str, tensor: torch.Tensor) -> Layer:
        total = self.total_heads if "h" in self.dims else 1
        return Layer(name, tensor, self.dims, total_heads=total, opaque=LAYOUTS[self.dims])

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The pool as [block, plane, head, token, channel]."""
        for dim in "bphtd":
            if dim not in self.dims:
                tensor = tensor.unsqueeze(-1)
        order = [*self.dims, *(dim for dim in "bphtd" if dim not in self.dims)]
        return tensor.permute([order.index(dim) for dim in "bphtd"])


def model(tokens: int, total_heads: int, channels: int, planes: int, layer: int = 0) -> torch.Tensor:
    """[token, plane, head, channel], all different, exactly representable in float16."""
    count = tokens * planes * total_heads * channels
    generator = torch.Generator().manual_seed(layer)
    values = torch.randint(-2000, 2000, (count,), generator=generator).float()
    return values.view(tokens, planes, total_heads, channels)


def fill(shape: Shape, tensor: torch.Tensor, blocks: list[int], truth: torch.Tensor) -> None:
    """Writes the model's tokens into the pool, from the first block's first token on."""
    view = shape.view(tensor)
    heads = slice(shape.heads.first, shape.heads.end)
    for token in range(len(truth)):
        block, at = blocks[token // shape.tokens], token % shape.tokens
        view[block, :, :, at] = truth[token, :, heads].to(tensor.dtype)


def content(shape: Shape, tensor: torch.Tensor, blocks: list[int], tokens: range) -> torch.Tensor:
    """[token, plane, head here, channel] of some of the tokens in these blocks."""
    view = shape.view(tensor)
    return torch.stack([view[blocks[t // shape.tokens], :, :, t % shape.tokens] for t in tokens]).float()
