"""A model's memory is known from its config: the parameters, cache and passes of real models are what the estimate says."""

from __future__ import annotations

import inspect
import json
import logging

import pytest
import torch
import transformers as hf
from test_architectures import _ALL, VOCAB
from tiny import save_tiny_llama
from torch.profiler import ProfilerActivity, profile

from klb_probe.models import memory
from klb_probe.models.architecture import auto_class
from klb_probe.models.load import load_model
from klb_probe.models.memory import estimate_memory, free_memory, meta_model
from klb_probe.models.quantised import weight_bytes

# Dense, tied, soft-capped, wrapped, with experts, latent keys, shared keys and values, recurrent states, keys of one head.
NAMES = [
    "llama",
    "llama tied",
    "gemma2",
    "gemma3",
    "gemma4_text",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "falcon",
    "falcon new",
    "gpt2",
    "qwen3_5_text",
    "qwen3_5",
    "mamba2",
    "lfm2",
    "llava",
]
LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def run(model, tokens, batch):
    """A real pass; what its cache holds, by tensor."""
    cache = hf.DynamicCache(config=model.config.get_text_config())
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(torch.randint(3, VOCAB, (batch, tokens)), logits_to_keep=1, use_cache=True, **{name: cache})
    return cache


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NAMES), *((name, torch.bfloat16) for name in ("llama", "mixtral", "qwen3_5_text"))],
)
def test_weights_and_cache_of_a_real_model_are_what_was_estimated(name, dtype):
    config = _ALL[name]()
    model = auto_class(config).from_config(config, dtype=dtype).eval()
    estimate = estimate_memory(config, dtype, tokens=12, batch=2)
    assert estimate.parameters == sum(p.numel() for p in model.parameters())
    assert estimate.weights == sum(p.numel() * dtype.itemsize for p in model.parameters())
    held = 0
    for layer in run(model, 12, 2).layers:
        parts = (getattr(layer, part, None) for part in ("keys", "values", "conv_states", "recurrent_states"))
        for part in parts:
            states = part.values() if isinstance(part, dict) else part if isinstance(part, list) else [part]
            # A window is a view of all that was read, which stays in memory with it.
            held += sum(state.untyped_storage().nbytes() for state in states if torch.is_tensor(state))
    assert estimate.key_values == held > 0


def test_the_numbers_of_llama_8b():
    """Parameters as published; keys and values of 8 prompts of 1024 tokens by hand; no memory is taken for any of it."""
    config = hf.LlamaConfig(**LLAMA_8B)
    before = free_memory(torch.device("cpu"))
    estimate = estimate_memory(config, torch.bfloat16, tokens=1024, batch=8)
    assert estimate.parameters == 8_030_261_248
    assert estimate.weights == 16_060_522_496
    assert estimate.key_values == 2 * 32 * (8 * 1024) * (8 * 128) * 2
    assert estimate.margin_lens == 31 * 34 * 4096 * 4
    assert estimate.full_lens == 31 * 4096 * 4096 * 2
    widest = 8 * 1024 * 14_336 * 2  # one tensor of the MLP
    assert 3 * widest < estimate.working < 6 * widest
    assert estimate.peak == estimate.weights + estimate.key_values + estimate.working + estimate.margin_lens
    assert before - free_memory(torch.device("cpu")) < 4e9
    assert all(parameter.is_meta for parameter in meta_model(config).parameters())


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (lambda: hf.MixtralConfig(vocab_size=32_000), 46_702_792_704),
        (lambda: hf.GPT2Config(), 124_439_808),
    ],
    ids=["Mixtral 8x7B", "GPT-2 small"],
)
def test_published_numbers_of_parameters(config, parameters):
    assert weight_bytes(meta_model(config()), torch.float16) == 2 * parameters


@pytest.mark.parametrize(("quantise", "of_a_weight", "of_a_row"), [("4bit", 0.5 + 4 / 64, 0), ("8bit", 1, 4)])
def test_quantised_weights_count_as_they_are_stored(quantise, of_a_weight, of_a_row):
    """Codes and float32 scales, one a block of 64 (4 bits) or a row (8 bits), of the blocks' linear layers; the rest stays."""
    square, narrow, wide, back = (4096, 4096), (1024, 4096), (14_336, 4096), (4096, 14_336)
    linear = 2 * [square, narrow, narrow, square, wide, wide, back]
    small = sum(rows * columns * of_a_weight + rows * of_a_row for rows, columns in linear)
    rest = 2 * 128_256 * 4096 + 5 * 4096
    config = hf.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 2})
    estimate = estimate_memory(config, torch.bfloat16, tokens=8, batch=1, quantise=quantise)
    assert estimate.weights == small + 2 * rest
    assert estimate.parameters == sum(rows * columns for rows, columns in linear) + rest


def test_linear_layers_under_another_name_are_quantised_and_experts_are_not():
    """GPT-2's are transposed; those of a mixture are one tensor of three dimensions, which bitsandbytes leaves alone."""
    linear = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    rows = 12 * (2304 + 768 + 3072 + 768)
    small = linear + 4 * rows + 2 * (124_439_808 - linear)
    assert weight_bytes(meta_model(hf.GPT2Config()), torch.float16, "8bit") == small
    mixture = meta_model(hf.MixtralConfig(vocab_size=32_000, num_hidden_layers=2))
    whole, quantised = (weight_bytes(mixture, torch.bfloat16, how) for how in (None, "4bit"))
    assert whole > quantised > 0.9 * whole


def test_more_prompts_and_longer_ones_need_more_and_float32_twice_as_much():
    config = hf.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 2})
    short = estimate_memory(config, torch.bfloat16, tokens=64, batch=2)
    assert estimate_memory(config, torch.bfloat16, tokens=64, batch=4).key_values == 2 * short.key_values
    assert estimate_memory(config, torch.bfloat16, tokens=128, batch=2).key_values == 2 * short.key_values
    wide = estimate_memory(config, torch.float32, tokens=64, batch=2)
    assert (wide.weights, wide.key_values) == (2 * short.weights, 2 * short.key_values)
    assert 1.5 * short.working < wide.working <= 2 * short.working


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mixtral", "qwen3_5_text"])
def test_a_real_pass_takes_the_working_memory_that_was_estimated(name):
    """Against the allocator's own record of a float32 pass on the CPU."""
    config = _ALL[name]()
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    estimate = estimate_memory(config, torch.float32, tokens=200, batch=16)
    run(model, 200, 16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        cache = run(model, 200, 16)
    assert cache.get_seq_length() == 200
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    assert estimate.working + estimate.key_values == pytest.approx(most, rel=0.02)


def test_a_config_is_left_as_it_was():
    config = hf.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 1})
    before = json.dumps(config.to_dict(), sort_keys=True, default=str)
    estimate_memory(config, torch.float16, tokens=4, batch=1)
    assert json.dumps(config.to_dict(), sort_keys=True, default=str) == before


def test_a_model_that_will_not_fit_is_warned_of_in_one_line_and_loaded_all_the_same(tmp_path, monkeypatch, caplog):
    save_tiny_llama(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda place: 6_000_000)
    with caplog.at_level(logging.WARNING, "klb_probe"):
        model = load_model(str(tmp_path), device="cpu")
    (said,) = [record.getMessage() for record in caplog.records if record.name == "klb_probe.models.memory"]
    assert "\n" not in said
    assert all(part in said for part in (str(tmp_path), "float32", "cpu", "will not fit"))
    assert model.n_layers == 4


def test_a_model_that_fits_is_loaded_without_a_word(tmp_path, caplog):
    save_tiny_llama(tmp_path)
    with caplog.at_level(logging.WARNING, "klb_probe"):
        load_model(str(tmp_path), device="cpu")
    assert not [record for record in caplog.records if record.name.startswith("klb_probe")]


def test_a_quantised_checkpoint_is_not_taken_for_its_number_of_parameters(monkeypatch, caplog):
    monkeypatch.setattr(memory, "free_memory", lambda place: 0)
    config = hf.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 1})
    for quantised in (None, {"quant_method": "mxfp4"}):
        config.quantization_config = quantised
        caplog.clear()
        memory.warn_if_too_large("some", config, torch.bfloat16, torch.device("cpu"))
        assert bool(caplog.records) == (quantised is None)


def test_quantised_weights_are_warned_of_by_what_they_will_take(monkeypatch, caplog):
    config = hf.LlamaConfig(**{**LLAMA_8B, "num_hidden_layers": 2})
    for free, warned in ((2.3e9, True), (2.4e9, False)):
        monkeypatch.setattr(memory, "free_memory", lambda place, free=free: free)
        caplog.clear()
        memory.warn_if_too_large("some", config, torch.bfloat16, torch.device("cuda"), "4bit")
        assert bool(caplog.records) == warned
        assert all(record.getMessage().startswith("some has 2.3 GB of weights in 4bit") for record in caplog.records)
