"""Buffer's calls on NPU tensors: cam.npu between cam.ep's types. Not run on hardware."""

import torch
import torch.distributed as dist
from torch import Tensor

from cam.ep.received import Handle, Received
from cam.errors import InputError, NotReachable
from cam.group import Group
from cam.npu import status, vendor
from cam.npu.expert_parallel import NpuExpertParallel, Sent
from cam.npu.mc2 import hccl_group_name
from cam.npu.routes import Routes


class NpuHandle(Handle):
    """Handle of a dispatch on an NPU."""

    __slots__ = ("sent",)

    def __init__(self, sent: Sent, received: Received, made_by: tuple[str, int, str, int]) -> None:
        experts, none = sent.routes.experts, torch.empty(0)
        facts = (received.source, received.source_counts, None, received.topk_weights)
        super().__init__(experts, sent.rows, received.expert_counts, sent.routes.weights, none, facts, made_by)
        self.sent: Sent | None = sent

    def release(self) -> None:
        super().release()
        self.sent = None


def open_npu(
    group: Group, num_experts: int, layout: str, quant: str | None, alignment: int, max_tokens: int | None
) -> NpuExpertParallel:
    """The NPU side of a buffer. Collective: makes a communicator of its own for MC2 and the vendor's kernels.

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
    npu: NpuExpertParallel,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    active_mask: Tensor | None,
    made_by: tuple[str, int, str, int],
) -> tuple[Received, NpuHandle]:
    """Buffer.dispatch on NPU tensors. made_by: see Handle."""
    experts = topk_idx if active_mask is None else torch.where(active_mask[:, None], topk_idx, -1)
    rows, sent = npu.dispatch(x, Routes(experts, topk_weights))
    received = Received(
        rows.x, rows.scales, rows.expert_counts, rows.source, rows.source_counts, None, rows.topk_weights
    )
    return received, NpuHandle(sent, received, made_by)


def combine(
    npu: NpuExpertParallel,
    y: Tensor,
    handle: NpuHandle,
    row_weights: Tensor | None,
    bias: Tensor | None,
    apply_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Buffer.combine on NPU tensors -> out [T, H'], combined [T, K] (empty without row_weights).

    The bias is added to the rounded sum: the vendor's kernels have no place for it.
    """
    if handle.sent is None:
        raise InputError("this handle has been released")
    out = npu.combine(y, handle.sent, apply_weights=apply_weights)
    if bias is not None:
        out = out + bias
    if row_weights is None:
        return out, torch.empty(0, device=y.device)
    return out, npu.row_values(row_weights, handle.sent)
