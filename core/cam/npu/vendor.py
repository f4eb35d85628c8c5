"""openEuler UMDK's own CAM kernels, where their package is installed. Not run on hardware.

Calls torch.ops.umdk_cam_op_lib as published; adapters/umdk defines the same operations for CPU tensors, which is what
the tests run this file on.
"""

from typing import Any

import torch
from torch import Tensor

from cam.npu.routes import Routes, Rows

_OPS = ("get_dispatch_layout", "moe_dispatch_prefill", "moe_combine_prefill")
MAX_RANKS, MAX_EXPERTS, MAX_TOPK, MAX_TOKENS, HIDDEN = 384, 512, 16, 8000, range(1024, 7169)


def installed(key: str = "PrivateUse1") -> bool:
    """Whether all three operations have kernels for NPU tensors (dispatch key PrivateUse1)."""
    has: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(_defined(op) and has(f"umdk_cam_op_lib::{op}", key) for op in _OPS)


def _defined(op: str) -> bool:
    return hasattr(torch.ops.umdk_cam_op_lib, op)


def fits(num_experts: int, world: int, max_tokens: int | None, quant: str | None) -> str:
    """Why these kernels cannot serve a buffer; "" when they can. The same answer on every rank."""
    if num_experts % world or num_experts > MAX_EXPERTS or world > MAX_RANKS:
        return f"{num_experts} experts on {world} ranks: they must divide, up to {MAX_EXPERTS} on {MAX_RANKS}"
    if max_tokens is None or max_tokens > MAX_TOKENS:
        return f"max_tokens = {max_tokens}, needed is a bound of at most {MAX_TOKENS}"
    return "" if quant in (None, "int8") else f"they have no {quant}"


class Vendor:
    """One rank's side. group_name: what the library knows the communicator by."""

    def __init__(self, group_name: str, rank: int, world: int, num_experts: int) -> None:
        self._name, self._rank, self._world, self._num_experts = group_name, rank, world, num_experts

    def dispatch(self, x: Tensor, routes: Routes, quant: str | None) -> tuple[Rows, tuple[Tensor, Tensor]]:
        """x [T, H] -> rows by local expert, source rank, token; and (source triplets, running counts) for combine."""
        ops, experts = torch.ops.umdk_cam_op_lib, routes.experts.long()
        weights = self._weights(routes)
        per_expert, position = ops.get_dispatch_layout(experts, self._num_experts, self._world)
        rows, scales, triplets, running, counts = ops.moe_dispatch_prefill(
            x, experts, weights, per_expert, position, self._name, self._rank, self._world, quant == "int8"
        )
        by_source = running.diff(prepend=running.new_zeros(1)).view(-1, self._world).long()
        result = Rows(
            x=rows,
            scales=scales if quant == "int8" else None,
            expert_counts=counts,
            source_counts=by_source,
            source=triplets.view(-1, 3),
            topk_weights=None,
        )
        return result, (triplets, running)

    def combine(
        self, y: Tensor, routes: Routes, triplets: Tensor, running: Tensor, *, apply_weights: bool = True
    ) -> Tensor:
        """y [R, H] -> [T, H]."""
        weights = self._weights(routes if apply_weights else Routes(routes.experts, None))
        result: Tensor = torch.ops.umdk_cam_op_lib.moe_combine_prefill(
            y, routes.experts.long(), weights, triplets, running, self._name, self._rank, self._world
        )
        return result

    def _weights(self, routes: Routes) -> Tensor:
        if routes.weights is not None:
            return routes.weights
        return torch.ones(routes.experts.shape, dtype=torch.float32, device=routes.experts.device)
