"""A mixture-of-experts layer, once spread over ranks with cam.ep, once in one process as the truth."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import cam


@dataclass(frozen=True)
class Shape:
    """tokens: per rank, different on purpose; the last rank has none. experts: not divisible by 4 ranks."""

    hidden: int = 256
    intermediate: int = 384
    experts: int = 10
    topk: int = 4
    tokens: tuple[int, ...] = (96, 64, 33, 0)
    steps: int = 6
    learning_rate: float = 10.0
    seed: int = 7

    @property
    def ranks(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Weights:
    """router: [E, H]. gate_up: [E, 2 * I, H]. down: [E, H, I]."""

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def make(cls, shape: Shape) -> "Weights":
        """The same on every rank."""
        generator = torch.Generator().manual_seed(shape.seed)

        def normal(*size: int) -> torch.Tensor:
            spread: float = size[-1] ** -0.5
            return torch.randn(*size, generator=generator) * spread

        return cls(
            normal(shape.experts, shape.hidden),
            normal(shape.experts, 2 * shape.intermediate, shape.hidden),
            normal(shape.experts, shape.hidden, shape.intermediate),
        )


def make_batch(shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' tokens one after another, and what the model shall turn them into: both [sum of T, H]."""
    generator = torch.Generator().manual_seed(shape.seed + 1)
    x = torch.randn(sum(shape.tokens), shape.hidden, generator=generator)
    return x, x.roll(1, dims=1) * 0.5


def choose(x: torch.Tensor, router: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> experts [T, K] int64 and their weights [T, K] float32, which sum to 1."""
    probabilities = functional.linear(x, router).softmax(-1)
    weights, experts = probabilities.topk(topk, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True)


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert: [R, H] -> [R, H]."""
    gate, up = functional.linear(rows, gate_up).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, down)


class SpreadMoE(nn.Module):
    """The layer on one rank: the whole router, and the experts that live here."""

    def __init__(self, shape: Shape, weights: Weights, buffer: cam.ep.Buffer) -> None:
        super().__init__()
        here = buffer.expert_range()
        self.router = nn.Parameter(weights.router.clone())
        self.gate_up = nn.Parameter(weights.gate_up[here.start : here.stop].clone())
        self.down = nn.Parameter(weights.down[here.start : here.stop].clone())
        self._topk, self._buffer = shape.topk, buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]. Collective: every rank calls it, also with no tokens."""
        experts, weights = choose(x, self.router, self._topk)
        received, handle = self._buffer.dispatch(x, experts, weights)
        # The rows of an expert lie together: one plain matmul each.
        rows = torch.split(received.x, received.expert_counts_list)
        done = [swiglu(part, *own) for part, *own in zip(rows, self.gate_up, self.down, strict=True)]
        return self._buffer.combine(torch.cat(done), handle)


class WholeMoE(nn.Module):
    """The layer in one process, in plain torch: no dispatch, no combine."""

    def __init__(self, shape: Shape, weights: Weights) -> None:
        super().__init__()
        self.router = nn.Parameter(weights.router.clone())
        self.gate_up = nn.Parameter(weights.gate_up.clone())
        self.down = nn.Parameter(weights.down.clone())
        self._topk, self._tokens = shape.topk, list(shape.tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[sum of T, H] -> the same."""
        # Rank by rank: a matmul of another height may add in another order, and a token whose choice of
        # experts is nearly a tie would then go elsewhere.
        chosen = [choose(part, self.router, self._topk) for part in torch.split(x, self._tokens)]
        experts, weights = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        places, results = [], []
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            place = (experts == expert).nonzero()
            places.append(place[:, 0] * self._topk + place[:, 1])
            results.append(swiglu(x[place[:, 0]], gate_up, down))
        rows = torch.cat(results)[torch.cat(places).argsort()].view(len(x), self._topk, -1)
        out = torch.zeros_like(x)
        for k in range(self._topk):
            out = out + weights[:, k, None] * rows[:, k]
        return out


def loss_of(out: torch.Tensor, target: torch.Tensor, shape: Shape) -> torch.Tensor:
    """This part's share of the mean squared error over all ranks' tokens: shares add up."""
    return (out - target).square().sum() / (sum(shape.tokens) * shape.hidden)
