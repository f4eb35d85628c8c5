"""The work of one rank: tokens, the experts each goes to, and their weights, reproducible by seed."""

from dataclasses import dataclass

import torch

from cam.bench.plan import Case


@dataclass(frozen=True)
class Work:
    """x: [T, H]. topk_idx: [T, K] int64, distinct within a row. topk_weights: [T, K] float32, each row sums
    to 1.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def make_work(case: Case, rank: int) -> Work:
    generator = torch.Generator().manual_seed(10_007 * rank + case.tokens)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(getattr(torch, case.dtype))
    # Gumbel noise + log probability: its top k is a draw of k distinct experts by their probabilities.
    uniform = torch.rand(case.tokens, case.experts, generator=generator).clamp_(1e-9, 1 - 1e-9)
    scores = popularity(case).log() - (-uniform.log()).log()
    topk_idx = scores.topk(case.topk, dim=1).indices.contiguous()
    weights = torch.rand(case.tokens, case.topk, generator=generator) + 0.1
    return Work(x, topk_idx, (weights / weights.sum(1, keepdim=True)).contiguous())


def popularity(case: Case) -> torch.Tensor:
    """[E] probabilities. zipf: 1 / place, the places dealt to experts at random but alike on every rank."""
    if case.routing == "uniform":
        return torch.full((case.experts,), 1.0 / case.experts)
    place = torch.randperm(case.experts, generator=torch.Generator().manual_seed(1)) + 1
    weights = 1.0 / place
    return weights / weights.sum()
