"""Buffer's calls on NPU tensors, and on CAM's own Ascend kernels: cam.npu between cam.ep's types.

Not run on hardware.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from cam.ep.received import Handle, Received
from cam.errors import BackendUnavailable, InputError, NotReachable
from cam.group import Group
from cam.npu import status, vendor
from cam.npu.expert_parallel import NpuExpertParallel
from cam.npu.mc2 import hccl_group_name
from cam.npu.routes import ExpertPath, Routes, Sent


class NpuHandle(Handle):
    """Handle of a dispatch on a path of cam.npu."""

    __slots__ = ("sent",)

    def __init__(self, sent: Sent, received: Received, made_by: tuple[str, int, str, int]) -> None:
        experts, none = sent.routes.experts, torch.empty(0)
        facts = (received.source, received.source_counts, None, received.topk_weights)
        super().__init__(experts, sent.rows, received.expert_counts, sent.routes.weights, none, facts, made_by)
        self.sent: Sent | None = sent

    def release(self) -> None:
        super().release()
        self.sent = None


def open_path(
    group: Group,
    device: torch.device,
    num_experts: int,
    layout: str,
    quant: str | None,
    alignment: int,
    max_tokens: int | None,
) -> ExpertPath:
    """What serves a buffer on tensors of this device. Collective. Raises InputError for what the path does not have."""
    if group.config.ep_kernels == "ascend":
        return _open_own(group, device, num_experts, layout, quant, alignment, max_tokens)
    return _open_vendor(group, num_experts, layout, quant, alignment, max_tokens)


def _open_own(
    group: Group,
    device: torch.device,
    num_experts: int,
    layout: str,
    quant: str | None,
    alignment: int,
    max_tokens: int | None,
) -> ExpertPath:
    """Raises BackendUnavailable where the kernels' compilers are not installed."""
    from cam_kernels.ascend import toolchain
    from cam_kernels.ascend.errors import MissingTool

    try:
        toolchain.require_triton()
        lacking = toolchain.missing() if device.type == "cpu" else []
    except MissingTool as error:
        lacking = [str(error)]
    if lacking:
        raise BackendUnavailable(f"ep_kernels='ascend', on {device.type} tensors: {'; '.join(lacking)}")
    from cam.npu import own  # imports triton

    own.check_buffer(num_experts, group.size, layout, quant)
    return own.OwnKernels(group, num_experts, quant=quant, alignment=alignment, max_tokens=max_tokens, device=device)


def _open_vendor(
    group: Group, num_experts: int, layout: str, quant: str | None, alignment: int, max_tokens: int | None
) -> NpuExpertParallel:
    """Makes a communicator of its own for MC2 and the vendor's kernels.

    Raises InputError for what NPUs do not have, NotReachable for a group without a process group.
    """
    if layout != "expert":
        raise InputError(f"layout={layout!r} is not available on NPUs, allowed is 'expert'")
    if alignment != 1:
        raise InputError(f"expert_alignment={alignment} is not available on NPUs, allowed is 1")
    if group.process_group is None:
        raise NotReachable(
            f"group {group.name!r}: NPUs communicate over HCCL, so cam.init(process_group=...) is needed"
        )
    ranks = dist.get_process_group_ranks(group.process_group)
    own = dist.new_group(ranks, use_local_synchronization=True)
    return NpuExpertParallel(
        status.chip(),
        group.process_group,
        group.rank,
        group.size,
        num_experts=num_experts,
        max_tokens=max_tokens,
        quant=quant,
        group_name=lambda: hccl_group_name(own, group.rank),
        vendor_installed=vendor.installed(),
    )


def dispatch(
    path: ExpertPath,
    x: Tensor,
    scales: Tensor | None,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    active_mask: Tensor | None,
    timeout_s: float | None,
    made_by: tuple[str, int, str, int],
) -> tuple[Received, NpuHandle]:
    """Buffer.dispatch on a path. made_by: see Handle."""
    experts = topk_idx if active_mask is None else torch.where(active_mask[:, None], topk_idx, -1)
    return _dispatch(path, x, scales, Routes(experts, topk_weights), timeout_s, made_by)


def repeat(
    path: ExpertPath, x: Tensor, scales: Tensor | None, handle: NpuHandle, timeout_s: float | None
) -> tuple[Received, NpuHandle]:
    """Buffer.dispatch(handle=...): the routes of the handle's dispatch, sent again."""
    return _dispatch(path, x, scales, _sent(handle).routes, timeout_s, handle.made_by)


def _dispatch(
    path: ExpertPath,
    x: Tensor,
    scales: Tensor | None,
    routes: Routes,
    timeout_s: float | None,
    made_by: tuple[str, int, str, int],
) -> tuple[Received, NpuHandle]:
    rows, sent = path.dispatch(x, routes, scales=scales, timeout_s=timeout_s)
    received = Received(
        rows.x, rows.scales, rows.expert_counts, rows.source, rows.source_counts, None, rows.topk_weights
    )
    return received, NpuHandle(sent, received, made_by)


def combine(
    path: ExpertPath,
    y: Tensor,
    handle: NpuHandle,
    row_weights: Tensor | None,
    bias: Tensor | None,
    apply_weights: bool,
    timeout_s: float | None,
) -> tuple[Tensor, Tensor]:
    """Buffer.combine on a path -> out [T, H'], combined [T, K] (empty without row_weights)."""
    sent = _sent(handle)
    out = path.combine(y, sent, apply_weights=apply_weights, bias=bias, timeout_s=timeout_s)
    if row_weights is None:
        return out, torch.empty(0, device=y.device)
    return out, path.row_values(row_weights, sent, timeout_s=timeout_s)


def _sent(handle: NpuHandle) -> Sent:
    if handle.sent is None:
        raise InputError("this handle has been released")
    return handle.sent
