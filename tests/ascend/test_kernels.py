"""Each operation, run in this process from its Ascend IR and from its final HIVM, against plain torch."""

import itertools

import pytest
import torch

from cam_kernels import reference
from cam_kernels.ascend import buckets, experts, hivm, paging
from cam_kernels.ascend.errors import LimitExceeded
from cam_kernels.ascend.kernels.notify import WAIT_FLAGS
from cam_kernels.ascend.launch import HivmLauncher, NativeLauncher
from cam_kernels.ascend.quantising import dequant_int8, quant_int8
from cam_kernels.ascend.routing import dispatch_layout
from tests.conformance import golden

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.fixture(params=["linalg", hivm.A2, hivm.A3])
def launcher(request: pytest.FixtureRequest) -> NativeLauncher:
    """The IR that goes into the NPU's compiler, and the one that comes out of it for two chips."""
    return NativeLauncher(cores=3) if request.param == "linalg" else HivmLauncher(target=request.param, cores=3)


@pytest.mark.parametrize(
    ("tokens", "topk", "num_experts"), [(37, 4, 16), (1, 1, 1), (0, 3, 5), (64, 16, 512), (9, 5, 3)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("masked", [False, True])
def test_layout(
    launcher: NativeLauncher, tokens: int, topk: int, num_experts: int, dtype: torch.dtype, masked: bool
) -> None:
    idx = torch.randint(-1, num_experts, (tokens, topk), dtype=dtype)
    mask = torch.rand(tokens) < 0.6 if masked else None
    found = dispatch_layout(launcher, idx, num_experts, mask)
    seen = idx if mask is None else torch.where(mask[:, None], idx, -1)
    counts, position = reference.get_dispatch_layout(seen.long(), num_experts)
    assert torch.equal(found.counts, counts)
    assert torch.equal(found.position, position)


def test_layout_does_not_depend_on_the_grid() -> None:
    idx = torch.randint(-1, 20, (53, 6))
    layouts = [
        dispatch_layout(NativeLauncher(cores=cores, threads=threads), idx, 20)
        for cores, threads in ((1, 1), (7, 1), (48, 3))
    ]
    assert all(torch.equal(found.position, layouts[0].position) for found in layouts)


@pytest.mark.parametrize("hidden", [1, 31, 64, 300, 5000, 8192])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_quantisation_is_bit_exact(launcher: NativeLauncher, hidden: int, dtype: torch.dtype) -> None:
    x = (torch.randn(9, hidden) * 2.0 ** torch.arange(-4, 5)[:, None]).to(dtype)
    x[2] = 0
    x[3, -1], x[5, 0], x[6, hidden // 2] = float("nan"), float("inf"), -float("inf")
    x[7, 0], x[7, -1] = float("inf"), float("nan")
    q, scale = quant_int8(launcher, x)
    wanted_q, wanted_scale = reference.quant_int8(x)
    assert torch.equal(q, wanted_q)
    golden.same_bits(scale, wanted_scale, "scale")
    back = dequant_int8(launcher, q, scale.contiguous(), dtype)
    golden.same_bits(back, reference.dequant_int8(wanted_q, wanted_scale).to(dtype), "back")


def test_quantisation_rounds_ties_to_even_and_saturates(launcher: NativeLauncher) -> None:
    ties = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    assert quant_int8(launcher, ties)[0].tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]
    denormals = torch.tensor([[2e-43, -2e-43, 1e-45, 0.0]])
    q, scale = quant_int8(launcher, denormals)
    wanted = reference.quant_int8(denormals)
    assert torch.equal(q, wanted[0])
    assert torch.equal(scale, wanted[1])


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("counts", [[5, 0, 40, 1], [0, 0, 3], [130], [0, 0]])
@pytest.mark.parametrize(("depth", "width"), [(64, 48), (130, 257)])
def test_grouped_matmul_is_exact(launcher: NativeLauncher, counts: list[int], depth: int, width: int) -> None:
    x = torch.randint(-128, 128, (sum(counts), depth), dtype=torch.int8)
    weight = torch.randint(-128, 128, (len(counts), depth, width), dtype=torch.int8)
    out = experts.grouped_matmul(launcher, x, weight, ends_of(counts), rows=32, columns=64, depth=32)
    parts = [part.int() @ weight[g].int() for g, part in enumerate(x.split(counts))]
    assert torch.equal(out, torch.cat(parts).int())


def test_grouped_matmul_at_the_edge_of_int32(launcher: NativeLauncher) -> None:
    x = torch.full((2, 8192), -128, dtype=torch.int8)
    out = experts.grouped_matmul(
        launcher, x, x[:1].t().contiguous()[None], ends_of([2]), rows=16, columns=16, depth=128
    )
    assert out.tolist() == [[128 * 128 * 8192]] * 2


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("counts", [[4, 0, 9, 2], [0, 3]])
def test_expert_feed_forward(launcher: NativeLauncher, counts: list[int], dtype: torch.dtype) -> None:
    groups, hidden, inner, rows = len(counts), 64, 48, sum(counts)
    x, scale = reference.quant_int8(torch.randn(rows, hidden))
    weights = experts.ExpertWeights(
        torch.randint(-127, 128, (groups, hidden, 2 * inner), dtype=torch.int8),
        torch.rand(groups, 2 * inner) / 100,
        torch.randint(-127, 128, (groups, inner, hidden), dtype=torch.int8),
        torch.rand(groups, hidden) / 100,
    )
    y = experts.feed_forward(launcher, x, scale, ends_of(counts), weights, dtype)
    group = torch.repeat_interleave(torch.arange(groups), torch.tensor(counts))
    up = (
        torch.einsum("rh,rhi->ri", x.double(), weights.up[group].double()).float()
        * scale[:, None]
        * weights.up_scale[group]
    )
    gate, value = up.split(inner, dim=1)
    middle, middle_scale = reference.quant_int8(torch.nn.functional.silu(gate) * value)
    wanted = torch.einsum("ri,rih->rh", middle.double(), weights.down[group].double()).float()
    wanted = wanted * middle_scale[:, None] * weights.down_scale[group]
    # exp() of libm and of torch differ in the last bit, which may move one int8 of the middle by one.
    error = (y.float() - wanted).abs().mean() / wanted.abs().mean()
    assert error < 0.005
    assert y.dtype == dtype


def test_expert_feed_forward_refuses_what_does_not_fit() -> None:
    weight = torch.zeros(1, 4, 8, dtype=torch.int8)
    with pytest.raises(LimitExceeded, match="down_scale"):
        experts.ExpertWeights(weight, torch.zeros(1, 8), torch.zeros(1, 4, 4, dtype=torch.int8), torch.zeros(1, 3))


ORDERS = tuple(itertools.product(("NHD", "HND"), repeat=2))
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def as_nhd(pages: torch.Tensor, order: str) -> torch.Tensor:
    return pages if order == "NHD" else pages.transpose(1, 2)


def random_cache(pages: int, shape: paging.PageShape, dtype: torch.dtype) -> torch.Tensor:
    dims = (shape.block_size, shape.heads) if shape.order == "NHD" else (shape.heads, shape.block_size)
    return torch.randint(-100, 100, (pages, *dims, shape.head_dim), dtype=dtype)


@pytest.mark.parametrize(("source_order", "target_order"), ORDERS)
@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_pages_move_between_caches(
    launcher: NativeLauncher, source_order: str, target_order: str, element_bytes: int
) -> None:
    """Heads 2..4 of a cache with 6 heads become heads 1..3 of one with 4: unequal tensor parallelism."""
    source = paging.PageShape(5, 6, 24, source_order)  # type: ignore[arg-type]
    target = paging.PageShape(5, 4, 24, target_order)  # type: ignore[arg-type]
    ours, theirs = random_cache(7, source, WORDS[element_bytes]), random_cache(9, target, WORDS[element_bytes])
    wanted = theirs.clone()
    from_pages, to_pages = torch.tensor([6, 0, 3]), torch.tensor([8, 2, 1])
    as_nhd(wanted, target_order)[to_pages, :, 1:4] = as_nhd(ours, source_order)[from_pages, :, 2:5]
    plan = paging.plan_pages(source, target, heads=3, from_head=2, to_head=1)
    paging.copy_heads(launcher, plan, ours.data_ptr(), theirs.data_ptr(), from_pages, to_pages, element_bytes)
    assert torch.equal(theirs, wanted)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_pages_gather_and_scatter(launcher: NativeLauncher, order: str) -> None:
    shape = paging.PageShape(16, 2, 128, order)  # type: ignore[arg-type]
    cache, flat = random_cache(8, shape, torch.int16), random_cache(3, shape, torch.int16)
    pages, count = torch.tensor([5, 1, 7], dtype=torch.int32), torch.arange(3, dtype=torch.int32)
    plan = paging.plan_pages(shape, shape, heads=2)
    paging.copy_heads(launcher, plan, cache.data_ptr(), flat.data_ptr(), pages, count, 2)
    assert torch.equal(flat, cache[pages.long()])
    back = torch.zeros_like(cache)
    paging.copy_heads(launcher, plan, flat.data_ptr(), back.data_ptr(), count, pages, 2)
    assert torch.equal(back[pages.long()], flat)
    assert back.count_nonzero() == flat.count_nonzero()


def test_pages_that_do_not_match_are_refused() -> None:
    shape = paging.PageShape(16, 2, 128)
    with pytest.raises(LimitExceeded, match="heads"):
        paging.plan_pages(shape, shape, heads=2, from_head=1)
    with pytest.raises(LimitExceeded, match="block_size"):
        paging.plan_pages(shape, paging.PageShape(8, 2, 128), heads=2)


def test_buckets(launcher: NativeLauncher) -> None:
    tensors = [torch.randn(n).to(d) for n, d in ((3, torch.bfloat16), (200_001, torch.float32), (0, torch.float32))]
    tensors += [torch.randint(-9, 9, (7,), dtype=torch.int8), torch.randn(33, 5).half()]
    odd = torch.randint(-9, 9, (12,), dtype=torch.int8)[1:]  # an address that is no multiple of 4
    tensors.append(odd)
    plan = buckets.plan_bucket([t.numel() * t.element_size() for t in tensors])
    bucket = torch.zeros(plan.nbytes, dtype=torch.int8)
    buckets.pack(launcher, plan, tensors, bucket)
    for tensor, offset, size in zip(tensors, plan.offsets, plan.sizes, strict=True):
        assert torch.equal(bucket[offset : offset + size], tensor.view(torch.int8).flatten())
    copies = [torch.zeros_like(t) for t in tensors]
    buckets.unpack(launcher, plan, bucket, copies)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_a_wait_looks_a_bounded_number_of_times_and_says_what_is_missing(launcher: NativeLauncher) -> None:
    flags = torch.zeros(70, 8, dtype=torch.int32)
    flags[:, :] = 4
    flags[[0, 69]] = 3
    flags[5] = 9  # a peer that is already ahead
    arrived = torch.full((70, 8), -1, dtype=torch.int32)
    launcher.launch(WAIT_FLAGS, 2, flags, arrived, 70, 4, 25, FP=64)
    assert (arrived[:, 0] == 0).nonzero()[:, 0].tolist() == [0, 69]
