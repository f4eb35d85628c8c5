"""CAM's scheduler half in vLLM's real scheduler; what the workers would report is written by hand.

After every test the scheduler must have forgotten all requests, and all blocks must be free again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: `make test-vllm` runs these")

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from adapters.vllm.examples import tiny_models
from adapters.vllm.tests.scheduler_engine import SIZE, Engine, prefilled, request, settle


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    init_none_hash(sha256)
    return tiny_models.make("dense", tmp_path_factory.mktemp("models"))


Make = Callable[..., Engine]


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    made: list[Engine] = []

    def engine(role: str, **options: Any) -> Engine:
        made.append(Engine(model, role, **options))
        return made[-1]

    yield engine
    for each in made:
        each.check_clean()


def test_a_prefill_becomes_a_loan_and_its_blocks_stay_until_it_ends(make: Make) -> None:
    prefill = make("kv_producer")
    before = prefill.free
    asked, answer, metadata = prefilled(prefill, 40)
    (loan,) = metadata.loans
    assert (loan.request, loan.lease, loan.readers) == (asked.request_id, answer["cam_lease"], 1)
    assert len(answer["remote_block_ids"][0]) == 3
    assert answer["remote_num_tokens"] == 40
    assert answer["cam_agents"] == [["127.0.0.1", 1111, "engine-of-kv_producer"]]
    assert prefill.free == before - 3
    prefill.report()
    assert prefill.free == before - 3
    _, _ = prefill.step(sent={asked.request_id})
    assert prefill.free == before


def test_a_decode_loads_the_whole_prompt_and_then_answers(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill, 40)
    settle(prefill, asked)
    wanted = decode.add(request(40, answer))
    metadata, _ = decode.step()
    (load,) = metadata.loads
    assert (load.request, load.first_token, load.tokens) == (wanted.request_id, 0, 40)
    assert load.offer.blocks == tuple(answer["remote_block_ids"][0])
    assert len(load.blocks) == 3
    assert wanted.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert not decode.step()[0].loads  # once
    decode.step(received={wanted.request_id})
    assert wanted.request_id in decode.run_to_end()
    # Two calls of update_state_after_alloc for one load: nothing was declined or loaded again.
    assert not decode.schedule().loads


def test_a_prefix_hit_loads_only_the_tail(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    start = [(5 * i + 1) % 500 for i in range(32)]
    decode.add(request(start, None))
    decode.run_to_end()
    asked, answer, _ = prefilled(prefill, [*start, *range(60, 76)])
    settle(prefill, asked)
    wanted = decode.add(request([*start, *range(60, 76)], answer))
    metadata, _ = decode.step()
    (load,) = metadata.loads
    assert (load.first_token, load.tokens, len(load.blocks)) == (32, 16, 1)
    decode.step(received={wanted.request_id})
    decode.run_to_end()


def test_a_full_prefix_hit_only_declines(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    prompt = [(5 * i + 1) % 500 for i in range(33)]
    decode.add(request(prompt, None))
    decode.run_to_end()
    asked, answer, _ = prefilled(prefill, prompt[:32])
    settle(prefill, asked)
    wanted = decode.add(request(prompt[:33], answer))
    metadata, _ = decode.step()
    (load,) = metadata.loads
    assert load.blocks == ()
    assert load.offer.lease == answer["cam_lease"]
    assert wanted.status == RequestStatus.RUNNING
    decode.run_to_end()


@pytest.mark.parametrize("stage", ["queued", "loading", "loaded", "running"])
def test_a_decode_that_is_aborted_frees_both_sides_at_every_stage(make: Make, stage: str) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill)
    settle(prefill, asked)
    wanted = decode.add(request(40, answer))
    if stage == "queued":
        decode.abort(wanted)
        (load,) = decode.schedule().loads
        assert load.blocks == ()  # the prefill side is told
        assert load.offer.lease == answer["cam_lease"]
        decode.report()
        return
    metadata, _ = decode.step()
    assert metadata.loads[0].blocks
    if stage == "loading":
        free = decode.free
        decode.abort(wanted)
        decode.step()
        assert decode.free == free  # the load may still write into them
        decode.step(received={wanted.request_id})
        return
    decode.step(received={wanted.request_id})
    if stage == "running":
        decode.step()
        assert wanted.status == RequestStatus.RUNNING
    decode.abort(wanted)


@pytest.mark.parametrize("stage", ["queued", "running"])
def test_a_prefill_that_is_aborted_offers_nothing(make: Make, stage: str) -> None:
    prefill = make("kv_producer")
    asked = prefill.add(request(40, {"do_remote_decode": True}, max_tokens=5))
    if stage == "running":
        prefill.step()
    prefill.abort(asked)
    assert not prefill.schedule().loans


def test_reports_of_forgotten_requests_are_ignored(make: Make) -> None:
    """vllm#43226, #49089, #46240: late, double and strange reports kill an engine that trusts them."""
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill)
    prefill.report(sent={asked.request_id}, received={asked.request_id})  # in both sets at once
    prefill.step(sent={asked.request_id, "never-heard-of"})  # again
    wanted = decode.add(request(40, answer))
    decode.step()
    decode.abort(wanted)
    decode.step(received={wanted.request_id}, sent={wanted.request_id})
    decode.step(received={wanted.request_id})
    decode.step(received={"never-heard-of"})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_loans_end_in_any_order(make: Make, order: tuple[int, int]) -> None:
    prefill = make("kv_producer")
    first, _, _ = prefilled(prefill, 40)
    prefill.report()
    second, _, _ = prefilled(prefill, 50)
    prefill.report()
    for which in order:
        prefill.step(sent={(first, second)[which].request_id})


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_failed_blocks_fail_or_recompute(make: Make, policy: str) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer", policy=policy)
    asked, answer, _ = prefilled(prefill)
    settle(prefill, asked)
    wanted = decode.add(request(40, answer))
    metadata, _ = decode.step()
    failed = {metadata.loads[0].blocks[1]}
    _, finished = decode.step(received={wanted.request_id}, failed=failed)
    if policy == "fail":
        assert wanted.status == RequestStatus.FINISHED_ERROR
        assert str(finished[wanted.request_id].finish_reason) == "error"
        return
    metadata = decode.schedule()
    assert not metadata.loads, "a recomputed request is not loaded again"
    assert wanted.num_computed_tokens - decode._output.num_scheduled_tokens[wanted.request_id] == SIZE
    decode.report()
    decode.run_to_end()


@pytest.mark.parametrize(
    "difference", [{"salt": "other"}, {"lora": "adapter"}, {"tokens": [1, 2, 3]}], ids=["salt", "lora", "tokens"]
)
def test_kv_of_another_prompt_is_declined_and_computed_here(make: Make, difference: dict[str, Any]) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill)
    settle(prefill, asked)
    tokens = difference.pop("tokens", 40)
    decode.add(request(tokens, answer, **difference))
    metadata, _ = decode.step()
    (load,) = metadata.loads
    assert load.blocks == ()
    decode.run_to_end()


def test_the_same_salt_and_adapter_are_loaded(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill, 40, salt="s", lora="a")
    settle(prefill, asked)
    wanted = decode.add(request(40, answer, salt="s", lora="a"))
    assert decode.step()[0].loads[0].blocks
    decode.step(received={wanted.request_id})
    decode.run_to_end()


def test_an_offer_that_cannot_be_used_is_computed_here(make: Make) -> None:
    decode = make("kv_consumer")
    decode.add(request(40, {"do_remote_prefill": True, "remote_engine_id": "x"}))
    metadata, _ = decode.step()
    assert not metadata.loads
    decode.run_to_end()


def test_an_offer_of_fewer_tokens_loads_these(make: Make) -> None:
    decode = make("kv_consumer")
    offer = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r", "remote_block_ids": [[7, 8]],
        "remote_host": "h", "remote_port": 5, "tp_size": 1, "remote_num_tokens": 20,
    }  # fmt: skip
    wanted = decode.add(request(40, offer))
    (load,) = decode.step()[0].loads
    assert (load.tokens, len(load.blocks)) == (20, 2)
    decode.step(received={wanted.request_id})
    decode.run_to_end()


def test_a_preempted_decode_is_computed_again_not_loaded_again(make: Make) -> None:
    prefill, decode = make("kv_producer"), make("kv_consumer")
    asked, answer, _ = prefilled(prefill)
    settle(prefill, asked)
    wanted = decode.add(request(40, answer))
    decode.step()
    decode.step(received={wanted.request_id})
    decode.step()
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert wanted.num_preemptions == 1
    assert not decode.step()[0].loads
    decode.run_to_end()


def test_a_preempted_prefill_offers_what_it_computed_last(make: Make) -> None:
    prefill = make("kv_producer")
    asked = prefill.add(request(40, {"do_remote_decode": True}, max_tokens=3))
    prefill.step()
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    finished = prefill.run_to_end()
    answer = finished[asked.request_id].kv_transfer_params
    held = prefill.scheduler.kv_cache_manager.get_block_ids(asked.request_id)[0]
    assert answer["remote_block_ids"] == [list(held[:3])]
    assert answer["remote_num_tokens"] == 40
    prefill.step(sent={asked.request_id})


def test_several_readers_are_asked_for(make: Make) -> None:
    prefill = make("kv_producer")
    asked = prefill.add(request(40, {"do_remote_decode": True, "cam_readers": 3}, max_tokens=1))
    prefill.step()
    (loan,) = prefill.schedule().loans
    assert loan.readers == 3
    settle(prefill, asked)


def test_a_conversation_goes_back_and_forth(make: Make) -> None:
    prefill = make("kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=8)
    decode = make("kv_consumer", bidirectional_kv_xfer=True)
    first = [(5 * i + 1) % 500 for i in range(40)]
    asked, answer, _ = prefilled(prefill, first)
    settle(prefill, asked)
    wanted = decode.add(request(first, answer, max_tokens=12))
    decode.step()
    decode.step(received={wanted.request_id})
    finished = decode.run_to_end()[wanted.request_id]
    back = finished.kv_transfer_params
    assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
    assert back["remote_num_tokens"] == 40 + 12 - 1
    (loan,) = decode.schedule().loans
    assert loan.ttl_s == 480
    # The next turn: the prefill has forgotten the conversation, and loads all that the decode has of it.
    assert prefill.scheduler.reset_prefix_cache()
    second = prefill.add(request([*first, *([9] * 12), 77, 78, 79], back, max_tokens=1))
    metadata, _ = prefill.step()
    (load,) = metadata.loads
    assert (load.first_token, load.tokens, load.offer.lease) == (0, 51, back["cam_lease"])
    _, finished = prefill.step(received={second.request_id})
    _, finished = prefill.step()
    assert finished[second.request_id].kv_transfer_params["do_remote_prefill"] is True
    prefill.step(sent={second.request_id})
    settle(decode, wanted)


def test_a_short_readback_is_declined(make: Make) -> None:
    prefill = make("kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=64)
    back = {
        "do_remote_decode": True, "remote_engine_id": "d", "remote_request_id": "r", "remote_block_ids": [[7, 8]],
        "remote_host": "h", "remote_port": 5, "tp_size": 1, "remote_num_tokens": 20,
    }  # fmt: skip
    asked = prefill.add(request(40, back, max_tokens=1))
    metadata, _ = prefill.step()
    assert [load.blocks for load in metadata.loads] == [()]
    prefill.step(sent={asked.request_id})


def test_without_the_option_nothing_is_read_back(make: Make) -> None:
    prefill = make("kv_producer")
    asked, answer, _ = prefilled(prefill)
    settle(prefill, asked)
    again = prefill.add(request(41, {**answer, "do_remote_prefill": False, "do_remote_decode": True}, max_tokens=1))
    assert not prefill.step()[0].loads
    prefill.step(sent={again.request_id})


def test_as_a_child_of_multi_connector(model: Path, tmp_path: Path) -> None:
    """CAM's child decides, is told once, and its metadata reaches its worker; the other child does not disturb."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    cam = {"kv_connector": "CamConnector", "kv_connector_module_path": "cam_vllm.connector", "kv_role": "kv_both"}
    engine = Engine(model, "kv_both", kv_connector="MultiConnector", connectors=[example, cam])
    offer = {
        "do_remote_prefill": True, "remote_engine_id": "p", "remote_request_id": "r", "remote_block_ids": [[7, 8, 9]],
        "remote_host": "h", "remote_port": 5, "tp_size": 1, "remote_num_tokens": 40,
    }  # fmt: skip
    wanted = engine.add(request(40, offer))
    output = engine.scheduler.schedule()
    engine._output = output
    (load,) = output.kv_connector_metadata.metadata[1].loads
    assert (load.request, load.tokens) == (wanted.request_id, 40)
    assert wanted.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.report(received={wanted.request_id})
    engine._output = engine.scheduler.schedule()
    engine.report()
    for _ in range(3):
        engine._output = engine.scheduler.schedule()
        engine.report()
    engine.scheduler.schedule()
    assert not engine.scheduler.requests
