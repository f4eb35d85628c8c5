"""deepspeed.moe.layer.MoE with CAM's dispatch and combine.

DeepSpeed's layer fills a buffer [experts, capacity, hidden], mostly with padding, and sends all of it. Here each
token's row goes straight to its experts, so that only rows that were routed travel: without token dropping nothing is
padded to the fullest expert of any rank (nor is that agreed on), and with it the gate's decision who is dropped stands,
because dropping is the gate's work and it is asked as before. l_aux, exp_counts, k, noise, random token selection and
used_token are the gate's as well.

What differs, by intention: experts see no padding rows, which only matters to experts that mix rows (batch norm); ranks
may have different numbers of tokens, where DeepSpeed's all-to-all needs equal ones with dropping and with k = 1, or
none at all: l_aux is then 0, not NaN.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.moe.mappings import drop_tokens, gather_tokens
from deepspeed.moe.sharded_moe import FIRST_ALLTOALL_TIMER, MOE_TIMER, SECOND_ALLTOALL_TIMER, MOELayer
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn
from torch.nn import functional

import cam
from cam.errors import InputError
from cam_deepspeed.expert_group import ExpertGroup, expert_group

#: Where cam.ep.Buffer moves rows. NPUs: not run on hardware.
DEVICES = frozenset({"cpu", "npu"})


def convert_moe(model: nn.Module, group: Mapping[str, Any] | None = None) -> int:
    """Makes every MOELayer in `model` dispatch with CAM; returns how many. What "cam": {"moe": true} does.

    Call it before deepspeed.initialize: the layers join their CAM group when DeepSpeed gives them their expert-parallel
    group. group: fields of cam.Config. Parameters, state dict and isinstance stay what they are.

    Raises InputError, before anything is changed, where a layer cannot: Tutel, another device, already in its group.
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MOELayer)}
    for name, layer in layers.items():
        reason = _refusal(layer)
        if reason:
            raise InputError(f"MoE layer {name!r} cannot use cam: {reason}")
    for layer in layers.values():
        layer.__class__ = CamMOELayer
        layer._cam_fields = dict(group or {})
    return len(layers)


def _refusal(layer: MOELayer) -> str:
    if type(layer) not in (MOELayer, CamMOELayer):
        return f"{type(layer).__name__} is not DeepSpeed's MOELayer but derived from it"
    if layer.use_tutel:
        return "it dispatches with Tutel (use_tutel=True); set use_tutel=False"
    if layer.ep_group is not None:
        return "DeepSpeed has given it its expert-parallel group already; convert it before deepspeed.initialize"
    devices = {parameter.device.type for parameter in layer.parameters()}
    if devices - DEVICES:
        return f"its parameters are on {', '.join(sorted(devices))}; cam.ep moves rows on {', '.join(sorted(DEVICES))}"
    return ""


class CamMOELayer(MOELayer):  # type: ignore[misc]  # DeepSpeed has no types
    """A MOELayer whose rows travel with cam.ep. Made by convert_moe, which changes the class of an existing one."""

    _cam_fields: Mapping[str, Any]
    _joined: ExpertGroup
    _buffer: cam.ep.Buffer

    def _set_ep_group(self, ep_group: dist.ProcessGroup) -> None:
        # The gate wants the group for one thing: to agree on a capacity when no token may be dropped. Rows that are
        # placed one by one need none, so that gate keeps to itself and each step saves a collective.
        self.ep_group = ep_group
        if self.gate.drop_tokens:
            self.gate._set_ep_group(ep_group)
        self._joined = expert_group(ep_group, self._cam_fields)
        self._buffer = cam.ep.Buffer(self._joined.group, num_experts=self.ep_size * self.num_local_experts)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        """hidden_states: [..., H], any number of tokens; used_token: [tokens], 0 = the gate shall leave it out.

        Collective over the expert-parallel ranks. Sets l_aux (scalar) and exp_counts (int64 [E], this rank's choices
        before dropping). Returns hidden_states' shape.
        """
        if self.ep_group is None:
            raise InputError("this MoE layer has no expert-parallel group yet: call deepspeed.initialize first")
        with self._timed(MOE_TIMER, "time_moe"):
            x_TH = hidden_states.reshape(-1, hidden_states.shape[-1])
            idx_TK, weights_TK = self._route(x_TH, used_token)
            tensor_ranks = bwc_tensor_model_parallel_world_size(groups.mpu)
            # Tensor-parallel ranks hold the same tokens. Where their experts are whole, each rank sends its share of
            # them and all gather the results. Where the experts are split as well, every rank's share of an expert
            # must see every token, so each sends them all to its own peers and nothing is left to be gathered.
            share = tensor_ranks > 1 and groups._get_expert_model_parallel_world_size() == 1
            if share:
                x_TH, idx_TK, weights_TK = _share(x_TH, idx_TK, weights_TK, tensor_ranks)
            out_TH = self._exchange(x_TH, idx_TK, weights_TK)
            if share:
                # Flat, here and in _share: DeepSpeed gathers into a flat buffer, and Gloo wants both sides alike.
                out_TH = gather_tokens(out_TH.flatten(), dim=0).view(-1, out_TH.shape[1])
                out_TH = out_TH[: hidden_states.shape[:-1].numel()]
        return out_TH.reshape(hidden_states.shape)

    def _route(self, x_TH: Tensor, used_token: Tensor | None) -> tuple[Tensor, Tensor]:
        """The gate's decision: experts int32 [T, K], -1 = dropped, and weights float32 [T, K]."""
        if x_TH.shape[0]:
            self.l_aux, _, _, experts, _, weights, self.exp_counts = self.gate(x_TH, used_token, True, False)
            return experts.t().contiguous(), weights.t().float().contiguous()
        # The gate averages over tokens and would give NaN, and for k = 1 insists on min_capacity of them. Its weights
        # still belong to the graph: a rank without their gradient would leave its peers waiting in the reduction.
        probabilities = functional.linear(x_TH.float(), self.gate.wg.weight.float()).softmax(dim=1)
        self.l_aux = probabilities.sum()
        self.exp_counts = x_TH.new_zeros(probabilities.shape[1], dtype=torch.int64)
        weights_TK = probabilities[:, : self.gate.k]
        return x_TH.new_zeros(weights_TK.shape, dtype=torch.int32), weights_TK

    def _exchange(self, x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor) -> Tensor:
        with self._timed(FIRST_ALLTOALL_TIMER, "time_falltoall"):
            received, handle = self._buffer.dispatch(x_TH, idx_TK, weights_TK)
        y = self._run_experts(received.x, received.expert_counts_list)
        with self._timed(SECOND_ALLTOALL_TIMER, "time_salltoall"):
            return self._buffer.combine(y, handle)

    def _run_experts(self, rows_RH: Tensor, counts: list[int]) -> Tensor:
        """Each local expert on its rows, shaped [1, rows, H] because experts are written for three dimensions."""
        results = []
        for expert, rows in zip(self.experts.deepspeed_experts, torch.split(rows_RH, counts), strict=True):
            # Experts are the user's, and not all bear an empty batch: one row of zeros, whose result is dropped.
            some = rows if rows.shape[0] else functional.pad(rows, (0, 0, 0, 1))
            result = expert(some.unsqueeze(0))
            if isinstance(result, tuple):
                result = result[0]  # as DeepSpeed does: the second is a bias that it ignores
            results.append(result.reshape(some.shape[0], -1)[: rows.shape[0]])
        return torch.cat(results)

    @contextmanager
    def _timed(self, timer: str, attribute: str) -> Iterator[None]:
        """What the engine reads from the layer when wall_clock_breakdown is on."""
        if self.wall_clock_breakdown:
            self.timers(timer).start()
        yield
        if self.wall_clock_breakdown:
            self.timers(timer).stop()
            setattr(self, attribute, self.timers(timer).elapsed(reset=False))


def _share(x_TH: Tensor, idx_TK: Tensor, weights_TK: Tensor, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """This tensor-parallel rank's 1/ranks of the tokens; the last share is filled up with tokens that go nowhere."""
    missing = -x_TH.shape[0] % ranks

    def share(tensor: Tensor, filling: float) -> Tensor:
        whole = functional.pad(tensor, (0, 0, 0, missing), value=filling)
        own: Tensor = drop_tokens(whole.flatten(), dim=0).view(-1, tensor.shape[1])
        return own

    return share(x_TH, 0), share(idx_TK, -1), share(weights_TK, 0)
