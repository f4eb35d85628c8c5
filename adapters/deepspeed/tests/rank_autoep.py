"""What the ranks of test_autoep.py do: a model that AutoEP converts, once through DeepSpeed's engine."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from adapters.deepspeed.tests.world import deepspeed_world
from tests.launcher import RankEnv

HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 16, 24, 4, 2


@dataclass(frozen=True)
class Case:
    """comm_backend of the section expert_parallel, and what else stands there. tokens: of each rank."""

    comm_backend: str = "cam"
    ep_size: int = 2
    tokens: tuple[int, ...] = (12, 7)
    dtype: torch.dtype = torch.float32
    autoep: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INTERMEDIATE))


class Block(nn.Module):
    """A mixture of experts with the names that AutoEP knows from Mixtral."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("AutoEP replaces this block")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            model_type="mixtral",
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
        )
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([self._layer() for _ in range(2)])

    @staticmethod
    def _layer() -> nn.Module:
        layer = nn.Module()
        layer.dense = nn.Linear(HIDDEN, HIDDEN)
        layer.mlp = Block()
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.model.layers:
            x = x + layer.mlp(functional.silu(layer.dense(x)))
        return x


def engine_of(case: Case) -> Any:
    import deepspeed

    model = Model()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    autoep = {"enabled": True, "autoep_size": case.ep_size, "preset_model": "mixtral", "use_grouped_mm": False}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": case.dtype == torch.bfloat16},
        "expert_parallel": autoep | {"comm_backend": case.comm_backend} | case.autoep,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config | case.config)
    return engine


def train_once(env: RankEnv, folder: str, case: Case) -> dict[str, Any]:
    """One forward and backward: out, loss, x_grad, and the engine's gradients with the first expert they are of."""
    with deepspeed_world(env, folder):
        from deepspeed.utils import safe_get_full_grad

        from cam_deepspeed.autoep import CamAutoEPMoELayer

        engine = engine_of(case)
        layers = [layer.mlp for layer in engine.module.model.layers]
        if all(isinstance(layer, CamAutoEPMoELayer) for layer in layers) is not (case.comm_backend == "cam"):
            raise AssertionError(f"the layers are {[type(layer).__name__ for layer in layers]}")
        generator = torch.Generator().manual_seed(100 + env.rank)
        x = torch.randn(1, case.tokens[env.rank], HIDDEN, generator=generator).to(case.dtype).requires_grad_()
        out = engine(x)
        loss = out.float().square().sum() / 10
        engine.backward(loss)
        gradients = {}
        for name, parameter in engine.module.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else safe_get_full_grad(parameter)
            if gradient is None:
                raise AssertionError(f"{name} has no gradient")
            first = layers[0].ep_rank * layers[0].num_local_experts if ".experts." in name else 0
            gradients[name] = (first, gradient.detach().float().clone())
        return {"out": out.detach().clone(), "loss": loss.item(), "x_grad": x.grad.clone(), "grads": gradients}


def refusal(env: RankEnv, folder: str, case: Case) -> str:
    """The error of deepspeed.initialize, as text."""
    with deepspeed_world(env, folder):
        try:
            engine_of(case)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def too_many_tokens(env: RankEnv, folder: str, case: Case) -> str:
    with deepspeed_world(env, folder):
        engine = engine_of(case)
        try:
            engine(torch.zeros(1, case.tokens[env.rank], HIDDEN))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""
