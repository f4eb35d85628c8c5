"""The worker half with real engines and caches, without a model: several ranks and instances in one process."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm runs these")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from cam.errors import InputError
from cam_vllm import params
from cam_vllm.metadata import CamMetadata, Load, Loan
from cam_vllm.options import Options
from cam_vllm.params import Agent
from cam_vllm.remotes import OPENING_THREADS
from cam_vllm.worker import CamWorker

BLOCKS, HEADS, SIZE, WIDTH = 16, 4, 32, 32
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


class Instance:
    """The workers of one vLLM instance. caches: [blocks, heads, tokens, 2 * head size] by rank and layer."""

    def __init__(
        self, name: str, tp: int = 1, *, extra: dict[str, object] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.name = name
        heads = max(1, HEADS // tp)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=heads, head_size=WIDTH, dtype=dtype)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        options = Options.parse({"timeout_s": 5, "lease_s": 30, **(extra or {})})
        self.workers = [CamWorker(name, options, config, tp_rank=rank, tp_size=tp) for rank in range(tp)]
        self.caches = []
        for worker in self.workers:
            # One storage for all layers, as vLLM has it.
            whole = torch.zeros(len(LAYERS), BLOCKS, heads, SIZE, 2 * WIDTH, dtype=dtype)
            caches = dict(zip(LAYERS, whole.unbind(0), strict=True))
            worker.register(caches, {}, HEADS)
            self.caches.append(caches)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for layer in LAYERS:
            full = torch.randn(BLOCKS, HEADS, SIZE, 2 * WIDTH, generator=generator)
            for rank, caches in enumerate(self.caches):
                heads = caches[layer].shape[1]
                caches[layer].copy_(full[:, rank * heads : (rank + 1) * heads])

    def full(self, layer: str) -> torch.Tensor:
        return torch.cat([caches[layer] for caches in self.caches], dim=1)

    def lend(self, request: str, lease: str, readers: int = 1) -> None:
        for worker in self.workers:
            worker.begin(CamMetadata(loans=[Loan(request, lease, readers)]))

    def offer(
        self, request: str, blocks: tuple[int, ...], lease: str | None, tokens: int | None = None
    ) -> params.Offer:
        agents = []
        for worker in self.workers:
            handshake = worker.handshake()
            assert handshake is not None
            agents.append(Agent(handshake.host, handshake.port, handshake.engine_id))
        return params.Offer(self.name, request, tuple(agents), blocks, tokens, lease, None)

    def load(self, *loads: Load) -> None:
        for worker in self.workers:
            worker.begin(CamMetadata(loads=list(loads)))

    def results(self, finished: set[str] = frozenset()) -> list[KVConnectorTransferResults]:
        return [worker.results(set(finished)) for worker in self.workers]

    def received(self, *requests: str, finished: set[str] = frozenset()) -> set[int]:
        """Waits until every rank has reported exactly these, once; returns the failed blocks."""
        missing = [set(requests) for _ in self.workers]
        failed: set[int] = set()

        def step() -> bool:
            for worker, result, left in zip(self.workers, self.results(finished), missing, strict=True):
                assert result.finished_recving <= left, "reported twice, or never asked for"
                left -= result.finished_recving
                failed.update(worker.take_failed_blocks())
            return not any(missing)

        until(step)
        return failed

    def sent(self, request: str) -> None:
        left = [True for _ in self.workers]

        def step() -> bool:
            for rank, result in enumerate(self.results()):
                left[rank] = left[rank] and request not in result.finished_sending
            return not any(left)

        until(step)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def until(step: Callable[[], bool], within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not step():
        assert time.monotonic() < end, "took too long"
        time.sleep(0.002)


Make = Callable[..., Instance]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Instance] = []

    def instance(*arguments: object, **keywords: object) -> Instance:
        made.append(Instance(*arguments, **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield instance
    for each in made:
        each.close()


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (2, 4)])
def test_loaded_blocks_are_those_of_the_prefill(make: Make, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = make("prefill", prefill_tp), make("decode", decode_tp)
    prefill.fill(1)
    prefill.lend("p", "lease")
    # 100 tokens in 4 blocks; 64 are cached here: the last two blocks move.
    decode.load(Load("d", prefill.offer("p", (5, 2, 9, 7), "lease", 100), (3, 1), first_token=64, tokens=36))
    assert decode.received("d") == set()
    for layer in LAYERS:
        assert torch.equal(decode.full(layer)[[3, 1]], prefill.full(layer)[[9, 7]])
        assert not decode.full(layer)[[0, 2, *range(4, BLOCKS)]].any()
    prefill.sent("p")


def test_several_decodes_fetch_one_prefill(make: Make) -> None:
    prefill, first, second = make("prefill"), make("first", 2), make("second")
    prefill.fill(2)
    prefill.lend("p", "lease", readers=2)
    for decode, name in ((first, "a"), (second, "b")):
        assert not any(result.finished_sending for result in prefill.results())
        decode.load(Load(name, prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
        assert decode.received(name) == set()
        assert torch.equal(decode.full(LAYERS[0])[4], prefill.full(LAYERS[0])[5])
    prefill.sent("p")


def test_a_declined_offer_frees_the_prefill_and_is_not_reported(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode", 2)
    prefill.lend("p", "lease")
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), ()))

    def step() -> bool:
        assert not any(result.finished_recving for result in decode.results())
        return any("p" in result.finished_sending for result in prefill.results())

    until(step)


def test_a_reader_that_is_quicker_than_the_loan_loses_nothing(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.fill(3)
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
    assert decode.received("d") == set()
    assert not any(result.finished_sending for result in prefill.results())
    prefill.lend("p", "lease")
    prefill.sent("p")


def test_a_loan_that_nobody_fetches_ends(make: Make) -> None:
    prefill = make("prefill", extra={"lease_s": 0.3})
    prefill.lend("p", "lease")
    prefill.sent("p")
    stats = prefill.workers[0].stats.take()
    assert stats is not None
    assert stats.data["counters"]["expired_loans"] == 1


def test_a_loan_that_has_ended_gives_failed_blocks_and_never_data(make: Make) -> None:
    prefill, decode = make("prefill", extra={"lease_s": 0.2}), make("decode")
    prefill.fill(4)
    prefill.lend("p", "lease")
    prefill.sent("p")
    decode.load(Load("d", prefill.offer("p", (5, 6), "lease"), (4, 3), tokens=2 * SIZE))
    assert decode.received("d") == {4, 3}


def test_an_instance_that_is_not_there_fails_the_load_in_time(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode", extra={"timeout_s": 2})
    offer = prefill.offer("p", (5,), "lease")
    prefill.close()
    begin = time.monotonic()
    decode.load(Load("d", offer, (4,), tokens=SIZE))
    assert decode.received("d") == {4}
    assert time.monotonic() - begin < 20
    stats = decode.workers[0].stats.take()
    assert stats is not None
    assert stats.data["counters"]["failed_loads"] == 1


def test_a_restarted_instance_is_not_taken_for_the_old_one(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    offer = prefill.offer("p", (5,), "lease")
    stranger = params.Offer(
        "prefill", "p", (Agent(offer.agents[0].host, offer.agents[0].port, "old"),), (5,), None, None, None
    )
    decode.load(Load("d", stranger, (4,), tokens=SIZE))
    assert decode.received("d") == {4}
    # The new one is opened as if nothing had happened.
    prefill.fill(5)
    prefill.lend("p", "lease")
    decode.load(Load("e", offer, (6,), tokens=SIZE))
    assert decode.received("e") == set()
    assert torch.equal(decode.full(LAYERS[1])[6], prefill.full(LAYERS[1])[5])


def test_an_aborted_load_is_reported_once_and_not_as_failed(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.lend("p", "lease")
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
    assert decode.received("d", finished={"d"}) == set()
    for _ in range(20):
        assert not decode.results({"d"})[0].finished_recving
    prefill.sent("p")


def test_an_abort_before_the_instance_is_open_still_frees_both_sides(make: Make) -> None:
    prefill, decode = make("prefill"), make("decode")
    prefill.lend("p", "lease")
    go_on = threading.Event()
    for _ in range(OPENING_THREADS):
        decode.workers[0]._remotes._threads.submit(go_on.wait, 60)
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
    decode.results({"d"})  # cancelled while the opening waits for a thread
    go_on.set()
    assert decode.received("d") == set()
    prefill.sent("p")
    assert not decode.full(LAYERS[0]).any()


def test_other_geometry_is_refused_and_fails_the_load(make: Make) -> None:
    prefill, decode = make("prefill", dtype=torch.bfloat16), make("decode")
    prefill.lend("p", "lease")
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
    assert decode.received("d") == {4}


def test_private_memory_is_read_with_cma(make: Make) -> None:
    prefill, decode = make("prefill", extra={"kv_memory": "vllm"}), make("decode")
    prefill.fill(6)
    prefill.lend("p", "lease")
    decode.load(Load("d", prefill.offer("p", (5,), "lease"), (4,), tokens=SIZE))
    assert decode.received("d") == set()
    assert torch.equal(decode.full(LAYERS[0])[4], prefill.full(LAYERS[0])[5])
    stats = decode.workers[0].stats.take()
    assert stats is not None
    assert list(stats.data["loads"]) == ["cma"]


def test_a_view_that_a_layer_holds_moves_along() -> None:
    class Layer:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.kv_cache = tensor

    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
    worker = CamWorker("views", Options.parse({"kv_memory": "cam"}), config, tp_rank=0, tp_size=1)
    whole = torch.zeros(len(LAYERS), BLOCKS, HEADS, SIZE, 2 * WIDTH)
    caches = dict(zip(LAYERS, whole.unbind(0), strict=True))
    layers = {name: Layer(tensor.view(BLOCKS, HEADS, SIZE * 2 * WIDTH)) for name, tensor in caches.items()}
    before = {name: layer.kv_cache.data_ptr() for name, layer in layers.items()}
    worker.register(caches, layers, HEADS)
    try:
        for name, layer in layers.items():
            assert layer.kv_cache.data_ptr() != before[name]
            layer.kv_cache.fill_(3)
            assert (caches[name] == 3).all()
    finally:
        worker.close()


def test_an_unknown_layout_is_refused_by_shape() -> None:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.float32)
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([LAYERS[0]], spec)])
    worker = CamWorker("odd", Options.parse({}), config, tp_rank=0, tp_size=1)
    try:
        with pytest.raises(InputError, match=r"\(2, 16, 32, 4, 32\)"):
            worker.register({LAYERS[0]: torch.zeros(2, BLOCKS, SIZE, HEADS, WIDTH)}, {}, HEADS)
    finally:
        worker.close()


def test_stats_add_up_over_ranks_and_reach_prometheus(make: Make) -> None:
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.config import VllmConfig

    from cam_vllm.stats import CamPromMetrics, CamStats

    prefill, decode = make("prefill"), make("decode", 2)
    prefill.lend("p", "lease")
    decode.load(Load("d", prefill.offer("p", (5, 6), "lease"), (4, 3), tokens=2 * SIZE))
    decode.received("d")
    taken = [worker.stats.take() for worker in decode.workers]
    total = CamStats({"loads": {}, "counters": dict.fromkeys(CamStats().data["counters"], 0)})
    for stats in taken:
        assert stats is not None
        total.aggregate(stats)
    (loads,) = total.data["loads"].values()
    moved = 2 * len(LAYERS) * HEADS * SIZE * 2 * WIDTH * 4
    assert sum(entry[1] for entry in loads) == moved
    assert total.reduce()["shm loads"] == 2
    metrics = CamPromMetrics(
        VllmConfig(), {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["model", "engine"], {0: ["m", "0"]}
    )
    metrics.observe(total.data)
    labels = {"model": "m", "engine": "0", "transport": "shm"}
    assert REGISTRY.get_sample_value("vllm:cam_kv_load_bytes_total", labels) == moved
