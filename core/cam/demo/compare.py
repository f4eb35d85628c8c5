"""The spread model beside the whole one: what must be equal, and how equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cam.demo.moe import Shape

#: Largest difference that float32 sums in another order may leave, relative to the largest value compared.
LOSS_BOUND = 2e-6
GRADIENT_BOUND = 2e-5

GRADIENTS = ("input", "router", "gate_up", "down")


@dataclass(frozen=True)
class StepComparison:
    """One training step. Differences are relative to the largest value of the whole model's."""

    loss: float
    whole_loss: float
    out: float
    gradients: dict[str, float]

    @property
    def loss_difference(self) -> float:
        return abs(self.loss - self.whole_loss) / abs(self.whole_loss)

    @property
    def agrees(self) -> bool:
        return (
            self.loss_difference <= LOSS_BOUND
            and self.out <= GRADIENT_BOUND
            and all(difference <= GRADIENT_BOUND for difference in self.gradients.values())
        )


@dataclass(frozen=True)
class Check:
    """A statement that must hold. detail: what was found."""

    statement: str
    holds: bool
    detail: str


def compare_steps(ranks: Sequence[list[dict[str, Any]]], whole: list[dict[str, Any]]) -> list[StepComparison]:
    """ranks[r][s]: step s of rank r. Experts lie on ranks in order, so their gradients concatenate."""
    found = []
    for number, wanted in enumerate(whole):
        parts = [steps[number] for steps in ranks]
        joined = {name: torch.cat([part[name] for part in parts]) for name in ("out", "input", "gate_up", "down")}
        joined["router"] = parts[0]["router"]  # summed over ranks, the same on all
        found.append(
            StepComparison(
                loss=float(sum(part["loss"].double() for part in parts)),
                whole_loss=float(wanted["loss"]),
                out=difference(joined["out"], wanted["out"]),
                gradients={name: difference(joined[name], wanted[name]) for name in GRADIENTS},
            )
        )
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest value; infinite where shapes or finiteness differ."""
    if found.shape != wanted.shape or not bool(found.isfinite().all()):
        return float("inf")
    return float((found - wanted).abs().max() / wanted.abs().max())


def check_moved(ranks: Sequence[dict[str, torch.Tensor]], shape: Shape) -> list[Check]:
    """Tokens that came back untouched. See cam.demo.rank_part."""
    first_of = torch.tensor([_owner(expert, shape) for expert in range(shape.experts)])
    expert_equal = rank_equal = rows = 0
    worst = 0.0
    for moved in ranks:
        x, weights = moved["x"].float(), moved["weights"]
        total = torch.zeros_like(x)
        for k in range(shape.topk):
            total += weights[:, k, None] * x
        rows += len(x)
        expert_equal += _equal_rows(moved["expert"], total.bfloat16())
        owners = [len(set(first_of[row].tolist())) for row in moved["experts"]]
        times = torch.tensor(owners, dtype=torch.float32).view(-1, 1)
        rank_equal += _equal_rows(moved["rank"], (times * x).bfloat16())
        if len(x):
            error = (moved["int8"].float() - total).abs().mean() / total.abs().mean()
            worst = max(worst, float(error))
    return [
        Check(
            "bf16 tokens to their experts and back are bit-equal to the sum in one process",
            expert_equal == rows,
            f"{expert_equal} of {rows}",
        ),
        Check("the same with one copy per rank (rank layout)", rank_equal == rows, f"{rank_equal} of {rows}"),
        Check("int8 on the way costs at most 1 % mean relative error", 0 < worst <= 0.01, f"{worst:.2%}"),
    ]


def _equal_rows(found: torch.Tensor, wanted: torch.Tensor) -> int:
    return int((found == wanted).all(1).sum()) if found.shape == wanted.shape else 0


def _owner(expert: int, shape: Shape) -> int:
    least, more = divmod(shape.experts, shape.ranks)
    boundary = more * (least + 1)
    return expert // (least + 1) if expert < boundary else more + (expert - boundary) // least
