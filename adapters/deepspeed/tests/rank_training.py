"""What the ranks of test_training.py do: a few steps of a small model on one backend of torch.distributed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from adapters.deepspeed.tests.world import deepspeed_world
from tests.launcher import RankEnv

HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """moe: the middle layer is deepspeed.moe.layer.MoE, with DeepSpeed's own dispatch. backend None: the default."""

    backend: str | None
    stage: int = 0
    dtype: torch.dtype = torch.float32
    moe: bool = False
    steps: int = 4


class Model(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.middle: nn.Module = nn.Linear(HIDDEN, HIDDEN)
        if moe:
            from deepspeed.moe.layer import MoE

            self.middle = MoE(
                HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=4, ep_size=2, k=2, drop_tokens=False,
                top2_2nd_expert_sampling=False,
            )  # fmt: skip

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        middle, l_aux = torch.tanh(self.first(x)), 0.0
        middle = self.middle(middle)
        if isinstance(middle, tuple):
            middle, l_aux, _ = middle
        return nn.functional.mse_loss(self.last(middle), y) + 0.01 * l_aux


def train(env: RankEnv, folder: str, case: Case) -> dict[str, Any]:
    """The loss of every step, what the backend was, and the parameters in the end as the engine holds them."""
    with deepspeed_world(env, folder, case.backend):
        import deepspeed

        torch.manual_seed(3)
        model = Model(case.moe)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": case.stage},
            "bf16": {"enabled": case.dtype == torch.bfloat16},
            "gradient_clipping": 1.0,
        }
        parameters: Any = model.parameters()
        if case.moe:
            from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

            parameters = split({"params": list(model.parameters()), "name": "all"})
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        generator = torch.Generator().manual_seed(100 + env.rank)
        losses = []
        for _ in range(case.steps):
            x, y = (torch.randn(8, HIDDEN, generator=generator).to(case.dtype) for _ in range(2))
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=case.stage == 3):
            parameters = {name: each.detach().float().clone() for name, each in engine.module.named_parameters()}
        return {"losses": losses, "backend": dist.get_backend(), "parameters": parameters}


def train_by_default(env: RankEnv, folder: str, case: Case) -> dict[str, Any]:
    """train() after the one call that makes cam the default; the default is restored."""
    from deepspeed.accelerator import get_accelerator

    import cam_deepspeed

    before = get_accelerator().communication_backend_name()
    cam_deepspeed.use_cam()
    try:
        return train(env, folder, case)
    finally:
        get_accelerator()._communication_backend_name = before
