"""What the paths take and give. Not run on hardware."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routes:
    """experts [T, K] int, -1 = not selected, masks applied. weights [T, K] fp32 or None."""

    experts: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class Rows:
    """Fields of cam.ep.Received in the expert layout. source is [0, 3] where a path does not tell."""

    x: Tensor
    scales: Tensor | None
    expert_counts: Tensor
    source_counts: Tensor
    source: Tensor
    topk_weights: Tensor | None
