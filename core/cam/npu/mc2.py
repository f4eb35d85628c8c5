"""MC2: torch_npu's fused dispatch and combine for batches of decode size. Not run on hardware.

Both are one launch each and exchange rows through the windows of an HCCL communicator, which must be used by nothing
else. Expert layout; every slot of topk_idx must be selected, since the kernels know no -1 when ranks' batches differ.
The kernels keep the routing to themselves (assist_info), so recv.source is empty and recv.topk_weights is None.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cam.errors import ConfigError, InputError
from cam.npu.soc import Soc

DEFAULT_BUFFSIZE_MB = 200
_QUANT_MODE = {None: 0, "int8": 2}
_WAY_OUT = "use Buffer(max_tokens=None) for the all-to-all path"


@dataclass(frozen=True)
class Mc2:
    """The fixed part of all calls on one communicator.

    group_name: of the HCCL communicator (hccl_group_name). max_tokens: the most any rank sends at once; every rank
    gives the same. quant: None or "int8".
    """

    soc: Soc
    group_name: str
    rank: int
    world: int
    num_experts: int
    max_tokens: int
    quant: str | None

    @property
    def local_experts(self) -> int:
        return self.num_experts // self.world

    def check(self, tokens: int, topk: int, hidden: int, dtype: torch.dtype, environment: Mapping[str, str]) -> None:
        """Compares a call with the chip's limits and the communicator's windows. Raises InputError, ConfigError."""
        chip = self.soc
        for name, value, low, high, knob in (
            ("tokens", tokens, 1, self.max_tokens, "Buffer(max_tokens); a rank without tokens sends a dummy"),
            ("max_tokens", self.max_tokens, 1, chip.max_tokens, _WAY_OUT),
            ("topk", topk, 1, min(chip.max_topk, self.num_experts), _WAY_OUT),
            ("hidden", hidden, chip.min_hidden, chip.max_hidden, _WAY_OUT),
            ("num_experts", self.num_experts, 1, chip.max_experts, _WAY_OUT),
            ("ranks", self.world, 2, chip.max_ranks, _WAY_OUT),
        ):
            if not low <= value <= high:
                raise InputError(f"MC2 on {chip.name}: {name} = {value}, allowed is {low} to {high} (knob: {knob})")
        if hidden % chip.hidden_multiple:
            raise InputError(
                f"MC2 on {chip.name}: hidden = {hidden} is no multiple of {chip.hidden_multiple}; {_WAY_OUT}"
            )
        if dtype not in (torch.bfloat16, torch.float16):
            raise InputError(f"MC2 on {chip.name}: rows are {dtype}, allowed are bfloat16 and float16; {_WAY_OUT}")
        needed, given = self.buffsize_mb(topk, hidden), configured_buffsize_mb(environment)
        if needed > given:
            raise ConfigError(
                f"MC2 needs windows of {needed} MB for {self.max_tokens} tokens of {hidden}: HCCL_BUFFSIZE is {given}. "
                f"Set HCCL_BUFFSIZE={needed} before the process group is made"
            )

    def buffsize_mb(self, topk: int, hidden: int) -> int:
        """HCCL_BUFFSIZE that the vendor asks for: per communicator, in MB."""
        experts, tokens, world = self.local_experts, self.max_tokens, self.world
        if self.soc.generation == "A2":
            needed = 2 * (tokens * world * min(experts, topk) * hidden * 2 + (2 << 20))
        elif self.soc.generation == "A3":
            row = _aligned(_aligned(2 * hidden, 32) + 64, 512)
            needed = 2 * (experts * tokens * world * row + (topk + 1) * tokens * _aligned(2 * hidden, 512))
        else:
            row = _aligned(2 * _aligned(hidden, 32), 512)
            needed = self.soc.vector_cores * 512 + 2 * world * (tokens * row * experts + 512)
        return max(2, -(-needed // (1 << 20)))

    def dispatch(self, x: Tensor, expert_ids: Tensor) -> tuple[Tensor, ...]:
        """npu_moe_distribute_dispatch_v2: x [T, H], expert_ids int32 [T, K] ->

        expand_x [A, H], dynamic_scales, assist_info, expert_token_nums int64 [E_local], ep_recv_counts int32 running
        sum by expert and source, tp_recv_counts, expand_scales. A is the most that may come.
        """
        result: tuple[Tensor, ...] = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            x,
            expert_ids,
            self.group_name,
            self.world,
            self.rank,
            self.num_experts,
            quant_mode=_QUANT_MODE[self.quant],
            expert_token_nums_type=1,
            **self._common(),
        )
        return result

    def combine(
        self, rows: Tensor, expert_ids: Tensor, weights: Tensor, assist_info: Tensor, ep_recv_counts: Tensor
    ) -> Tensor:
        """npu_moe_distribute_combine_v2: rows [A, H], weights fp32 [T, K] -> [T, H]."""
        result: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
            rows,
            expert_ids,
            assist_info,
            ep_recv_counts,
            weights,
            self.group_name,
            self.world,
            self.rank,
            self.num_experts,
            **self._common(),
        )
        return result

    def _common(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "expert_shard_type": 0,
            "shared_expert_rank_num": 0,
            # Not 0, which would mean equal batches and need a mask.
            "global_bs": self.max_tokens * self.world,
        }
        if self.soc.generation != "A2":
            # A tensor-parallel group of one, which these chips want to be named.
            arguments |= {"group_tp": self.group_name, "tp_world_size": 1, "tp_rank_id": 0}
        return arguments


def fits(chip: Soc, num_experts: int, world: int, max_tokens: int | None, quant: str | None) -> str:
    """Why MC2 cannot serve a buffer; "" when it can. The same answer on every rank: nothing here is local."""
    if max_tokens is None:
        return "max_tokens is not given, so batches may be of any size"
    if max_tokens > chip.max_tokens:
        return f"max_tokens = {max_tokens} is more than {chip.name}'s {chip.max_tokens}"
    if world < 2 or num_experts % world:
        return f"{num_experts} experts are not spread evenly over {world} ranks, or there is only one"
    if num_experts > chip.max_experts or world > chip.max_ranks:
        return f"{num_experts} experts on {world} ranks exceed {chip.name}'s {chip.max_experts} on {chip.max_ranks}"
    return "" if quant in _QUANT_MODE else f"MC2 has no {quant}"


def hccl_group_name(process_group: Any, rank: int) -> str:
    """The name that the kernels know a communicator by. Not kept: a group that is made anew has another."""
    name: str = process_group._get_backend(torch.device("npu")).get_hccl_comm_name(rank)
    return name


def configured_buffsize_mb(environment: Mapping[str, str] = os.environ) -> int:
    """HCCL_BUFFSIZE in MB, or HCCL's default. Raises ConfigError."""
    text = environment.get("HCCL_BUFFSIZE", str(DEFAULT_BUFFSIZE_MB))
    if not text.strip().isdigit() or int(text) < 1:
        raise ConfigError(f"HCCL_BUFFSIZE is {text!r}, needed is a number of megabytes, 1 or more")
    return int(text)


def _aligned(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
