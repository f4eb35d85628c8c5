"""kv_transfer_params come from outside: what is taken, and what is refused."""

import pytest

from cam_vllm import params
from cam_vllm.params import Agent, BadParams

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill",
    "remote_request_id": "request-1",
    "remote_block_ids": [4, 5, 6],
    "remote_host": "127.0.0.1",
    "remote_port": 1234,
    "tp_size": 1,
}


def test_what_a_prefill_offers_is_what_a_decode_reads() -> None:
    agents = [Agent("10.0.0.1", 5000, "a"), Agent("10.0.0.2", 5001, "b")]
    told = params.offer(
        instance="prefill", request="r", agents=agents, blocks=[7, 3], tokens=50, lease="prefill/0", prompt="ab"
    )
    assert params.wants_remote_prefill(told)
    assert not params.wants_remote_decode(told)
    read = params.parse(told)
    assert read.agents == tuple(agents)
    assert (read.blocks, read.tokens, read.lease, read.prompt) == ((7, 3), 50, "prefill/0", "ab")
    assert (told["remote_host"], told["remote_port"], told["tp_size"]) == ("10.0.0.1", 5000, 2)


def test_an_offer_with_nixls_keys_alone_is_taken() -> None:
    read = params.parse(GOOD)
    assert read.agents == (Agent("127.0.0.1", 1234, ""),)
    assert read.blocks == (4, 5, 6)
    assert (read.tokens, read.lease, read.prompt) == (None, None, None)
    assert params.parse({**GOOD, "remote_block_ids": [[4, 5]]}).blocks == (4, 5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("remote_engine_id", None),
        ("remote_engine_id", "x" * 1001),
        ("remote_request_id", 7),
        ("remote_block_ids", None),
        ("remote_block_ids", [1, -2]),
        ("remote_block_ids", [1, True]),
        ("remote_block_ids", ["1"]),
        ("remote_block_ids", [[1], [2]]),
        ("remote_host", ""),
        ("remote_port", 0),
        ("remote_port", "1234"),
        ("remote_port", 65536),
        ("tp_size", 2),
        ("remote_num_tokens", -1),
        ("remote_num_tokens", 1.5),
        ("cam_lease", 5),
        ("cam_agents", []),
        ("cam_agents", [["127.0.0.1", 1234]]),
        ("cam_agents", [["127.0.0.1", 1234, None]]),
    ],
)
def test_an_offer_that_cannot_be_used_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(BadParams) as caught:
        params.parse({**GOOD, key: value})
    names = {key, "agent"} if key in ("remote_port", "cam_agents") else {key}
    assert any(name in str(caught.value) for name in names)


@pytest.mark.parametrize("count", [0, -1, True, "2", 1 << 20])
def test_a_number_of_readers_that_is_none_is_refused(count: object) -> None:
    with pytest.raises(BadParams, match="cam_readers"):
        params.readers({"cam_readers": count})
    assert params.readers({}) == 1
    assert params.readers({"cam_readers": 3}) == 3
