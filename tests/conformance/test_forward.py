"""Dispatch and combine against the golden, bit by bit, on every backend."""

from dataclasses import replace

import pytest
import torch

from tests.conformance import golden, programs
from tests.conformance.backends import Backend, on_backends, on_kinds, on_kinds_in_layouts
from tests.conformance.case import PAIRS, ROUTINGS, Case
from tests.conformance.checks import check, check_repeated

WORLDS = (1, 2, 3, 4, 8)
TOKENS = (7, 0, 12, 1, 5, 16, 3, 9)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

in_layouts = pytest.mark.parametrize("layout", ["expert", "rank"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_layouts
@on_backends
def test_every_layout_dtype_and_world(backend: Backend, layout: str, dtype: torch.dtype, world: int) -> None:
    base = Case(TOKENS[:world], hidden=40, experts=10, topk=3, layout=layout, dtype=dtype, bias=True)
    check(backend, base, replace(base, hidden=257, masks=True, bias=False, seed=1))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("quant", ["int8", "fp8"])
@in_layouts
@on_backends
def test_quantised_on_the_way(backend: Backend, layout: str, quant: str, world: int) -> None:
    cases = [
        Case(TOKENS[-world:], hidden=hidden, layout=layout, quant=quant, dtype=dtype, seed=seed)
        for seed, (hidden, dtype) in enumerate((h, d) for h in (1, 128, 300) for d in DTYPES)
    ]
    check(backend, *cases)


@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 96, 127, 128, 129, 255])
@on_backends
def test_every_remainder_of_hidden(backend: Backend, hidden: int) -> None:
    """Vector kernels have a tail: all its lengths, all dtypes, plain and quantised."""
    cases = [
        Case((5, 4), hidden=hidden, layout=layout, dtype=dtype, quant=quant, bias=True)
        for layout in ("expert", "rank")
        for dtype in DTYPES
        for quant in (None, "int8", "fp8")
    ]
    check(backend, *cases)


@in_layouts
@on_backends
def test_wide_rows(backend: Backend, layout: str) -> None:
    check(backend, Case((33, 20), hidden=7168, experts=16, topk=8, layout=layout, routing="distinct"))
    check(backend, Case((33, 20), hidden=3072, experts=16, topk=8, layout=layout, quant="fp8"))


@on_backends
def test_non_temporal_stores(backend: Backend) -> None:
    """The same bits when every call is large enough for non-temporal stores (threshold 0)."""
    cases = [
        Case((9, 6), hidden=hidden, layout=layout, quant=quant, bias=True)
        for layout in ("expert", "rank")
        for hidden in (1, 31, 64, 257)
        for quant in (None, "int8", "fp8")
    ]
    check(backend, *cases, nontemporal_threshold=0)


@pytest.mark.parametrize("threads", [1, 2, 4])
@in_layouts
@on_kinds
def test_the_number_of_threads_changes_nothing(backend: Backend, layout: str, threads: int) -> None:
    check(backend, Case((70, 33), hidden=512, experts=9, topk=4, layout=layout, bias=True), threads=threads)


@pytest.mark.parametrize("routing", ROUTINGS)
@in_layouts
@on_kinds
def test_routings(backend: Backend, layout: str, routing: str) -> None:
    base = Case(TOKENS[:4], layout=layout, topk=4, routing=routing)
    check(
        backend,
        base,
        replace(base, experts=10, masks=True),
        replace(base, experts=3),
        replace(base, experts=1),
    )


@pytest.mark.parametrize("alignment", [1, 2, 8, 128])
@on_kinds
def test_alignment(backend: Backend, alignment: int) -> None:
    base = Case((6, 0, 11), experts=7, topk=3, alignment=alignment)
    check(backend, base, replace(base, quant="int8"), replace(base, quant="fp8"), replace(base, weights=False))


@pytest.mark.parametrize("pair", PAIRS)
@in_layouts
@on_kinds
def test_already_quantised_pairs_are_forwarded(backend: Backend, layout: str, pair: str) -> None:
    base = Case((6, 0, 11), hidden=36, layout=layout, prequantised=pair, out_hidden=64)
    check(backend, base, replace(base, strided=True))
    if layout == "expert":
        check(backend, replace(base, alignment=4))


@in_layouts
@on_kinds
def test_index_types_and_strides(backend: Backend, layout: str) -> None:
    base = Case((6, 4, 11), layout=layout, bias=True)
    check(backend, replace(base, idx_dtype=torch.int32), replace(base, strided=True))
    check(
        backend,
        replace(base, strided=True, idx_dtype=torch.int32, quant="int8"),
        replace(base, weights=False),
    )


@in_layouts
@on_kinds
def test_combine_takes_another_hidden_and_dtype(backend: Backend, layout: str) -> None:
    base = Case((6, 4, 11), hidden=32, layout=layout, bias=True)
    check(
        backend,
        *(replace(base, out_hidden=h, out_dtype=d) for h in (1, 20, 96) for d in DTYPES),
        replace(base, quant="int8", out_dtype=torch.float32),
    )


@on_kinds_in_layouts
def test_tensors_in_window_memory(backend: Backend, layout: str) -> None:
    case = Case((6, 0, 11), layout=layout, bias=True)
    with backend.ranks(3) as ranks:
        golden.check_forward(case, ranks.run(programs.window_forward, case))


@pytest.mark.parametrize(("layout", "alignment"), [("expert", 1), ("expert", 8), ("rank", 1)])
@on_kinds
def test_a_handle_repeats_its_routing(backend: Backend, layout: str, alignment: int) -> None:
    case = Case((6, 0, 11), layout=layout, alignment=alignment, masks=True, bias=True)
    check_repeated(backend, case, replace(case, hidden=50, out_hidden=50, dtype=torch.float32, out_dtype=torch.float32))


@pytest.mark.parametrize("quant", ["int8", "fp8"])
@in_layouts
@on_kinds
def test_a_handle_repeats_its_routing_quantised(backend: Backend, layout: str, quant: str) -> None:
    case = Case((6, 0, 11), layout=layout, quant=quant)
    check_repeated(backend, case, replace(case, hidden=260, out_hidden=32))


@in_layouts
@on_kinds
def test_more_than_the_npu_kernels_allow(backend: Backend, layout: str) -> None:
    """CAM's NPU kernels stop at 512 experts and top-k 16; limits here come from memory only."""
    check(backend, Case((9, 4), experts=1000, topk=40, layout=layout, routing="distinct"))
    check(backend, Case((3, 4), experts=5, topk=70, layout=layout))


@pytest.mark.parametrize("quant", [None, "int8", "fp8"])
@in_layouts
@on_backends
def test_nan_infinity_and_denormals(backend: Backend, layout: str, quant: str | None) -> None:
    base = Case((30, 20), hidden=70, layout=layout, quant=quant, special=True, bias=True)
    check(backend, *(replace(base, dtype=dtype, seed=seed) for seed, dtype in enumerate(DTYPES * 2)))


@on_kinds
def test_every_bit_of_a_row_arrives(backend: Backend) -> None:
    """Rows are moved, not computed with: payloads of NaN and the sign of zero too."""
    with backend.ranks(2) as ranks:
        for layout in backend.layouts:
            for dtype in DTYPES:
                assert all(ranks.run(programs.special_values, layout, dtype))
