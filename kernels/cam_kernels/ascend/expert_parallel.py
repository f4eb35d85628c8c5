"""Dispatch and combine of one rank: the order of the launches, the waits with deadlines, the checks before them.

    layout -> push_counts -> wait -> plan -> push_rows -> wait -> unpack        (dispatch)
    raise_flag -> wait -> push_results -> sum_results, again until all is done  (combine)

The expert layout of cam.ep: rows by local expert, source rank, token, k. Nothing here knows whether kernels run on an
NPU or on this CPU: that is the launcher's affair.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cam_kernels.ascend.errors import LimitExceeded, ParametersDiffer, WaitExpired
from cam_kernels.ascend.kernels.combine import PUSH_RESULTS, SUM_RESULTS
from cam_kernels.ascend.kernels.dispatch import CLEAR_PADDING, PUSH_ROWS, UNPACK_META
from cam_kernels.ascend.kernels.notify import FLAG_LANES, HEADER, PLAN_ROWS, PUSH_COUNTS, RAISE_FLAG, WAIT_FLAGS
from cam_kernels.ascend.launch import Launcher
from cam_kernels.ascend.routing import Layout, dispatch_layout
from cam_kernels.ascend.tiling import block
from cam_kernels.ascend.window import Window, power_of_two

_HEADER_FIELDS = ("tokens", "topk", "hidden", "blocks", "experts", "alignment", "row type", "operation")
_ROW_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
_FLAGS_PER_PROGRAM = 64
# How often a waiting kernel looks before the host checks the clock: on a device about a millisecond of copies.
_POLLS = 1000


@dataclass(frozen=True)
class Received:
    """What dispatch returns; tensors on the window's device.

    x [R, H] is the window memory itself, valid until the second dispatch after this one. scales fp32 [R], None for rows
    that are not quantised. expert_rows int32 [E_local] without padding. source int32 [R, 3] (rank, token, k), -1 in
    padding rows. topk_weights fp32 [R]. running int32 [E_local, W]: the running sum that CAM calls recv_count.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    expert_rows: torch.Tensor
    source: torch.Tensor
    topk_weights: torch.Tensor
    running: torch.Tensor


@dataclass(frozen=True)
class Handle:
    """Routing of one dispatch, for any number of combines."""

    source: torch.Tensor
    position: torch.Tensor
    experts: torch.Tensor
    topk_weights: torch.Tensor | None


class ExpertParallel:
    """One rank's side of dispatch and combine over a window.

    launcher: where kernels run. window, rank: the own window and the place in it. alignment: expert rows are padded to
    a multiple of it. timeout_s: longest wait for a peer; may be set between calls. watch: called between looks of every
    wait; it raises when a peer is known to be dead.
    Calls are collective and in the same order on all ranks.
    """

    def __init__(
        self,
        launcher: Launcher,
        window: Window,
        rank: int,
        *,
        alignment: int = 1,
        timeout_s: float = 30.0,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= rank < window.layout.world:
            raise LimitExceeded(f"rank {rank} of a world of {window.layout.world}")
        if alignment < 1:
            raise LimitExceeded(f"alignment = {alignment}, must be at least 1")
        self._launcher, self._window, self._rank = launcher, window, rank
        self._alignment, self.timeout_s, self._watch = alignment, timeout_s, watch
        self._device = window.memory.device
        self._dispatches = 0
        self._combines = 0
        # Stands in for tensors that a variant of a kernel does not read.
        self._unused = {d: torch.zeros(1, dtype=d, device=self._device) for d in (torch.int8, torch.float32)}

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        *,
        scales: torch.Tensor | None = None,
        active_mask: torch.Tensor | None = None,
        quantise: bool = False,
    ) -> tuple[Received, Handle]:
        """Send every selected (token, k) to the owner of its expert.

        x [T, H] bf16, fp16, fp32, or int8 with scales fp32 [T]. topk_idx [T, K] int32 or int64, -1 = not selected.
        topk_weights [T, K] fp32. active_mask [T] bool. quantise: send int8 rows and their scales.
        Raises LimitExceeded before anything is sent, ParametersDiffer before any row is, WaitExpired.
        """
        self._check_dispatch(x, topk_idx, topk_weights, scales, active_mask, quantise)
        size, (tokens, topk), hidden = self._window.layout, topk_idx.shape, x.shape[1]
        epoch = self._dispatches = self._dispatches + 1
        layout = dispatch_layout(self._launcher, topk_idx, size.experts, active_mask)
        row_type = torch.int8 if quantise else x.dtype
        header = (
            tokens, topk, hidden, size.blocks, size.experts, self._alignment, _ROW_TYPES.index(row_type), 2 * quantise
        )  # fmt: skip
        first_row, expert_rows, running, totals = self._exchange_counts(layout, header, epoch)
        if max(totals) > size.rows or totals[self._rank] * hidden * row_type.itemsize > size.rows * self._row_bytes():
            raise LimitExceeded(f"{max(totals)} rows arrive at a rank, its window holds {size.rows}: raise rows")
        self._launcher.launch(
            PUSH_ROWS, size.blocks, x, self._unused[torch.float32] if scales is None else scales, topk_idx,
            self._unused[torch.float32] if topk_weights is None else topk_weights, layout.position, first_row,
            *(self._window.peers(a, epoch) for a in ("dispatch_rows", "dispatch_meta", "dispatch_flags")),
            self._rank, tokens, topk, hidden, size.experts, size.world, epoch,
            BH=block("push_rows quantised" if quantise else "push_rows", hidden), QUANT=quantise,
            SCALED=scales is not None, WEIGHTED=topk_weights is not None,
        )  # fmt: skip
        self._wait("dispatch_flags", size.world * size.blocks, epoch, epoch, "dispatch", "rows", size.blocks)
        rows = totals[self._rank]
        source, weights, row_scales = self._unpack(rows, hidden, row_type, epoch)
        received = Received(
            self._window.own("dispatch_rows", epoch, row_type, rows, hidden),
            row_scales if row_type == torch.int8 else None,
            expert_rows,
            source,
            weights,
            running,
        )
        return received, Handle(source, layout.position, topk_idx, topk_weights)

    def combine(
        self,
        y: torch.Tensor,
        handle: Handle,
        *,
        bias: torch.Tensor | None = None,
        apply_weights: bool = True,
    ) -> torch.Tensor:
        """Return the rows' results y [R, H'] to their sources; gives out [T, H'] in y's dtype.

        out[t] = round(sum over k, ascending, of weight * y[row of (t, k)], in fp32, + bias[t]). weight is dispatch's
        topk_weights, 1 when none were given or with apply_weights=False.
        Raises LimitExceeded, WaitExpired.
        """
        size, (tokens, topk) = self._window.layout, handle.position.shape
        rows, hidden = handle.source.shape[0], y.shape[1]
        if y.shape[0] != rows or y.dtype not in _ROW_TYPES[:3] or not 1 <= hidden <= size.hidden:
            raise LimitExceeded(f"y is {y.dtype} {tuple(y.shape)}, needed are {rows} rows of up to {size.hidden}")
        if hidden * y.dtype.itemsize > self._row_bytes():
            raise LimitExceeded(f"rows of {hidden} {y.dtype} exceed the window's {self._row_bytes()} bytes per row")
        if bias is not None and (bias.shape != (tokens, hidden) or bias.dtype != y.dtype):
            raise LimitExceeded(f"bias is {bias.dtype} {tuple(bias.shape)}, needed is {y.dtype} {(tokens, hidden)}")
        launcher, window = self._launcher, self._window
        epoch = self._combines = self._combines + 1
        launcher.launch(RAISE_FLAG, 1, window.peers("combine_ready", 0), self._rank, size.world, epoch)
        self._wait("combine_ready", size.world, epoch - 1, 0, "combine", "peers to be ready", 1)
        if rows:
            launcher.launch(
                PUSH_RESULTS, launcher.cores, y.contiguous(), handle.source, window.peers("combine_slots", epoch),
                window.peers("combine_flags", epoch), rows, hidden, topk, epoch, BH=block("push_results", hidden),
            )  # fmt: skip
        out = torch.zeros(tokens, hidden, dtype=y.dtype, device=self._device)
        done = torch.zeros(tokens, FLAG_LANES, dtype=torch.int32, device=self._device)
        weights = handle.topk_weights if apply_weights else None
        deadline = _Deadline(self.timeout_s)
        while tokens:
            launcher.launch(
                SUM_RESULTS, launcher.cores, window.own("combine_slots", epoch, y.dtype, tokens, topk, hidden),
                window.own("combine_flags", epoch, torch.int32, tokens, topk, FLAG_LANES), handle.position,
                self._unused[torch.float32] if weights is None else weights, y if bias is None else bias.contiguous(),
                out, done, tokens, topk, hidden, epoch, _POLLS, BH=block("sum_results", hidden),
                KP=power_of_two(topk), WEIGHTED=weights is not None, BIASED=bias is not None,
            )  # fmt: skip
            launcher.finish()
            missing = (done[:, 0] == 0).nonzero()[:, 0]
            if missing.numel() == 0:
                break
            self._watch()
            if deadline.passed():
                raise WaitExpired("combine", "results", self._late_owners(handle, missing, epoch), deadline.waited())
        return out

    def _late_owners(self, handle: Handle, tokens: torch.Tensor, epoch: int) -> tuple[int, ...]:
        """Ranks whose results are missing: the owners of the experts of slots without a flag."""
        flags = self._window.own("combine_flags", epoch, torch.int32, *handle.position.shape, FLAG_LANES)[..., 0]
        absent = (flags < epoch) & (handle.position >= 0)
        experts = handle.experts[absent & torch.zeros_like(absent).index_fill_(0, tokens, True)]
        return tuple(sorted({self._window.layout.owner(int(e)) for e in experts.tolist()}))

    def _exchange_counts(
        self, layout: Layout, header: tuple[int, ...], epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
        """Notify: returns first_row [E], expert_rows [E_local], running [E_local, W] and the rows of every rank."""
        size, launcher, device = self._window.layout, self._launcher, self._device
        row = torch.zeros(size.row_words, dtype=torch.int32, device=device)
        row[:HEADER] = torch.tensor(header, dtype=torch.int32)
        row[HEADER : HEADER + size.experts] = layout.counts
        launcher.launch(
            PUSH_COUNTS, min(launcher.cores, size.world), row, self._window.peers("notify_rows", epoch),
            self._window.peers("notify_flags", epoch), self._rank, size.world, epoch, ROW=size.row_words,
        )  # fmt: skip
        self._wait("notify_flags", size.world, epoch, epoch, "dispatch", "counts", 1)
        rows = self._window.own("notify_rows", epoch, torch.int32, size.world, size.row_words)
        self._compare(header, rows[:, :HEADER].tolist())
        first_row = torch.empty(size.experts, dtype=torch.int32, device=device)
        expert_rows = torch.empty_like(first_row)
        running = torch.empty(size.experts, size.world, dtype=torch.int32, device=device)
        totals = torch.empty(size.world, FLAG_LANES, dtype=torch.int32, device=device)
        launcher.launch(
            PLAN_ROWS, size.world, rows, first_row, expert_rows, running, totals, self._rank, size.world, size.experts,
            self._alignment, ROW=size.row_words, HEADER=HEADER, EL=power_of_two(-(-size.experts // size.world)),
        )  # fmt: skip
        launcher.finish()
        mine = size.expert_range(self._rank)
        return first_row, expert_rows[mine.start : mine.stop], running[mine.start : mine.stop], totals[:, 0].tolist()

    def _unpack(
        self, rows: int, hidden: int, row_type: torch.dtype, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """source [R, 3], weights [R] and scales [R] of the received rows; zeroes padding rows."""
        launcher, device = self._launcher, self._device
        source = torch.empty(rows, 3, dtype=torch.int32, device=device)
        weights = torch.empty(rows, dtype=torch.float32, device=device)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        if rows:
            meta = self._window.own("dispatch_meta", epoch, torch.int32, rows, FLAG_LANES)
            launcher.launch(UNPACK_META, launcher.cores, meta, source, weights, scales, rows, epoch, RP=64)
            if self._alignment > 1:
                data = self._window.own("dispatch_rows", epoch, row_type, rows, hidden)
                launcher.launch(
                    CLEAR_PADDING, launcher.cores, data, source, rows, hidden, BH=block("clear_padding", hidden)
                )
        launcher.finish()
        return source, weights, scales

    def _wait(self, area: str, flags: int, epoch: int, half: int, operation: str, phase: str, per_rank: int) -> None:
        """Wait until `flags` flags of an own area, in the half of epoch `half`, have reached `epoch`."""
        deadline = _Deadline(self.timeout_s)
        own = self._window.own(area, half, torch.int32, flags, FLAG_LANES)
        arrived = torch.empty_like(own)
        while True:
            self._launcher.launch(
                WAIT_FLAGS, -(-flags // _FLAGS_PER_PROGRAM), own, arrived, flags, epoch, _POLLS, FP=_FLAGS_PER_PROGRAM
            )
            self._launcher.finish()
            late = (arrived[:, 0] == 0).nonzero()[:, 0]
            if late.numel() == 0:
                return
            self._watch()
            if deadline.passed():
                ranks = tuple(sorted({int(i) // per_rank for i in late.tolist()}))
                raise WaitExpired(operation, phase, ranks, deadline.waited())

    def _compare(self, mine: tuple[int, ...], everyone: list[list[int]]) -> None:
        for rank, theirs in enumerate(everyone):
            for field, a, b in zip(_HEADER_FIELDS, mine, theirs, strict=True):
                if a != b and field != "tokens":
                    raise ParametersDiffer("dispatch", field, rank, a, b)

    def _check_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        scales: torch.Tensor | None,
        active_mask: torch.Tensor | None,
        quantise: bool,
    ) -> None:
        size = self._window.layout
        if x.dim() != 2 or x.dtype not in _ROW_TYPES or not x.is_contiguous() or not 1 <= x.shape[1] <= size.hidden:
            raise LimitExceeded(
                f"x is {x.dtype} {tuple(x.shape)}; needed: contiguous [T, 1..{size.hidden}], {_ROW_TYPES}"
            )
        if x.shape[1] * x.dtype.itemsize > self._row_bytes():
            raise LimitExceeded(f"rows of {x.shape[1]} {x.dtype} exceed the window's {self._row_bytes()} bytes per row")
        if topk_idx.dim() != 2 or topk_idx.dtype not in (torch.int32, torch.int64) or not topk_idx.is_contiguous():
            raise LimitExceeded(f"topk_idx is {topk_idx.dtype} {tuple(topk_idx.shape)}; needed: contiguous int [T, K]")
        tokens, topk = topk_idx.shape
        if x.shape[0] != tokens or tokens > size.tokens or not 1 <= topk <= size.topk:
            raise LimitExceeded(
                f"{x.shape[0]} rows and topk_idx [{tokens}, {topk}]; the window holds"
                f" {size.tokens} tokens of {size.topk} slots"
            )
        if tokens and not -1 <= int(topk_idx.min()) <= int(topk_idx.max()) < size.experts:
            raise LimitExceeded(
                f"topk_idx reaches from {topk_idx.min()} to {topk_idx.max()}, experts are {size.experts}"
            )
        for name, value, shape, dtype in (
            ("topk_weights", topk_weights, (tokens, topk), torch.float32),
            ("scales", scales, (tokens,), torch.float32),
            ("active_mask", active_mask, (tokens,), torch.bool),
        ):
            if value is not None and (tuple(value.shape) != shape or value.dtype != dtype or not value.is_contiguous()):
                raise LimitExceeded(f"{name} is {value.dtype} {tuple(value.shape)}; needed: contiguous {dtype} {shape}")
        if (x.dtype == torch.int8) != (scales is not None) or (quantise and x.dtype == torch.int8):
            raise LimitExceeded("int8 rows come with scales and are not quantised again; other rows have no scales")

    def _row_bytes(self) -> int:
        return self._window.layout.hidden * self._window.layout.element_bytes


class _Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._start = time.monotonic()
        self._timeout_s = timeout_s

    def waited(self) -> float:
        return time.monotonic() - self._start

    def passed(self) -> bool:
        return self.waited() > self._timeout_s
