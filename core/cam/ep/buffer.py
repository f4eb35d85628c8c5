"""The expert-parallel buffer: what a user calls."""

from datetime import timedelta
from typing import Literal, overload

import torch
from torch import Tensor

from cam.deadline import seconds
from cam.ep import npu
from cam.ep.checks import check_buffer, check_combine, check_routing, check_rows
from cam.ep.pending import Pending
from cam.ep.received import Handle, Received
from cam.errors import InputError
from cam.group import Group
from cam.npu import status
from cam.npu.routes import ExpertPath
from cam.ops.ep import fp8_groups  # and registers torch.ops.cam.ep_*
from cam.ops.placement import expert_range

#: What a handle's buffer and the buffer that uses it must have in common.
_TRAITS = ("group", "num_experts", "layout", "expert_alignment")
Timeout = float | timedelta | None
Rows = Tensor | tuple[Tensor, Tensor]


class Buffer:
    """MoE dispatch and combine over a group.

    group: all its ranks must share this host's memory, else NotReachable. On Ascend NPUs (x on "npu") rows go over HCCL
        instead, the group must be made from a process group, and what NPUs do not have is refused: cam.npu.
    num_experts: E. Experts live contiguously on the ranks; where E does not divide, the first ranks own one more.
    layout: "expert" sends one row per (token, k), grouped by local expert: what grouped matmuls want. "rank" sends each
        token once to every rank that has any of its experts, with local top-k indices and weights: fewer bytes; the
        receiver applies the weights and combine adds up the ranks' partial sums.
    quant: None; "int8", one fp32 scale a token (s = amax/127; a zero row gives zeros and scale 0); "fp8", float8_e4m3fn
        with one fp32 scale per 128 channels (amax at least 1e-4, s = amax/448).
    expert_alignment: pads each expert's rows to a multiple, with zero rows (expert layout only).
    max_tokens: refuse more tokens a rank and call than this. None: memory is the limit.

    All ranks construct their buffers alike and call it in the same order; calls with different parameters raise
    Mismatch on every rank. A buffer holds no memory of its own, so several cost nothing.
    """

    def __init__(
        self,
        group: Group,
        num_experts: int,
        *,
        layout: Literal["expert", "rank"] = "expert",
        quant: Literal["int8", "fp8"] | None = None,
        expert_alignment: int = 1,
        max_tokens: int | None = None,
    ) -> None:
        check_buffer(num_experts, layout, quant, expert_alignment, max_tokens)
        if not status.present():
            group.endpoint  # noqa: B018  # raises NotReachable now rather than in the first dispatch
        self._path: ExpertPath | None = None
        self.group = group
        self.num_experts = num_experts
        self.layout = layout
        self.quant = quant
        self.expert_alignment = expert_alignment
        self.max_tokens = max_tokens
        self._local_experts = self.expert_range()
        self._traits = (group.name, num_experts, layout, expert_alignment)

    def expert_range(self, rank: int | None = None) -> range:
        """The global experts that live on a rank (default: this one)."""
        rank = self.group.rank if rank is None else rank
        if not 0 <= rank < self.group.size:
            raise InputError(f"rank must be in 0..{self.group.size - 1}, got {rank}")
        return expert_range(self.num_experts, self.group.size, rank)

    def size_hint(self, tokens: int, hidden: int, topk: int, dtype: torch.dtype) -> int:
        """Window bytes that one rank needs at worst for a dispatch of `tokens` tokens a rank: all of them routed to it.

        Nothing is allocated for the worst case; a dispatch takes what its rows need. See Config.window_limit.
        """
        copies = topk if self.layout == "expert" else 1
        rows = tokens * copies * self.group.size
        if self.layout == "expert":
            rows += len(self._local_experts) * (self.expert_alignment - 1)
        element = dtype.itemsize if self.quant is None else 1
        scales = {None: 0, "int8": 4, "fp8": fp8_groups(hidden) * 4}[self.quant]
        facts = 12 + 4 if self.layout == "expert" else 12 + topk * (8 + 4)
        return rows * (hidden * element + scales + facts) + tokens * topk * 8

    # --- dispatch -------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        active_mask: Tensor | None = None,
        handle: Handle | None = None,
        timeout: Timeout = None,
    ) -> tuple[Received, Handle]:
        """Sends each token's row to the ranks of its experts. Collective.

        x: [T, H] bf16, fp16 or fp32, rows at any stride; or (values [T, Hq], scales [T, S] or [T]), already quantised,
            forwarded as they are (the buffer's quant must be None). T may differ between ranks, and be 0.
        topk_idx: [T, K] int64 or int32, global experts; -1 = not selected. An expert may stand twice in a row: it is
            then computed twice and summed twice.
        topk_weights: [T, K] float32. They travel with the rows; in the expert layout combine applies them.
        active_mask: [T] bool; False = the token selects nothing.
        handle: repeat an earlier dispatch's routing with this x; topk_idx, topk_weights and active_mask must be None.

        Differentiable in x (unless quantised) and topk_weights. Raises InputError before anything is sent; Mismatch and
        OutOfWindowMemory on all ranks alike; Timeout and PeerLost, after which the group is broken.
        """
        self.group.check_open("dispatch")
        values, scales = x if isinstance(x, tuple) else (x, None)
        check_rows(values, scales, self.quant)
        if handle is not None:
            return self._repeat(values, scales, topk_idx, topk_weights, active_mask, handle, timeout)
        if topk_idx is None:
            raise InputError("dispatch needs topk_idx, or the handle of an earlier dispatch")
        check_routing(values.shape[0], topk_idx, topk_weights, active_mask)
        if self._on_path(values):
            path, limit_s = self._open_path(values.device), _limit(timeout)
            return npu.dispatch(path, values, scales, topk_idx, topk_weights, active_mask, limit_s, self._traits)
        rows, row_scales, source, idx, weights, counts, source_counts, route, anchor = torch.ops.cam.ep_dispatch(
            values,
            scales,
            topk_idx,
            topk_weights,
            active_mask,
            self.group.name,
            self.num_experts,
            len(self._local_experts),
            self.group.size,
            self.layout,
            self.quant or "none",
            self.expert_alignment,
            -1 if self.max_tokens is None else self.max_tokens,
            _seconds(timeout),
        )
        received = Received(
            rows,
            row_scales if self.quant is not None or scales is not None else None,
            counts,
            source,
            source_counts,
            idx if self.layout == "rank" else None,
            weights if topk_weights is not None else None,
        )
        facts = (source, source_counts, received.topk_idx, received.topk_weights)
        return received, Handle(route, rows.shape[0], counts, topk_weights, anchor, facts, self._traits)

    def _repeat(
        self,
        values: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        active_mask: Tensor | None,
        handle: Handle,
        timeout: Timeout,
    ) -> tuple[Received, Handle]:
        if topk_idx is not None or topk_weights is not None or active_mask is not None:
            raise InputError("dispatch(handle=...) repeats a routing: topk_idx, topk_weights, active_mask must be None")
        route = self._route(handle)
        if values.shape[0] != route.shape[0]:
            raise InputError(f"x has {values.shape[0]} tokens; the handle is of a dispatch of {route.shape[0]}")
        if isinstance(handle, npu.NpuHandle):
            return npu.repeat(self._open_path(values.device), values, scales, handle, _limit(timeout))
        differentiable = torch.is_grad_enabled() and values.requires_grad
        rows, row_scales, _, _, anchor = torch.ops.cam.ep_scatter(
            values,
            scales,
            route,
            handle.expert_counts,
            None,
            None,
            None,
            handle.anchor if differentiable else None,
            handle.rows,
            self.group.name,
            self.layout,
            self.quant or "none",
            self.expert_alignment,
            _seconds(timeout),
        )
        source, source_counts, idx, weights = handle.received
        has_scales = self.quant is not None or scales is not None
        received = Received(
            rows,
            row_scales if has_scales else None,
            handle.expert_counts,
            source,
            source_counts,
            idx,
            weights,
        )
        return received, handle.continued(anchor) if differentiable else handle

    # --- combine --------------------------------------------------------------------------------------------

    @overload
    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: None = None,
        bias: Tensor | None = None,
        apply_weights: bool | None = None,
        timeout: Timeout = None,
    ) -> Tensor: ...
    @overload
    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: Tensor,
        bias: Tensor | None = None,
        apply_weights: bool | None = None,
        timeout: Timeout = None,
    ) -> tuple[Tensor, Tensor]: ...
    def combine(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        apply_weights: bool | None = None,
        timeout: Timeout = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Adds up the experts' rows at their tokens. Collective.

        y: [R, H'] bf16, fp16 or fp32, one row for each received row; H' need not be the dispatch's H. Read in place
            where it lies in window memory (group.empty, or a result of this buffer), else copied there first.
        apply_weights: multiply each row by its top-k weight; default: in the expert layout, if dispatch got weights.
            The rank layout's rows are already weighted sums, so True is refused there.
        bias: [T, H'] of y's dtype, added to each token's sum before it is rounded.
        topk_weights: float32 weights of the received rows, [R] (expert layout) or [R, K] (rank layout), to be sent back
            to their tokens.

        Returns out [T, H'] of y's dtype, window memory; with topk_weights (out, combined [T, K] float32).
        out[t] is the sum over k ascending (rank layout: over ranks ascending) of weight * row, in fp32 without fused
        multiply-add, rounded once: the same bits wherever the experts live. Tokens that selected nothing get 0, or
        their bias.

        Differentiable in y, dispatch's topk_weights, bias and topk_weights. Errors as in dispatch.
        """
        self.group.check_open("combine")
        route = self._route(handle)
        check_combine(y, handle, route, self.layout, bias, apply_weights, topk_weights)
        apply = self.layout == "expert" if apply_weights is None else apply_weights
        if isinstance(handle, npu.NpuHandle):
            path = self._open_path(y.device)
            result = npu.combine(path, y, handle, topk_weights, bias, apply, _limit(timeout))
            return result[0] if topk_weights is None else result
        out, combined = torch.ops.cam.ep_combine(
            y,
            route,
            handle.expert_counts,
            handle.topk_weights if apply else None,
            bias,
            topk_weights,
            handle.anchor if torch.is_grad_enabled() else None,
            self.group.name,
            self.layout,
            self.expert_alignment,
            _seconds(timeout),
        )
        return out if topk_weights is None else (out, combined)

    def _route(self, handle: Handle) -> Tensor:
        if handle.route is None:
            raise InputError("this handle has been released")
        for name, mine, theirs in zip(_TRAITS, self._traits, handle.made_by, strict=True):
            if mine != theirs:
                raise InputError(
                    f"this handle is of a dispatch by a buffer with {name} {theirs!r}; this buffer has {mine!r}"
                )
        return handle.route

    def _on_path(self, values: Tensor) -> bool:
        """Whether a path of cam.npu serves these rows, and not the CPU kernels."""
        return values.device.type == "npu" or self.group.config.ep_kernels == "ascend"

    def _open_path(self, device: torch.device) -> ExpertPath:
        if self._path is None:
            self._path = npu.open_path(
                self.group, device, self.num_experts, self.layout, self.quant, self.expert_alignment, self.max_tokens
            )
        return self._path

    # --- asynchronous ---------------------------------------------------------------------------------------

    def dispatch_async(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        active_mask: Tensor | None = None,
        handle: Handle | None = None,
        timeout: Timeout = None,
    ) -> Pending[tuple[Received, Handle]]:
        """dispatch() that returns at once; its arguments must not change until wait() returns."""
        return Pending(
            self.group,
            lambda: self.dispatch(x, topk_idx, topk_weights, active_mask=active_mask, handle=handle, timeout=timeout),
            # A repetition without gradients returns the old anchor, whose place in the program is another.
            lambda result: result[0].x if result[1] is handle else result[1].anchor,
        )

    def combine_async(
        self,
        y: Tensor,
        handle: Handle,
        *,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        apply_weights: bool | None = None,
        timeout: Timeout = None,
    ) -> Pending[Tensor | tuple[Tensor, Tensor]]:
        """combine() that returns at once; its arguments must not change until wait() returns."""
        return Pending(
            self.group,
            lambda: self.combine(
                y, handle, topk_weights=topk_weights, bias=bias, apply_weights=apply_weights, timeout=timeout
            ),
            lambda result: result if isinstance(result, Tensor) else result[0],
        )


def _limit(timeout: Timeout) -> float | None:
    return None if timeout is None else seconds(timeout, 0.0)


def _seconds(timeout: Timeout) -> float:
    """For the ops, whose schema has no optional number: negative = the group's timeout."""
    return -1.0 if timeout is None else seconds(timeout, 0.0)
