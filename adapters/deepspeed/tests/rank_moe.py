"""What the ranks of test_moe.py do: one deepspeed.moe.layer.MoE, once through DeepSpeed's engine."""

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adapters.deepspeed.tests.world import deepspeed_world
from tests.launcher import RankEnv

HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """cam: dispatch with CAM, else DeepSpeed's own layer. tokens: of each rank. moe: arguments of MoE."""

    cam: bool = True
    backend: str = "gloo"
    ep_size: int = 2
    experts: int = 4
    k: int = 2
    drop_tokens: bool = False
    tokens: tuple[int, ...] = (24, 17)
    dtype: torch.dtype = torch.float32
    #: Whether almost every token's first choice is expert 0.
    favourite: bool = False
    tp_size: int = 1
    #: Every third token is a filler that no expert should get (used_token).
    fillers: bool = False
    #: Activation checkpointing around the MoE: "", "reentrant" or "non-reentrant".
    checkpoint: str = ""
    moe: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


class Expert(nn.Module):
    """Two layers with biases: what an expert makes of a row of zeros is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """A dense layer, so that the gradient of the MoE's input counts, and the MoE."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.checkpoint = case.checkpoint
        self.dense = nn.Linear(HIDDEN, HIDDEN)
        arguments: dict[str, Any] = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0}
        self.moe = MoE(
            HIDDEN,
            Expert(),
            num_experts=case.experts,
            ep_size=case.ep_size,
            k=case.k,
            drop_tokens=case.drop_tokens,
            **(arguments | case.moe),
        )

    def forward(self, x: torch.Tensor, used: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        x = self.dense(x)
        if self.checkpoint:
            return checkpoint(self.moe, x, used, use_reentrant=self.checkpoint == "reentrant")  # type: ignore[no-any-return]
        return self.moe(x, used)  # type: ignore[no-any-return]


def engine_of(case: Case, rank: int, mpu: Any = None) -> Any:
    """The engine over a model whose parameters depend on their (global) names only."""
    import deepspeed

    model = Model(case)
    # DeepSpeed counts expert-parallel ranks over tensor-parallel ones, unless experts are tensor-parallel themselves.
    apart = case.tp_size if case.moe.get("enable_expert_tensor_parallelism") else 1
    first = rank // apart % case.ep_size * (case.experts // case.ep_size)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(sum(map(ord, global_name(name, first))))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        if case.favourite:
            model.dense.bias += 2
            model.moe.deepspeed_moe.gate.wg.weight[0] += 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "bf16": {"enabled": case.dtype == torch.bfloat16},
    }
    if case.cam:
        config["cam"] = {"moe": True}
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    groups = split({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config | case.config, mpu=mpu)
    return engine


def global_name(name: str, first: int) -> str:
    """Experts are numbered on each rank; this is their name in the whole model."""
    before, found, after = name.partition("deepspeed_experts.")
    if not found:
        return name
    local, _, rest = after.partition(".")
    return f"{before}{found}{int(local) + first}.{rest}"


def inputs(case: Case, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank // case.tp_size)
    return torch.randn(1, case.tokens[rank], HIDDEN, generator=generator).to(case.dtype)


def train_once(env: RankEnv, folder: str, case: Case) -> dict[str, Any]:
    """One forward and backward. Results of this rank; gradients as the engine has reduced them, by global name."""
    with deepspeed_world(env, folder, case.backend), _gathering_flat(not case.cam and case.tp_size > 1):
        return _train_once(env, case)


@contextlib.contextmanager
def _gathering_flat(wanted: bool) -> Iterator[None]:
    """DeepSpeed's own layer gathers tokens into a flat buffer, which NCCL takes and Gloo refuses."""
    import deepspeed.comm as dist

    original = dist.all_gather_into_tensor
    if wanted:
        dist.all_gather_into_tensor = lambda whole, part, group: original(whole, part.flatten(), group=group)
    try:
        yield
    finally:
        dist.all_gather_into_tensor = original


def _train_once(env: RankEnv, case: Case) -> dict[str, Any]:
    from cam_deepspeed.moe import CamMOELayer

    mpu = Mpu(env.rank, env.world_size, case.tp_size) if case.tp_size > 1 else None
    engine = engine_of(case, env.rank, mpu)
    layer = engine.module.moe.deepspeed_moe
    if isinstance(layer, CamMOELayer) is not case.cam:
        raise AssertionError(f"the layer is a {type(layer).__name__}")
    x = inputs(case, env.rank).requires_grad_()
    used = (torch.arange(x.shape[1]) % 3 != 0).long() if case.fillers else None
    out, l_aux, counts = engine(x, used)
    # A sum over tokens, not a mean: ranks have different numbers of them, and one may have none.
    loss = out.float().square().sum() / 10 + l_aux
    engine.backward(loss)
    first = dist_rank(layer) * layer.num_local_experts
    return {
        "out": out.detach().clone(),
        "loss": loss.item(),
        "l_aux": l_aux.item(),
        "exp_counts": counts.clone(),
        "x_grad": x.grad.clone(),
        "seconds": (layer.time_moe, layer.time_falltoall, layer.time_salltoall),
        "grads": {global_name(name, first): _gradient(each) for name, each in engine.module.named_parameters()},
    }


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    from deepspeed.utils import safe_get_full_grad

    gradient = parameter.grad if parameter.grad is not None else safe_get_full_grad(parameter)
    if gradient is None:
        raise AssertionError("a parameter without gradient")
    return gradient.detach().float().clone()


def dist_rank(layer: Any) -> int:
    import deepspeed.comm as dist

    return int(dist.get_rank(group=layer.ep_group))


class Mpu:
    """Tensor-parallel ranks side by side, the data-parallel ones apart: what Megatron gives DeepSpeed."""

    def __init__(self, rank: int, world: int, size: int) -> None:
        import deepspeed.comm as dist

        self._rank, self._world, self._size = rank, world, size
        for start in range(0, world, size):
            ranks = list(range(start, start + size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self._tensor = group
        for start in range(size):
            ranks = list(range(start, world, size))
            group = dist.new_group(ranks)
            if rank in ranks:
                self._data = group

    def get_model_parallel_rank(self) -> int:
        return self._rank % self._size

    def get_model_parallel_world_size(self) -> int:
        return self._size

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_data_parallel_rank(self) -> int:
        return self._rank // self._size

    def get_data_parallel_world_size(self) -> int:
        return self._world // self._size

    def get_data_parallel_group(self) -> Any:
        return self._data


def infer(env: RankEnv, folder: str, case: Case, calls: list[int]) -> list[torch.Tensor]:
    """calls[rank] forward passes without gradients, of this rank's own accord."""
    with deepspeed_world(env, folder, case.backend):
        engine = engine_of(case, env.rank)
        engine.eval()
        with torch.no_grad():
            return [engine(inputs(case, env.rank))[0] for _ in range(calls[env.rank])]


def refusal(env: RankEnv, folder: str, case: Case) -> str:
    """The error of deepspeed.initialize, as text."""
    with deepspeed_world(env, folder, case.backend):
        try:
            engine_of(case, env.rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def refusals(env: RankEnv, folder: str) -> dict[str, str]:
    """What convert_moe and the configuration say to layers that cannot be converted."""
    import deepspeed
    from deepspeed.moe.sharded_moe import MOELayer

    from cam_deepspeed import convert_moe

    class Derived(MOELayer):  # type: ignore[misc]
        pass

    def said(call: Any) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with deepspeed_world(env, folder):
        case = Case(ep_size=1, tokens=(4,))
        tutel, derived = Model(case), Model(case)
        tutel.moe.deepspeed_moe.use_tutel = True
        derived.moe.deepspeed_moe.__class__ = Derived
        elsewhere = Model(case).to("meta")
        engine = engine_of(replace(case, cam=False), env.rank)
        config = {"train_micro_batch_size_per_gpu": 1, "cam": {"moe": True}}
        dense = nn.Linear(HIDDEN, HIDDEN)
        return {
            "tutel": said(lambda: convert_moe(tutel)),
            "derived": said(lambda: convert_moe(derived)),
            "elsewhere": said(lambda: convert_moe(elsewhere)),
            "late": said(lambda: convert_moe(engine.module)),
            "without": said(lambda: deepspeed.initialize(model=dense, config=config)),
            "before": said(lambda: convert_and_call(Model(case))),
        }


def convert_and_call(model: Model) -> None:
    from cam_deepspeed import convert_moe

    convert_moe(model)
    model(torch.zeros(1, 4, HIDDEN))


def groups_left(env: RankEnv, folder: str, case: Case) -> tuple[list[str], list[str]]:
    """Names of CAM's groups of expert-parallel ranks that are open during a training step, and after it is all over.

    Without an engine: DeepSpeed never lets go of one, and of what it holds.
    """
    during = _train_without_engine(env, folder, case)
    gc.collect()
    return during, _open_groups()


def _train_without_engine(env: RankEnv, folder: str, case: Case) -> list[str]:
    from cam_deepspeed import convert_moe

    with deepspeed_world(env, folder, case.backend):
        model = Model(case)
        convert_moe(model)
        model.moe.set_deepspeed_parallelism()
        out, l_aux, _ = model(inputs(case, env.rank))
        (out.square().sum() + l_aux).backward()
        return _open_groups()


def _open_groups() -> list[str]:
    from cam import registry

    return [name for name, group in registry._groups.items() if name.startswith("deepspeed.") and group is not None]
