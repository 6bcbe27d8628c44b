"""Every architecture of a shipped hook map is read as it computes; what has no one residual stream is refused by name."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers as hf
from test_chat import byte_level

from klb_probe.errors import KlbError
from klb_probe.models.hook_map import read_hook_map
from klb_probe.models.key_values import KeyValues, Stack
from klb_probe.models.load import from_model
from klb_probe.models.prefix import prefill
from klb_probe.paths import data_dir

VOCAB, WIDTH, LAYERS = 260, 16, 4
_TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
_HEAD = {**_TEXT, "head_dim": 4}
_GEMMA = {**_HEAD, "sliding_window": 8, "query_pre_attn_scalar": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_ONE_HEAD_EACH = {k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4, "vocab_size": VOCAB, "n_positions": 256}
_LINEAR = {"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_QWEN_VISION = {"depth": 1, "num_heads": 2, "hidden_size": 8, "intermediate_size": 8, "out_hidden_size": WIDTH}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10_000.0}
_RECURRENT = {
    **{k: _TEXT[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")},
    "state_size": 4,
    "expand": 2,
}
_LATENT = {
    **_TEXT,
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# A config a name; what comes before a space is the type that a hook map lists.
CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**_TEXT),
    "llama tied": lambda: hf.LlamaConfig(**_TEXT, tie_word_embeddings=True),
    "apertus": lambda: hf.ApertusConfig(**_TEXT),
    "arcee": lambda: hf.ArceeConfig(**_TEXT),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**_LATENT),
    "deepseek_v3": lambda: hf.DeepseekV3Config(**_LATENT),
    "ernie4_5": lambda: hf.Ernie4_5Config(**_HEAD),
    "exaone4": lambda: hf.Exaone4Config(**_TEXT, sliding_window=8),
    "glm": lambda: hf.GlmConfig(**_HEAD),
    "glm4": lambda: hf.Glm4Config(**_HEAD),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **_HEAD, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, first_k_dense_replace=1
    ),
    "gpt_oss": lambda: hf.GptOssConfig(**_HEAD, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "helium": lambda: hf.HeliumConfig(**_HEAD),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**_HEAD),
    "llama4_text": lambda: hf.Llama4TextConfig(
        **_HEAD, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=8, no_rope_layer_interval=2
    ),
    "ministral": lambda: hf.MinistralConfig(**_HEAD, sliding_window=8),
    "ministral3": lambda: hf.Ministral3Config(**_HEAD),
    "mistral": lambda: hf.MistralConfig(**_TEXT, sliding_window=8),
    "mixtral": lambda: hf.MixtralConfig(**_TEXT, num_local_experts=4),
    "olmo2": lambda: hf.Olmo2Config(**_TEXT),
    "olmo3": lambda: hf.Olmo3Config(**_TEXT, sliding_window=8),
    "olmoe": lambda: hf.OlmoeConfig(**_TEXT, num_experts=4, num_experts_per_tok=2),
    "phi3": lambda: hf.Phi3Config(**_TEXT),
    "qwen2": lambda: hf.Qwen2Config(**_TEXT),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**_TEXT, **_EXPERTS, shared_expert_intermediate_size=8),
    "qwen3": lambda: hf.Qwen3Config(**_HEAD),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_HEAD, **_EXPERTS),
    "seed_oss": lambda: hf.SeedOssConfig(**_HEAD),
    "smollm3": lambda: hf.SmolLM3Config(**_TEXT),
    "gemma": lambda: hf.GemmaConfig(**_HEAD),
    "gemma2": lambda: hf.Gemma2Config(**_GEMMA, final_logit_softcapping=3.0),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**_GEMMA),
    "gemma3": lambda: hf.Gemma3Config(text_config=_GEMMA, vision_config=_VISION),
    "gemma4_text": lambda: _gemma4_text(),
    "gpt2": lambda: hf.GPT2Config(**_GPT2),
    "codegen": lambda: hf.CodeGenConfig(**_GPT2, rotary_dim=4),
    "falcon": lambda: hf.FalconConfig(**_ONE_HEAD_EACH),
    "falcon new": lambda: hf.FalconConfig(**_ONE_HEAD_EACH, new_decoder_architecture=True, num_kv_heads=2),
    "falcon alibi": lambda: hf.FalconConfig(**_ONE_HEAD_EACH, alibi=True, parallel_attn=False),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(**_GPT2),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    ),
    "gptj": lambda: hf.GPTJConfig(**_GPT2, rotary_dim=4),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_ONE_HEAD_EACH),
    "olmo": lambda: hf.OlmoConfig(**_TEXT),
    "stablelm": lambda: hf.StableLmConfig(**_TEXT, use_parallel_residual=True),
    "persimmon": lambda: hf.PersimmonConfig(**_ONE_HEAD_EACH),
    "phi": lambda: hf.PhiConfig(**_TEXT),
    "phimoe": lambda: hf.PhimoeConfig(**_TEXT, num_local_experts=4, lm_head_bias=True),
    "starcoder2": lambda: hf.Starcoder2Config(**_TEXT, sliding_window=8),
    "cohere": lambda: hf.CohereConfig(**_TEXT, logit_scale=0.25),
    "cohere2": lambda: hf.Cohere2Config(**_TEXT, logit_scale=0.25, sliding_window=8),
    "granite": lambda: hf.GraniteConfig(
        **_TEXT, logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.1
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(**_TEXT, logits_scaling=3.0, embedding_multiplier=2.0, num_local_experts=4),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **_TEXT, logits_scaling=3.0, residual_multiplier=0.5, num_local_experts=4, shared_intermediate_size=8
    ),
    "nemotron": lambda: hf.NemotronConfig(**_HEAD),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**_HEAD, **_LINEAR),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(**_HEAD, **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=8),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_HEAD, **_LINEAR, **_EXPERTS, shared_expert_intermediate_size=8),
    "lfm2": lambda: hf.Lfm2Config(**_TEXT, layer_types=["conv", "full_attention"] * 2),
    "mamba2": lambda: hf.Mamba2Config(**_RECURRENT, num_heads=4, head_dim=8, n_groups=1),
    # The text model alone, as the class for causal language models makes it of a wrapper's config.
    "qwen3_5 text alone": lambda: WRAPPERS["qwen3_5"](),
    "llama4": lambda: hf.Llama4Config(text_config=CONFIGS["llama4_text"]().to_dict(), vision_config=_VISION),
}
WRAPPERS = {
    "aya_vision": lambda: hf.AyaVisionConfig(
        text_config={**_TEXT, "model_type": "cohere2", "logit_scale": 0.25},
        vision_config={**_VISION, "model_type": "siglip_vision_model"},
    ),
    "gemma4": lambda: hf.Gemma4Config(text_config=_gemma4_text().to_dict(), vision_config=None, audio_config=None),
    "llava": lambda: hf.LlavaConfig(
        text_config={**_TEXT, "model_type": "mistral"}, vision_config={**_VISION, "model_type": "clip_vision_model"}
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config={**_HEAD, "model_type": "mistral"}, vision_config={**_VISION, "head_dim": 4, "model_type": "pixtral"}
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config={**_HEAD, "model_type": "qwen3"},
        vision_config={**_VISION, "image_size": [8, 8], "patch_size": [4, 4], "model_type": "internvl_vision"},
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config={**_TEXT, "rope_parameters": _MROPE},
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": WIDTH, "num_heads": 2},
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(text_config={**_TEXT, "rope_parameters": _MROPE}, vision_config=_QWEN_VISION),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**_HEAD, "rope_parameters": _MROPE}, vision_config={**_QWEN_VISION, "deepstack_visual_indexes": []}
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config={**_HEAD, **_EXPERTS, "rope_parameters": _MROPE},
        vision_config={**_QWEN_VISION, "deepstack_visual_indexes": []},
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config={**_HEAD, **_LINEAR, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}},
        vision_config=_QWEN_VISION,
    ),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeConfig(
        text_config={
            **_HEAD,
            **_LINEAR,
            **_EXPERTS,
            "shared_expert_intermediate_size": 8,
            "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0},
        },
        vision_config=_QWEN_VISION,
    ),
}
_ALL = {**CONFIGS, **WRAPPERS}
OF_TEXT = {"llava", "mistral3", "internvl"}  # found by the type of their text model
FORGETFUL = {
    "mamba": lambda: hf.MambaConfig(**_RECURRENT),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**_RECURRENT),
}
architectures = pytest.mark.parametrize("name", _ALL)


def _gemma4_text():
    return hf.Gemma4TextConfig(
        **_HEAD,
        sliding_window=8,
        global_head_dim=4,
        hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=2,
        final_logit_softcapping=3.0,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    )


@cache
def raw(name):
    """A tiny random model whose every parameter, norms and biases included, is random."""
    torch.manual_seed(0)
    auto = hf.AutoModelForImageTextToText if name in WRAPPERS else hf.AutoModelForCausalLM
    model = auto.from_config(_ALL[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.eval()


@cache
def read(name):
    return from_model(raw(name), byte_level(), name=f"tiny-{name}")


def ids_of(length, seed=0):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_every_type_of_a_shipped_hook_map_is_tested_here():
    shipped = {kind for path in data_dir("hooks").glob("*.yaml") for kind in read_hook_map(path).model_types}
    assert shipped == {name.split()[0] for name in [*_ALL, *FORGETFUL]} - OF_TEXT


@architectures
def test_residuals_are_block_outputs_and_decode_to_the_models_logits(name):
    model, ids = read(name), ids_of(20)
    assert model.self_check_error < 1e-4
    with torch.no_grad():
        own = raw(name)(torch.tensor([ids]), output_hidden_states=True)
    residuals = model.residuals([ids], range(LAYERS), range(len(ids)))
    assert residuals.shape == (LAYERS, 1, len(ids), WIDTH)
    assert len(own.hidden_states) == LAYERS + 1
    before = 0 if name == "mamba2" else 1  # the embedding comes first in all others
    for layer in range(LAYERS - 1):  # the last one there is already normed
        torch.testing.assert_close(residuals[layer], own.hidden_states[layer + before], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.final_norm(residuals[-1]), own.hidden_states[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.unembed(model.final_norm(residuals[-1])), own.logits, atol=1e-4, rtol=1e-4)
    some = [5, 17, 250]
    torch.testing.assert_close(model.token_readout(some).logits(residuals[-1]), own.logits[..., some], atol=1e-4, rtol=1e-4)


@architectures
def test_what_comes_later_changes_nothing_before(name):
    model, first, second = read(name), ids_of(20), [*ids_of(9), *ids_of(11, seed=1)]
    assert first[:9] == second[:9]
    one, other = (model.residuals([ids], range(LAYERS), range(9)) for ids in (first, second))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@architectures
def test_a_shared_prefix_is_read_once_and_gives_the_same(name):
    model = read(name)
    prompts = [[*ids_of(14), *ids_of(n, seed=n)] for n in (5, 3, 8)]
    rows = {}
    for batch, capture in prefill(model, prompts, range(LAYERS), [7, 8], min_shared=4):
        rows |= {index: (capture.residuals[:, row], capture.logits[row]) for row, index in enumerate(batch)}
    for index, prompt in enumerate(prompts):
        residuals, logits = rows[index]
        torch.testing.assert_close(residuals, model.residuals([prompt], range(LAYERS), [-1])[:, 0], atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            own = raw(name)(torch.tensor([prompt])).logits[0, -1, [7, 8]]
        torch.testing.assert_close(logits[0], own, atol=1e-4, rtol=1e-4)


@architectures
def test_rows_of_several_lengths_are_stacked_and_read_on_as_alone(name):
    model = read(name)
    if not model.keeps_every_position():
        assert name.startswith(("qwen3_5", "qwen3_next", "gemma4", "lfm2", "mamba2")), "read whole, one at a time"
        return
    prompts = [ids_of(15), ids_of(11, seed=1)]
    kept = []
    for prompt in prompts:
        cache = model.new_cache()
        model.next_logits(torch.tensor([prompt[:6]]), cache)
        whole = KeyValues.of(cache).cache(6)  # without the windows of the config
        model.next_logits(torch.tensor([prompt[6:-1]]), whole)
        kept.append(KeyValues.of(whole))
    stack = Stack.of(kept)
    mask, positions = stack.mask_and_positions()
    logits = model.next_logits(torch.tensor([[prompt[-1]] for prompt in prompts]), stack.cache, mask, positions)
    for row, prompt in zip(logits, prompts, strict=True):
        with torch.no_grad():
            own = raw(name)(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, own, atol=1e-4, rtol=1e-4)


@architectures
def test_gradients_flow_to_the_target_alone(name):
    """The transported margin is the model's own derivative, here against a finite difference."""
    model, ids = read(name), torch.tensor([ids_of(10)])
    with model.gradient_graph(ids, [1], LAYERS - 1) as (sources, target):
        assert target.shape == (1, 10, WIDTH)
        (gradient,) = torch.autograd.grad(target[0, -1, 3], sources)
    direction = torch.nn.functional.normalize(torch.randn(10, WIDTH, generator=torch.Generator().manual_seed(1)), dim=-1)
    ends = []
    for step in (1e-3, -1e-3):
        with model.intervening(1, lambda output, step=step: output + step * direction):
            ends.append(model.residuals([ids[0].tolist()], [LAYERS - 1], [-1])[0, 0, 0, 3])
    slope = float((ends[0] - ends[1]) / 2e-3)
    assert slope == pytest.approx(float((gradient[0] * direction).sum()), abs=5e-3, rel=2e-2)


# --- What decides the numbers beside the blocks. ---


@pytest.mark.parametrize(("name", "scale"), [("cohere", 0.25), ("cohere2", 0.25), ("granite", 1 / 3), ("llama", 1.0)])
def test_logits_are_scaled_where_the_config_says_so(name, scale):
    model = read(name)
    assert model.layout.scale == pytest.approx(scale)
    normed = model.final_norm(model.residuals([ids_of(6)], [LAYERS - 1], [-1])[0])
    torch.testing.assert_close(model.unembed(normed), scale * raw(name).lm_head(normed), atol=1e-6, rtol=1e-5)


def test_a_wrapper_that_does_not_scale_what_its_text_model_would_is_read_as_it_is():
    assert read("aya_vision").layout.scale == 1.0
    assert raw("aya_vision").config.get_text_config().logit_scale == 0.25


@pytest.mark.parametrize("name", ["gptj", "codegen", "phi", "phimoe"])
def test_a_heads_bias_is_part_of_the_readout(name):
    bias = raw(name).lm_head.bias
    some = [4, 9]
    readout = read(name).token_readout(some)
    assert bias[some].abs().min() > 1e-3
    zeros = torch.zeros(1, WIDTH)
    norm_bias = getattr(read(name).layout.final_norm, "bias", torch.zeros(WIDTH))
    expected = bias[some] + raw(name).lm_head.weight[some] @ norm_bias
    torch.testing.assert_close(readout.logits(zeros)[0], expected.detach(), atol=1e-6, rtol=1e-5)


def test_tied_and_untied_heads_are_both_read():
    assert raw("llama tied").lm_head.weight is raw("llama tied").model.embed_tokens.weight
    assert raw("llama").lm_head.weight is not raw("llama").model.embed_tokens.weight


def test_a_model_without_its_soft_cap_has_none():
    config = hf.Gemma2Config(**_GEMMA, final_logit_softcapping=None)
    model = from_model(hf.AutoModelForCausalLM.from_config(config), byte_level())
    assert model.layout.softcap is None


# --- What cannot be read. ---


def unreadable(config, auto=hf.AutoModelForCausalLM):
    with torch.device("meta"):
        model = auto.from_config(config)
    with pytest.raises(KlbError) as caught:
        from_model(model, byte_level())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_several_residual_streams_are_refused_by_name():
    config = hf.Gemma3nTextConfig(
        **_HEAD,
        sliding_window=8,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        laurel_rank=4,
    )
    message = unreadable(config)
    assert "Gemma3nForCausalLM" in message
    assert "several residual streams" in message


def test_an_encoder_decoder_is_refused_by_name():
    config = hf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    message = unreadable(config, hf.AutoModelForSeq2SeqLM)
    assert "T5ForConditionalGeneration" in message
    assert "encoder-decoder" in message


def test_attention_that_looks_ahead_is_refused_by_name():
    message = unreadable(hf.Gemma3TextConfig(**_GEMMA, use_bidirectional_attention=True))
    assert "looks ahead" in message


@pytest.mark.parametrize("name", FORGETFUL)
def test_recurrent_layers_that_lose_a_prefix_are_refused_by_name(name):
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(FORGETFUL[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    with pytest.raises(KlbError, match=f"{type(model).__name__} cannot be read: its recurrent layers lose a prefix"):
        from_model(model.eval(), byte_level())


# --- What a wrong map would do. ---


def test_a_map_without_the_scale_fails_the_self_check(tmp_path):
    shipped = (data_dir("hooks") / "granite.yaml").read_text()
    (tmp_path / "granite.yaml").write_text("\n".join(line for line in shipped.splitlines() if not line.startswith("scale")))
    with pytest.raises(KlbError, match="hook map granite does not decode GraniteForCausalLM"):
        from_model(raw("granite"), byte_level(), hooks=[tmp_path])


def test_a_scale_that_the_config_lacks_is_named(tmp_path):
    shipped = (data_dir("hooks") / "granite.yaml").read_text()
    (tmp_path / "granite.yaml").write_text(shipped.replace("logits_scaling, ", "no_such_number, "))
    with pytest.raises(KlbError, match="no scale attribute no_such_number"):
        from_model(raw("granite"), byte_level(), hooks=[tmp_path])
