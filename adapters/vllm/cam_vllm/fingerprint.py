"""A fingerprint of everything in a request on which the KV of its prompt depends.

The decode side compares it with what the prefill side computed from: two requests that share their tokens, but not
their cache salt, LoRA adapter, images or embeddings, have different KV (vllm#53495, vllm#44250).
"""

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def fingerprint(request: "Request", tokens: int) -> str:
    """32 hexadecimal digits for the KV of the request's first `tokens` tokens."""
    digest = hashlib.blake2b(digest_size=16)
    lora = request.lora_request
    parts: list[bytes] = [
        array("q", request.all_token_ids[:tokens]).tobytes(),
        b"" if request.prompt_embeds is None else request.prompt_embeds[:tokens].contiguous().cpu().numpy().tobytes(),
        (request.cache_salt or "").encode(),
        b"" if lora is None else lora.lora_name.encode(),
        *(
            f"{item.modality} {item.identifier} {item.mm_position.offset} {item.mm_position.length}".encode()
            for item in request.mm_features
            if item.mm_position.offset < tokens
        ),
    ]
    for part in parts:
        # Each part with its length: no two lists of parts give the same bytes.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
