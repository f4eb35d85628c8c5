"""Tiny models with random weights and a tokenizer of their own, made on the spot: nothing is downloaded.

Weights are wide (initializer_range 0.3): with the usual small ones every prompt gives the same tokens, and an error in
a KV cache would not show.
"""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 512
KINDS = ("dense", "moe")


def make(kind: str, folder: Path) -> Path:
    """A model of `kind` ("dense", "moe") in `folder`/`kind`; made once. Returns the path."""
    target = folder / f"tiny-{kind}"
    if (target / "complete").exists():
        return target
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 3,
        "tie_word_embeddings": False, "initializer_range": 0.3, "dtype": "float32",
    }  # fmt: skip
    configuration = {
        "dense": lambda: LlamaConfig(**shape, architectures=["LlamaForCausalLM"]),
        "moe": lambda: Qwen3MoeConfig(
            **shape, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True,
            decoder_sparse_step=1, architectures=["Qwen3MoeForCausalLM"],
        ),
    }[kind]()  # fmt: skip
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configuration, dtype=torch.float32)
    torch.random.set_rng_state(generator_state)
    target.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(target)
    _tokenizer(target)
    (target / "complete").touch()
    return target


def words(numbers: list[int]) -> str:
    """A prompt of the tokenizer's words."""
    return " ".join(f"w{number}" for number in numbers)


def _tokenizer(folder: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<s>", "</s>", "<pad>"]
    known = [*special, *(f"w{number}" for number in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
