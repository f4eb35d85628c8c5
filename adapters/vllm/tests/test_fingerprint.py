"""Everything that KV depends on changes the fingerprint, and what comes after the offered tokens does not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cam_vllm.fingerprint import fingerprint


def image(identifier: str, offset: int) -> SimpleNamespace:
    return SimpleNamespace(
        modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=4)
    )


def request(**changes: Any) -> Any:
    known: dict[str, Any] = {
        "all_token_ids": list(range(20)),
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [image("a", 3)],
    }
    return SimpleNamespace(**(known | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"all_token_ids": [*range(9), 99]},
        {"cache_salt": "s"},
        {"lora_request": SimpleNamespace(lora_name="adapter")},
        {"mm_features": []},
        {"mm_features": [image("b", 3)]},
        {"mm_features": [image("a", 4)]},
        {"mm_features": [image("a", 3), image("c", 8)]},
        {"prompt_embeds": torch.ones(20, 2, dtype=torch.bfloat16)},
    ],
    ids=["tokens", "salt", "lora", "no image", "other image", "elsewhere", "more images", "embeddings"],
)
def test_other_kv_has_another_fingerprint(changes: dict[str, Any]) -> None:
    assert fingerprint(request(**changes), 10) != fingerprint(request(), 10)


def test_only_the_first_tokens_count() -> None:
    longer = request(all_token_ids=[*range(10), 77, 78], mm_features=[image("a", 3), image("later", 10)])
    assert fingerprint(longer, 10) == fingerprint(request(), 10)
    assert fingerprint(longer, 11) != fingerprint(request(), 11)


def test_salt_and_adapter_are_not_confused() -> None:
    salted = request(cache_salt="x")
    adapted = request(lora_request=SimpleNamespace(lora_name="x"))
    assert fingerprint(salted, 10) != fingerprint(adapted, 10)
