"""AutoEP with "expert_parallel": {"comm_backend": "cam"}."""

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.module_inject.auto_ep_comm import DEEPEP_BACKEND
from deepspeed.module_inject.auto_ep_config import AutoEPConfig
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer, RouterOutput
from torch import Tensor, nn

import cam
from cam.errors import ConfigError
from cam_deepspeed.expert_group import ExpertGroup, expert_group

BACKEND = "cam"


def check_config(config: AutoEPConfig) -> None:
    """Refuses, with ConfigError, what cam's route would have to ignore."""
    defaults = AutoEPConfig()
    reasons = {
        "combine_impl": "cam's combine applies the weights and adds up in fp32 itself",
        "row_weighting_impl": "it is a kernel of the DeepEP route",
        "comm_num_sm": "cam has no SM budget; its threads are CAM_THREADS",
        "comm_qp_margin": "cam has no queue pairs",
        "async_split_plan": "cam exchanges no split plan",
    }
    for key, reason in reasons.items():
        value, default = getattr(config, key), getattr(defaults, key)
        if value != default and not (key == "combine_impl" and value == "weighted_sum"):
            raise ConfigError(
                f'expert_parallel.{key}={value!r} cannot be used with comm_backend="{BACKEND}": {reason}. Leave it out'
            )


def convert_autoep(model: nn.Module, group: Mapping[str, Any]) -> int:
    """Makes the AutoEP layers that are configured with comm_backend "cam" use it; returns how many.

    group: fields of cam.Config. Before DeepSpeed gives the layers their expert-parallel group.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, AutoEPMoELayer) and layer.comm_backend == BACKEND]
    for layer in layers:
        layer.__class__ = CamAutoEPMoELayer
        # AutoEP's forward has one place for a transport that multiplies tokens and adds rows up by itself, where it
        # calls _deepep_route; this name leads there.
        layer.comm_backend = DEEPEP_BACKEND
        layer._cam_fields = dict(group)
    return len(layers)


class CamAutoEPMoELayer(AutoEPMoELayer):  # type: ignore[misc]  # DeepSpeed has no types
    """An AutoEPMoELayer whose rows travel with cam.ep. Made by convert_autoep."""

    _cam_fields: Mapping[str, Any]
    _joined: ExpertGroup
    _buffer: cam.ep.Buffer

    def set_deepspeed_parallelism(
        self, use_data_before_expert_parallel_: bool = False, folding_group_handles: Any = None
    ) -> None:
        if folding_group_handles is not None and folding_group_handles.spec.tp_size > 1:
            raise ConfigError(
                f'comm_backend="{BACKEND}" does not support folded tensor parallelism (tensor_parallel.autotp_size='
                f"{folding_group_handles.spec.tp_size}), whose restore needs single assignments where combine returns "
                'sums. Set autotp_size to 1, or comm_backend to "comm"'
            )
        super().set_deepspeed_parallelism(use_data_before_expert_parallel_, folding_group_handles)
        if self.ep_size > 1:  # else AutoEP computes on the spot and sends nothing
            self._joined = expert_group(self.ep_group, self._cam_fields)
            self._buffer = cam.ep.Buffer(
                self._joined.group, self.num_experts, max_tokens=self.comm_max_tokens_per_rank or None
            )

    def _deepep_route(self, tokens: Tensor, ro: RouterOutput) -> Tensor:
        """[T, H] -> [T, H]: dispatch, this rank's experts, combine."""
        received, handle = self._buffer.dispatch(tokens, ro.selected_experts, ro.top_scores.float())
        rows, scores = received.x, received.topk_weights
        if self.score_apply == "pre" and scores is not None:
            rows = (rows.float() * scores[:, None]).to(rows.dtype)
        y = self.experts(rows, received.expert_counts.to(torch.int32))
        return self._buffer.combine(y, handle, apply_weights=self.score_apply == "post")
