"""CAM through its public API, one contender for each way of using it."""

from typing import Literal, cast

import torch

import cam
from cam.bench.contenders import Ready, Timed
from cam.bench.golden import Golden, WrongResult
from cam.bench.plan import Plan

Layout = Literal["expert", "rank"]
Quant = Literal["int8", "fp8"]


class NativeClock:
    """Seconds a group has spent inside native collective calls, as its endpoint counts them."""

    def __init__(self, group: cam.Group) -> None:
        self._endpoint = group.endpoint

    def __call__(self) -> float:
        return sum(float(operation["total_s"]) for operation in self._endpoint.stats().values())


class CamLayout:
    """dispatch and combine in one layout; y, what the experts return, lies in window memory."""

    def __init__(self, group: cam.Group, layout: Layout, golden: Golden, ready: Ready) -> None:
        self.key, self.label = f"cam-{layout}", f"CAM {layout} layout"
        self.rows: str = layout
        self._buffer = cam.ep.Buffer(group, golden.case.experts, layout=layout)
        self._work, self._layout = golden.work, layout
        self._y = ready.window[: len(golden.rows if layout == "expert" else golden.rank_rows)]
        self._native = NativeClock(group)

    def native_s(self) -> float:
        return self._native()

    def check(self, golden: Golden) -> None:
        received, handle = self._buffer.dispatch(self._work.x, self._work.topk_idx, self._work.topk_weights)
        source = received.source.long()
        if self._layout == "expert":
            golden.expect_equal(self.label, "dispatch", received.x, golden.rows)
            golden.expect_equal(self.label, "source", source, golden.source)
            y, wanted = self._y, golden.combined()
        else:
            golden.expect_equal(self.label, "dispatch", received.x, golden.rank_rows)
            golden.expect_equal(self.label, "source", source[:, :2], golden.rank_source)
            y, wanted = golden.rank_y(received.x), golden.rank_combined()
        counts = torch.tensor(received.expert_counts_list)
        golden.expect_equal(self.label, "expert_counts", counts, torch.tensor(golden.counts))
        golden.expect_equal(self.label, "combine", self._buffer.combine(y, handle), wanted)

    def round(self, timed: Timed) -> None:
        received, handle = timed(
            "dispatch",
            lambda: self._buffer.dispatch(self._work.x, self._work.topk_idx, self._work.topk_weights),
        )
        del received
        timed("combine", lambda: self._buffer.combine(self._y, handle))


class CamOutside(CamLayout):
    """combine in the expert layout when y is an ordinary tensor, which CAM first brings into the window."""

    def __init__(self, group: cam.Group, golden: Golden, ready: Ready) -> None:
        super().__init__(group, "expert", golden, ready)
        self.key, self.label = "cam-expert-outside", "CAM expert, y outside"
        self._y = ready.received[: len(golden.rows)]

    def round(self, timed: Timed) -> None:
        received, handle = self._buffer.dispatch(self._work.x, self._work.topk_idx, self._work.topk_weights)
        del received
        timed("combine", lambda: self._buffer.combine(self._y, handle))


class CamQuant:
    """dispatch in the expert layout, quantised on the way. (combine is that of the expert layout.)"""

    rows = ""

    def __init__(self, group: cam.Group, quant: Quant, golden: Golden) -> None:
        self.key, self.label = f"cam-{quant}", f"CAM expert, {quant}"
        self._buffer = cam.ep.Buffer(group, golden.case.experts, layout="expert", quant=quant)
        self._work, self._quant = golden.work, quant
        self._native = NativeClock(group)

    def native_s(self) -> float:
        return self._native()

    def check(self, golden: Golden) -> None:
        from cam_kernels import reference

        received, _ = self._buffer.dispatch(self._work.x, self._work.topk_idx, self._work.topk_weights)
        if received.scales is None:
            raise WrongResult(f"{self.label}: no scales came with the rows")
        quantise = {"int8": reference.quant_int8, "fp8": reference.quant_fp8}[self._quant]
        golden.expect_equal(self.label, "source", received.source.long(), golden.source)
        for start in range(0, len(golden.rows), 4096):  # in parts: the reference works in float32
            part = slice(start, start + 4096)
            values, scales = quantise(golden.rows[part])
            found, wanted = received.x[part].view(torch.uint8), values.view(torch.uint8)
            golden.expect_equal(self.label, "values", found, wanted)
            golden.expect_equal(self.label, "scales", received.scales[part], scales)

    def round(self, timed: Timed) -> None:
        timed(
            "dispatch",
            lambda: self._buffer.dispatch(self._work.x, self._work.topk_idx, self._work.topk_weights),
        )


def cam_contenders(plan: Plan, group: cam.Group, golden: Golden, ready: Ready) -> list[CamLayout | CamQuant]:
    """Those that the plan asks for, in the order of reports."""
    chosen: list[CamLayout | CamQuant] = [
        CamLayout(group, cast(Layout, layout), golden, ready) for layout in reversed(plan.layouts)
    ]
    if "expert" in plan.layouts:
        chosen.append(CamOutside(group, golden, ready))
    if plan.quant:
        chosen += [CamQuant(group, "int8", golden), CamQuant(group, "fp8", golden)]
    return chosen
