"""Which of the vendor's paths serves a buffer on an NPU, and the calls on it. Not run on hardware.

The choice depends only on what all ranks know alike (chip, experts, ranks, max_tokens, quant, what is installed), never
on one rank's batch: ranks on different paths would wait for each other for ever.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cam.errors import InputError
from cam.npu import mc2, vendor
from cam.npu.alltoall import AllToAll, Exchange
from cam.npu.mc2 import Mc2
from cam.npu.routes import Routes, Rows, Sent
from cam.npu.soc import Soc
from cam.npu.vendor import Vendor

Path = Literal["mc2", "vendor", "alltoall"]


@dataclass(frozen=True)
class Choice:
    """The path that serves a buffer, and why not the ones before it."""

    path: Path
    reasons: Mapping[str, str]


def choose(
    chip: Soc, *, num_experts: int, world: int, max_tokens: int | None, quant: str | None, vendor_installed: bool
) -> Choice:
    """mc2 for batches of decode size, else the vendor's library where it is, else all-to-all."""
    reasons = {"mc2": mc2.fits(chip, num_experts, world, max_tokens, quant)}
    if not reasons["mc2"]:
        return Choice("mc2", {})
    reasons["vendor"] = (
        vendor.fits(num_experts, world, max_tokens, quant) if vendor_installed else "umdk_cam_op_lib is not installed"
    )
    if not reasons["vendor"]:
        return Choice("vendor", {"mc2": reasons["mc2"]})
    return Choice("alltoall", reasons)


@dataclass(frozen=True)
class VendorSent:
    """Sent of these paths, with the state that the chosen one wants back."""

    routes: Routes
    rows: int
    exchange: Exchange | None = None
    tensors: tuple[Tensor, ...] = ()
    capacity: int = 0


class NpuExpertParallel:
    """One rank's side of dispatch and combine, expert layout.

    process_group: the ranks. MC2 and the vendor's kernels need a communicator that nothing else uses: `group_name`
    gives its HCCL name, and is asked before every call, because a group that was made anew has another.
    """

    def __init__(
        self,
        chip: Soc,
        process_group: dist.ProcessGroup,
        rank: int,
        world: int,
        *,
        num_experts: int,
        max_tokens: int | None,
        quant: str | None,
        group_name: Callable[[], str],
        vendor_installed: bool,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        if quant not in (None, "int8"):
            raise InputError(f"quant={quant!r} is not available on NPUs, allowed are None and 'int8'")
        self.choice = choose(
            chip,
            num_experts=num_experts,
            world=world,
            max_tokens=max_tokens,
            quant=quant,
            vendor_installed=vendor_installed,
        )
        self._chip, self._rank, self._world, self._num_experts = chip, rank, world, num_experts
        self._max_tokens, self._quant, self._group_name = max_tokens, quant, group_name
        self._environment = environment
        self._alltoall = AllToAll(process_group, rank, world, num_experts)

    def dispatch(
        self, x: Tensor, routes: Routes, *, scales: Tensor | None = None, timeout_s: float | None = None
    ) -> tuple[Rows, VendorSent]:
        """x [T, H] -> rows of this rank's experts by local expert, source rank, token; and what combine needs."""
        _no_deadline(timeout_s)
        if scales is not None:
            raise InputError(
                "rows that are quantised already cannot be forwarded on NPUs: use quant='int8', or CAM's own kernels "
                "(ep_kernels='ascend')"
            )
        if self.choice.path != "alltoall":
            self._check_inference(x, routes)
        if self.choice.path == "mc2":
            return self._dispatch_mc2(x, routes)
        if self.choice.path == "vendor":
            rows, state = self._vendor().dispatch(x, routes, self._quant)
            return rows, VendorSent(routes, rows.x.shape[0], tensors=state)
        rows, exchange = self._alltoall.dispatch(x, routes, self._quant)
        return rows, VendorSent(routes, rows.x.shape[0], exchange=exchange)

    def combine(
        self,
        y: Tensor,
        sent: Sent,
        *,
        apply_weights: bool,
        bias: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """y [R, H'] -> [T, H']: the weighted sum over k. Accumulation and rounding are those of the path's kernel.

        The bias is added to the rounded sum: the vendor's kernels have no place for it.
        """
        _no_deadline(timeout_s)
        out = self._combine(y, _mine(sent), apply_weights)
        return out if bias is None else out + bias

    def _combine(self, y: Tensor, sent: VendorSent, apply_weights: bool) -> Tensor:
        if sent.exchange is not None:
            weights = sent.routes.weights if apply_weights else None
            tokens, topk = sent.routes.experts.shape
            return self._alltoall.combine(y, sent.exchange, weights, (tokens, topk))
        if self.choice.path == "vendor":
            triplets, running = sent.tensors
            return self._vendor().combine(y, sent.routes, triplets, running, apply_weights=apply_weights)
        assist_info, ep_recv_counts, expert_ids = sent.tensors
        weights = sent.routes.weights
        if weights is None or not apply_weights:
            weights = torch.ones(expert_ids.shape, dtype=torch.float32, device=y.device)
        rows = y.new_empty(sent.capacity, y.shape[1])
        rows[: sent.rows] = y
        return self._mc2().combine(rows, expert_ids, weights, assist_info, ep_recv_counts)

    def row_values(self, values: Tensor, sent: Sent, *, timeout_s: float | None = None) -> Tensor:
        """values fp32 [R] of received rows -> [T, K] at their tokens. All-to-all only."""
        _no_deadline(timeout_s)
        exchange = _mine(sent).exchange
        if exchange is None:
            raise InputError(
                f"combine(topk_weights=...) needs the all-to-all path, this buffer is on {self.choice.path}: "
                "use Buffer(max_tokens=None)"
            )
        tokens, topk = sent.routes.experts.shape
        return self._alltoall.row_values(values, exchange, (tokens, topk))

    def _dispatch_mc2(self, x: Tensor, routes: Routes) -> tuple[Rows, VendorSent]:
        kernels, expert_ids = self._mc2(), routes.experts.to(torch.int32)
        tokens, topk = expert_ids.shape
        kernels.check(tokens, topk, x.shape[1], x.dtype, self._environment)
        expand_x, scales, assist_info, counts, recv_counts, *_ = kernels.dispatch(x, expert_ids)
        by_source = recv_counts.diff(prepend=recv_counts.new_zeros(1)).view(-1, self._world)
        received = int(counts.sum())  # the one wait for the device: a caller gets exactly the rows that came
        rows = Rows(
            x=expand_x[:received],
            scales=scales[:received] if self._quant else None,
            expert_counts=counts.long(),
            source_counts=by_source.long(),
            source=torch.empty(0, 3, dtype=torch.int32, device=x.device),
            topk_weights=None,
        )
        state = (assist_info, recv_counts, expert_ids)
        return rows, VendorSent(routes, received, tensors=state, capacity=expand_x.shape[0])

    def _mc2(self) -> Mc2:
        return Mc2(
            self._chip,
            self._group_name(),
            self._rank,
            self._world,
            self._num_experts,
            self._max_tokens or self._chip.max_tokens,
            self._quant,
        )

    def _vendor(self) -> Vendor:
        return Vendor(self._group_name(), self._rank, self._world, self._num_experts)

    def _check_inference(self, x: Tensor, routes: Routes) -> None:
        way_out = "use Buffer(max_tokens=None) for the all-to-all path"
        if torch.is_grad_enabled() and (
            x.requires_grad or (routes.weights is not None and routes.weights.requires_grad)
        ):
            raise InputError(f"the {self.choice.path} path has no gradients: {way_out}, or torch.no_grad()")
        if routes.experts.numel() and int(routes.experts.min()) < 0:
            raise InputError(
                f"the {self.choice.path} path needs every slot selected, topk_idx has -1 or a mask: {way_out}"
            )


def _mine(sent: Sent) -> VendorSent:
    if not isinstance(sent, VendorSent):
        raise InputError(f"this handle is of a dispatch on another path ({type(sent).__name__})")
    return sent


def _no_deadline(timeout_s: float | None) -> None:
    if timeout_s is not None:
        raise InputError("timeout= is not available on NPUs: the process group's own applies")
