"""CAM's own Ascend kernels as a path of cam.ep.Buffer: opt-in, Config.ep_kernels="ascend".

On NPU tensors they run on the NPU (not run on hardware), on CPU tensors from their Ascend IR: the same host side.
Of one dispatch or combine:

    agree      the ranks tell each other parameters and counts over the group; all see the same, so all fail alike
    grow       windows that are too small are replaced by larger ones, on all ranks
    launch     cam_kernels.ascend.ExpertParallel; its waits watch the deadline, the peers' lives and their alarms
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from cam.errors import CamError, GroupAborted, InputError, Mismatch, OutOfWindowMemory, PeerLost, Timeout
from cam.group import Group
from cam.npu import status
from cam.npu.lives import Lives
from cam.npu.routes import Routes, Rows, Sent
from cam.npu.windows import Windows, gave_up, open_windows
from cam.ops.placement import expert_range
from cam_kernels.ascend import expert_parallel as kernels
from cam_kernels.ascend.errors import AscendError, WaitExpired
from cam_kernels.ascend.launch import Launcher, NativeLauncher, NpuLauncher
from cam_kernels.ascend.window import MAX_EXPERTS, MAX_HIDDEN, MAX_RANKS, MAX_TOPK, Window, WindowLayout, power_of_two

#: Programs of a launch on a CPU: more than one, so that nothing rests on their order.
_CPU_CORES = 4
#: Between looks of a waiting kernel on a CPU, where the peer that it waits for may want this core.
_PAUSE_S = 100e-6


@dataclass(frozen=True)
class OwnSent:
    """Sent of this path. number: which dispatch of its buffer it was, the same on all ranks."""

    routes: Routes
    rows: int
    handle: kernels.Handle
    number: int


class _Part(msgspec.Struct, frozen=True):
    """What a rank says before a dispatch or combine.

    same: must be equal on all ranks, by name. counts: rows it sends to each expert. limit: of its windows, in bytes.
    """

    same: dict[str, str]
    tokens: int
    topk: int
    hidden: int
    row_bytes: int
    limit: int
    counts: list[int] = []


class OwnKernels:
    """One rank's side. Holds windows as large as its largest call needed.

    Raises InputError for what the kernels do not have; Mismatch, OutOfWindowMemory and NotReachable on all ranks alike;
    Timeout, PeerLost, GroupAborted.
    """

    def __init__(
        self,
        group: Group,
        num_experts: int,
        *,
        quant: str | None,
        alignment: int,
        max_tokens: int | None,
        device: torch.device,
    ) -> None:
        self._group, self._num_experts, self._device = group, num_experts, device
        self._quant, self._alignment, self._max_tokens = quant, alignment, max_tokens
        self._launcher: Launcher
        if device.type == "npu":
            self._launcher = NpuLauncher(device, status.chip().vector_cores)
        else:
            self._launcher = NativeLauncher(cores=_CPU_CORES, threads=group.config.threads or 1)
        self._ranges = [expert_range(num_experts, group.size, rank) for rank in range(group.size)]
        #: What the windows hold, by the names of _grown.
        self._sizes: dict[str, int] = {}
        self._windows: Windows | None = None
        self._kernels: kernels.ExpertParallel | None = None
        self._dispatches = 0
        self._lives = Lives(group)

    # --- calls ----------------------------------------------------------------------------------------------

    def dispatch(
        self, x: Tensor, routes: Routes, *, scales: Tensor | None = None, timeout_s: float | None = None
    ) -> tuple[Rows, OwnSent]:
        """As ExpertPath.dispatch. Quantised rows are int8 with fp32 scales; x is copied out of the window."""
        self._check(x, routes, scales)
        experts = routes.experts.contiguous()
        part = _Part(
            same={
                "num_experts": str(self._num_experts),
                "quant": str(self._quant),
                "expert_alignment": str(self._alignment),
                "max_tokens": str(self._max_tokens),
                "hidden": str(x.shape[1]),
                "dtype": str(x.dtype),
                "topk": str(experts.shape[1]),
                "scales": "none" if scales is None else str(scales.dtype),
                "topk_weights": "none" if routes.weights is None else "given",
                "cores": str(self._launcher.cores),
            },
            tokens=experts.shape[0],
            topk=experts.shape[1],
            hidden=x.shape[1],
            row_bytes=x.shape[1] * x.element_size(),
            limit=self._limit(),
            counts=torch.bincount(experts[experts >= 0].flatten(), minlength=self._num_experts).tolist(),
        )
        with self._group.turn:
            everyone = self._agree("dispatch", part, timeout_s)
            counts = torch.tensor([each.counts for each in everyone], dtype=torch.int64)
            own = self._grown("dispatch", everyone, self._received(counts), timeout_s)
            with self._failing("dispatch", timeout_s):
                recv, handle = own.dispatch(
                    x.contiguous(),
                    experts,
                    None if routes.weights is None else routes.weights.contiguous(),
                    scales=None if scales is None else scales.reshape(-1).contiguous(),
                    quantise=self._quant == "int8",
                )
                rows = recv.x.clone()  # the window's own memory serves the dispatch after next
            self._dispatches += 1
        mine = self._ranges[self._group.rank]
        by_source = counts[:, mine.start : mine.stop].t().contiguous().to(self._device)
        result = Rows(
            x=rows,
            scales=recv.scales if scales is None else _shaped_like(recv.scales, scales),
            expert_counts=by_source.sum(1),
            source_counts=by_source,
            source=recv.source,
            topk_weights=None if routes.weights is None else recv.topk_weights,
        )
        return result, OwnSent(routes, rows.shape[0], handle, self._dispatches)

    def combine(
        self,
        y: Tensor,
        sent: Sent,
        *,
        apply_weights: bool,
        bias: Tensor | None = None,
        timeout_s: float | None = None,
    ) -> Tensor:
        """As ExpertPath.combine: fp32, k ascending, one rounding."""
        mine = _mine(sent)
        self._check_device(y)
        if not 1 <= y.shape[1] <= MAX_HIDDEN:
            raise _beyond("hidden", y.shape[1], 1, MAX_HIDDEN)
        _refuse_gradients(y, bias, mine.routes.weights if apply_weights else None)
        tokens, topk = mine.routes.experts.shape
        part = _Part(
            same={"hidden": str(y.shape[1]), "dtype": str(y.dtype), "handle": f"of dispatch {mine.number}"},
            tokens=tokens,
            topk=topk,
            hidden=y.shape[1],
            row_bytes=y.shape[1] * y.element_size(),
            limit=self._limit(),
        )
        with self._group.turn:
            everyone = self._agree("combine", part, timeout_s)
            own = self._grown("combine", everyone, [1] * self._group.size, timeout_s)
            with self._failing("combine", timeout_s):
                return own.combine(y.contiguous(), mine.handle, bias=bias, apply_weights=apply_weights)

    def row_values(self, values: Tensor, sent: Sent, *, timeout_s: float | None = None) -> Tensor:
        """As ExpertPath.row_values. A combine in which each row has its value in column k and zeros elsewhere."""
        mine = _mine(sent)
        k = mine.handle.source[:, 2:].long()
        columns = values.new_zeros(mine.rows, mine.routes.experts.shape[1])
        columns.scatter_(1, k.clamp(min=0), values.detach().reshape(-1, 1))
        return self.combine(columns, mine, apply_weights=False, timeout_s=timeout_s)

    # --- before anything is sent ----------------------------------------------------------------------------

    def _check(self, x: Tensor, routes: Routes, scales: Tensor | None) -> None:
        self._check_device(x)
        _refuse_gradients(x, scales, routes.weights)
        tokens, topk = routes.experts.shape
        for name, value, low, high in (("hidden", x.shape[1], 1, MAX_HIDDEN), ("top-k", topk, 1, MAX_TOPK)):
            if not low <= value <= high:
                raise _beyond(name, value, low, high)
        if self._max_tokens is not None and tokens > self._max_tokens:
            raise InputError(f"x has {tokens} tokens, the buffer's max_tokens is {self._max_tokens}")
        if scales is not None and (
            x.dtype != torch.int8 or scales.dtype != torch.float32 or scales.numel() != x.shape[0]
        ):
            raise InputError(
                f"CAM's Ascend kernels forward int8 rows with one float32 scale each, got {x.dtype} and {scales.dtype} "
                f"{tuple(scales.shape)}"
            )
        wrong = ((routes.experts < -1) | (routes.experts >= self._num_experts)).nonzero()
        if len(wrong):
            token, k = wrong[0].tolist()
            raise InputError(
                f"topk_idx[{token}, {k}] is {int(routes.experts[token, k])}: allowed are -1 and 0 to "
                f"{self._num_experts - 1} (num_experts {self._num_experts})"
            )

    def _check_device(self, x: Tensor) -> None:
        if x.device.type != self._device.type:
            raise InputError(
                f"this buffer works on {self._device.type} tensors since its first dispatch, got {x.device}"
            )

    def _limit(self) -> int:
        return int(self._group.config.window_limit or 0)

    # --- agreement ------------------------------------------------------------------------------------------

    def _agree(self, operation: str, part: _Part, timeout_s: float | None) -> list[_Part]:
        """Every rank's part, by rank. Raises Mismatch on all ranks when two differ."""
        group = self._group
        payloads = [msgspec.msgpack.encode(part)] * group.size
        told = group.exchange(payloads, operation=operation, timeout=timeout_s)
        everyone = [msgspec.msgpack.decode(payload, type=_Part) for payload in told]
        for rank, theirs in enumerate(everyone):
            for field, mine in part.same.items():
                if theirs.same.get(field) != mine:
                    raise Mismatch(
                        f"group {group.name!r}, {operation}: {field} is {mine} on rank {group.rank} and "
                        f"{theirs.same.get(field)} on rank {rank}",
                        field=field,
                        mine=mine,
                        rank=rank,
                        theirs=str(theirs.same.get(field)),
                    )
        return everyone

    def _received(self, counts: Tensor) -> list[int]:
        """counts [W, E] -> rows that each rank receives, padding included."""
        padded = -(-counts.sum(0) // self._alignment) * self._alignment
        return [int(padded[each.start : each.stop].sum()) for each in self._ranges]

    def _grown(
        self, operation: str, everyone: Sequence[_Part], received: Sequence[int], timeout_s: float | None
    ) -> kernels.ExpertParallel:
        """The kernels over windows that hold this call. Collective where they must grow: all ranks see the same."""
        needed = {
            "topk": everyone[0].topk,
            "hidden": everyone[0].hidden,
            "row_bytes": everyone[0].row_bytes,
            "tokens": max(1, *(part.tokens for part in everyone)),
            "rows": max(1, *received),
        }
        if self._kernels is not None and all(self._sizes[name] >= size for name, size in needed.items()):
            return self._kernels
        needed = {name: max(size, self._sizes.get(name, 0)) for name, size in needed.items()}
        # Up to twice as much, so that batches that grow slowly do not replace the windows each time.
        generous = needed | {name: power_of_two(needed[name]) for name in ("tokens", "rows")}
        for sizes in (generous, needed):
            layout = self._layout_of(sizes)
            short = [rank for rank, part in enumerate(everyone) if layout.nbytes > part.limit]
            if not short:
                break
        else:
            rank = max(short, key=lambda each: received[each])
            raise OutOfWindowMemory(
                f"group {self._group.name!r}, {operation}: windows of {layout.nbytes} bytes are needed, rank {rank} "
                f"allows {everyone[rank].limit} (knob: window_limit, CAM_WINDOW_LIMIT)",
                rank=rank,
                requested=layout.nbytes,
                limit=everyone[rank].limit,
            )
        self._kernels = self._windows = None  # no peer writes any more: all are in this call
        windows = open_windows(self._group, layout.nbytes, self._device, timeout_s or self._group.timeout_s)
        own = kernels.ExpertParallel(
            self._launcher,
            Window(layout, windows.memory, windows.bases),
            self._group.rank,
            alignment=self._alignment,
            watch=self._watch,
        )
        self._windows, self._sizes, self._kernels = windows, sizes, own
        return own

    def _layout_of(self, sizes: Mapping[str, int]) -> WindowLayout:
        try:
            return WindowLayout(
                world=self._group.size,
                experts=self._num_experts,
                topk=sizes["topk"],
                hidden=sizes["hidden"],
                element_bytes=-(-sizes["row_bytes"] // sizes["hidden"]),
                tokens=sizes["tokens"],
                rows=sizes["rows"],
                blocks=self._launcher.cores,
            )
        except AscendError as error:  # the same on all ranks
            raise InputError(f"CAM's Ascend kernels: {error}") from None

    # --- waiting, failing -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Called between looks of every wait."""
        self._lives.check()
        windows = self._windows
        alarm = None if windows is None else windows.alarm()
        if alarm is not None:
            raise gave_up(self._group, self._lives.operation, alarm)
        if self._device.type == "cpu":
            time.sleep(_PAUSE_S)

    @contextlib.contextmanager
    def _failing(self, operation: str, timeout_s: float | None) -> Iterator[None]:
        """Runs launches with a deadline; whatever ends them early breaks the group, here and at the peers."""
        group, start = self._group, time.monotonic()
        if self._kernels is not None:
            self._kernels.timeout_s = group.timeout_s if timeout_s is None else timeout_s
        self._lives.begin(operation, start)
        try:
            yield
        except WaitExpired as late:
            who = "rank" + ("s " if len(late.late) > 1 else " ") + ", ".join(map(str, late.late))
            message = (
                f"group {group.name!r}, {operation} ({late.phase}): {who} did not arrive within {late.waited_s:.3g} s"
            )
            group.abort(message)  # no alarm: peers that wait for the same rank find out themselves, and by name
            raise Timeout(
                message, operation=operation, phase=late.phase, ranks=late.late, waited_s=late.waited_s
            ) from None
        except PeerLost:
            raise  # everybody learns it the same way
        except GroupAborted as error:
            group.abort(str(error))
            raise
        except BaseException as error:
            reason = f"group {group.name!r}, {operation}: rank {group.rank} failed: {error!r}"
            group.abort(reason)
            if self._windows is not None:
                self._windows.raise_alarm()
            if isinstance(error, AscendError):
                raise CamError(reason) from error
            raise


def check_buffer(num_experts: int, world: int, layout: str, quant: str | None) -> None:
    """Raises InputError for a buffer that these kernels cannot serve."""
    if layout != "expert":
        raise InputError(f"layout={layout!r} is not available with ep_kernels='ascend', allowed is 'expert'")
    if quant not in (None, "int8"):
        raise InputError(f"quant={quant!r} is not available with ep_kernels='ascend', allowed are None and 'int8'")
    for name, value, high in (("num_experts", num_experts, MAX_EXPERTS), ("ranks", world, MAX_RANKS)):
        if value > high:
            raise _beyond(name, value, 1, high)


def _beyond(name: str, value: int, low: int, high: int) -> InputError:
    return InputError(f"{name} is {value}: CAM's Ascend kernels take {low} to {high} (knob: ep_kernels='auto')")


def _mine(sent: Sent) -> OwnSent:
    if not isinstance(sent, OwnSent):
        raise InputError(f"this handle is of a dispatch on another path ({type(sent).__name__})")
    return sent


def _refuse_gradients(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        raise InputError("CAM's Ascend kernels have no gradients: use ep_kernels='auto', or torch.no_grad()")


def _shaped_like(scales: Tensor | None, given: Tensor) -> Tensor | None:
    return scales if scales is None else scales.view(-1, *given.shape[1:])
