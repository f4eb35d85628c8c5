"""What vLLM's tests expect to find in a model hub, made here: configurations and a tiny tokenizer, no weights."""

from pathlib import Path

_REVISION = "1" * 40


def prepare(work: Path) -> None:
    """Fills {work}/hub (HF_HOME of the suite). Does nothing when it is there."""
    hub = work / "hub" / "hub"
    if (hub / "complete").exists():
        return
    from transformers import LlamaConfig, OPTConfig, Qwen3Config

    llama = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    qwen = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    opt = {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "word_embed_proj_dim": 768,
    }
    configurations = {
        "facebook/opt-125m": OPTConfig(
            architectures=["OPTForCausalLM"], dtype="float16", vocab_size=50272, max_position_embeddings=2048,
            bos_token_id=2, eos_token_id=2, pad_token_id=1, **opt,
        ),
        "meta-llama/Llama-3.2-1B-Instruct": LlamaConfig(
            architectures=["LlamaForCausalLM"], dtype="bfloat16", vocab_size=128256, num_key_value_heads=8, head_dim=64,
            max_position_embeddings=131072, **llama,
        ),
        "Qwen/Qwen3-0.6B": Qwen3Config(
            architectures=["Qwen3ForCausalLM"], dtype="bfloat16", vocab_size=151936, num_key_value_heads=8,
            head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, **qwen,
        ),
    }  # fmt: skip
    for name, configuration in configurations.items():
        repository = hub / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / _REVISION
        snapshot.mkdir(parents=True, exist_ok=True)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(_REVISION)
        configuration.save_pretrained(snapshot)
        _tokenizer(snapshot)
    (hub / "complete").touch()


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{number}" for number in range(508))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
