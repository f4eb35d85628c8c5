"""Every kernel with the variants that it promises: what is compiled for all targets and checked on every commit.

The declared range: H from 128 to 8192, top-k up to 16, experts up to 512, all element types. Shapes are run-time
arguments of the kernels; what compiles separately are the block constants that they lead to. UB grows with every block
constant, so the ends of the range decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cam_kernels.ascend import experts
from cam_kernels.ascend.hivm_check import Expectation
from cam_kernels.ascend.kernel import Constant, Kernel, Variant
from cam_kernels.ascend.kernels import bucket, combine, dispatch, grouped_matmul, layout, notify, pages, quant
from cam_kernels.ascend.tiling import block
from cam_kernels.ascend.window import MAX_EXPERTS, MAX_HIDDEN, MAX_TOPK, power_of_two

HIDDEN = (128, MAX_HIDDEN)
TOPK = (1, MAX_TOPK)
EXPERTS = (8, MAX_EXPERTS)
FLOATS = ("bf16", "fp16", "fp32")
_NOTHING = Expectation()
_SENDS_AND_FLAGS = Expectation(sends=True, flags=True)


@dataclass(frozen=True)
class Declared:
    """A variant, and what the checker must recognise in it."""

    variant: Variant
    expected: Expectation = _NOTHING

    def __str__(self) -> str:
        return str(self.variant)


def _types(kernel: Kernel, **pointers: str) -> dict[str, str]:
    """Argument types: the given pointers (without _ptr), int32 for other pointers, i32 or i64 for numbers."""
    result = {}
    for name in kernel.arguments:
        if name.endswith("_ptr"):
            base = name.removesuffix("_ptr")
            result[name] = "*" + pointers.get(base, "i64" if base.endswith("peers") or base == "bases" else "i32")
        else:
            result[name] = "i64" if name in kernel.wide else "i32"
    return result


def _variant(kernel: Kernel, constants: Mapping[str, Constant], **pointers: str) -> Variant:
    return kernel.variant(_types(kernel, **pointers), constants)


def declared() -> tuple[Declared, ...]:
    """All of them, each once."""
    families = (
        _layout_kernels, _notify_kernels, _dispatch_kernels, _combine_kernels, _row_kernels, _copy_kernels
    )  # fmt: skip
    return tuple(dict.fromkeys(variant for family in families for variant in family()))


def _layout_kernels() -> Iterator[Declared]:
    for lanes in EXPERTS:
        for index, masked in (("i32", False), ("i64", True)):
            yield Declared(_variant(layout.COUNT_EXPERTS, {"EP": lanes, "MASKED": masked}, topk=index, active="i8"))
            for topk in TOPK:
                constants = {"KP": power_of_two(topk), "EP": lanes, "MASKED": masked}
                yield Declared(_variant(layout.ASSIGN_POSITIONS, constants, topk=index, active="i8"))
        yield Declared(_variant(layout.SCAN_HISTOGRAMS, {"EP": lanes, "EB": min(lanes, 128)}))


def _notify_kernels() -> Iterator[Declared]:
    yield Declared(_variant(notify.WAIT_FLAGS, {"FP": 64}), Expectation(waits=True))
    yield Declared(_variant(notify.RAISE_FLAG, {}), Expectation(flags=True))
    for count in EXPERTS:
        row = power_of_two(notify.HEADER + count)
        yield Declared(_variant(notify.PUSH_COUNTS, {"ROW": row}), _SENDS_AND_FLAGS)
        for local in sorted({1, 16, count}):
            yield Declared(_variant(notify.PLAN_ROWS, {"ROW": row, "HEADER": notify.HEADER, "EL": power_of_two(local)}))


def _dispatch_kernels() -> Iterator[Declared]:
    pointers = {"scale": "fp32", "weight": "fp32"}
    for hidden in HIDDEN:
        for element in (*FLOATS, "i8"):
            constants = {"BH": block("push_rows", hidden), "QUANT": False, "SCALED": element == "i8", "WEIGHTED": True}
            yield Declared(_variant(dispatch.PUSH_ROWS, constants, x=element, topk="i64", **pointers), _SENDS_AND_FLAGS)
            yield Declared(_variant(dispatch.CLEAR_PADDING, {"BH": block("clear_padding", hidden)}, rows=element))
        for element in FLOATS:
            for weighted in (False, True):
                constants = {
                    "BH": block("push_rows quantised", hidden), "QUANT": True, "SCALED": False, "WEIGHTED": weighted
                }  # fmt: skip
                yield Declared(
                    _variant(dispatch.PUSH_ROWS, constants, x=element, topk="i32", **pointers), _SENDS_AND_FLAGS
                )
    yield Declared(_variant(dispatch.UNPACK_META, {"RP": 64}, **pointers))


def _combine_kernels() -> Iterator[Declared]:
    for hidden in HIDDEN:
        for element in FLOATS:
            yield Declared(
                _variant(combine.PUSH_RESULTS, {"BH": block("push_results", hidden)}, y=element), _SENDS_AND_FLAGS
            )
            for topk in TOPK:
                for weighted, biased in ((True, True), (False, False)):
                    constants = {
                        "BH": block("sum_results", hidden), "KP": power_of_two(topk), "WEIGHTED": weighted,
                        "BIASED": biased,
                    }  # fmt: skip
                    types = {"slots": element, "weight": "fp32", "bias": element, "out": element}
                    yield Declared(_variant(combine.SUM_RESULTS, constants, **types), Expectation(waits=True))


def _row_kernels() -> Iterator[Declared]:
    scales = {"scale": "fp32", "token_scale": "fp32", "channel_scale": "fp32", "q": "i8"}
    for hidden in HIDDEN:
        for element in FLOATS:
            yield Declared(
                _variant(quant.QUANT_ROWS, {"BH": block("quant_rows", hidden)}, x=element, q="i8", scale="fp32")
            )
            yield Declared(
                _variant(quant.DEQUANT_ROWS, {"BH": block("dequant_rows", hidden)}, x=element, q="i8", scale="fp32")
            )
            yield Declared(
                _variant(grouped_matmul.DEQUANT_OUTPUT, {"BN": block("dequant_output", hidden)}, y=element, **scales)
            )
        yield Declared(_variant(grouped_matmul.SWIGLU_REQUANT, {"BI": block("swiglu_requant", hidden)}, **scales))
    tile = {"BM": experts.TILE_ROWS, "BN": experts.TILE_COLUMNS, "BK": experts.TILE_DEPTH}
    yield Declared(_variant(grouped_matmul.MATMUL_INT8, tile, x="i8", weight="i8"))


def _copy_kernels() -> Iterator[Declared]:
    for word, element in ((1, "i8"), (2, "i16"), (4, "i32")):
        # The two ends: runs of one head, and runs that are a page.
        for rows, run in ((16 * 1024 // word // 128, 128), (1, 16 * 1024 // word)):
            yield Declared(_variant(pages.COPY_PAGES, {"BR": rows, "BI": run}, like=element), Expectation(sends=True))
        constants = {"BI": 32 * 1024 // word}
        addresses = {"from": "i64", "to": "i64", "length": "i64"}
        yield Declared(_variant(bucket.COPY_RUNS, constants, like=element, **addresses), Expectation(sends=True))
