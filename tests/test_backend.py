"""The Hugging Face backend: what is captured is what the model computes, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch
from tiny import LAYERS, tiny_hf_model, tiny_model

from klb_probe.errors import KlbError
from klb_probe.models.load import from_model

FAMILIES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "olmo",
    "olmo2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_wrapper",
    "gpt2",
    "gpt_neox",
]


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 49_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_residuals_are_block_outputs_and_decode_to_the_models_logits(family):
    model = tiny_model(family)
    ids = ids_of(20)
    with torch.no_grad():
        own = model.model(torch.tensor([ids]), output_hidden_states=True)
    read = model.residuals([ids], range(LAYERS), range(len(ids)))
    assert read.shape == (LAYERS, 1, len(ids), model.d_model)
    for layer in range(LAYERS - 1):  # hidden_states[-1] is already normed, so the last block has no twin there
        torch.testing.assert_close(read[layer], own.hidden_states[layer + 1], atol=1e-5, rtol=1e-5)
    decoded = model.unembed(model.final_norm(read[-1]))
    torch.testing.assert_close(decoded, own.logits, atol=1e-4, rtol=1e-4)
    some = [5, 17, 40_000]
    closed_form = model.token_readout(some).logits(read[-1])
    torch.testing.assert_close(closed_form, own.logits[..., some], atol=1e-4, rtol=1e-4)


def test_the_soft_cap_matters_in_the_family_that_has_one():
    model = tiny_model("gemma2")
    residual = model.residuals([ids_of(12)], [LAYERS - 1], [-1])[0]
    capped, free = model.token_readout([7, 8]), model.token_readout([7, 8])
    assert capped.softcap == 3.0
    from dataclasses import replace

    assert (replace(free, softcap=None).logits(residual) - capped.logits(residual)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_padded_batch_reads_what_single_prompts_read(family, padding):
    if family == "qwen3_5" and padding == "left":
        pytest.skip("linear attention carries left pads into its state; this project pads on the right")
    model = tiny_model(family)
    prompts = [ids_of(n, seed=n) for n in (9, 14, 11)]
    batch = model.residuals(prompts, range(LAYERS), [-1, 2], padding)
    for row, prompt in enumerate(prompts):
        alone = model.residuals([prompt], range(LAYERS), [-1, 2])
        torch.testing.assert_close(batch[:, row], alone[:, 0], atol=2e-5, rtol=1e-4)


def test_a_position_beyond_a_prompt_is_refused():
    with pytest.raises(KlbError, match="beyond the shortest prompt of 5"):
        tiny_model("llama").residuals([ids_of(5), ids_of(9)], [0], [7])


def test_a_layer_the_model_lacks_is_refused():
    with pytest.raises(KlbError, match="layers 0-3"):
        tiny_model("llama").residuals([ids_of(5)], [LAYERS], [0])


def hooks_on(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_nothing_is_left_on_a_users_model_even_after_an_exception():
    inner = tiny_hf_model("llama")
    inner.model.norm.weight.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in inner.parameters()]
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    model = from_model(inner, tiny_model("llama").tokenizer)
    model.residuals([ids_of(8)], [0, 1], [-1])
    with model.gradient_graph(torch.tensor([ids_of(8)]), [0, 1], 3) as (sources, target):
        assert target.requires_grad
        assert not any(parameter.requires_grad for parameter in inner.parameters())
        torch.autograd.grad(target.sum(), sources)
    with pytest.raises(RuntimeError), model.gradient_graph(torch.tensor([ids_of(8)]), [0], 3):
        raise RuntimeError("half way")
    with pytest.raises(IndexError):
        model.residuals([[10**9]], [0], [0])
    assert hooks_on(inner) == 0
    assert [parameter.requires_grad for parameter in inner.parameters()] == flags
    assert all(parameter.grad is None for parameter in inner.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in inner.state_dict().items())


def test_blocks_that_return_tuples_read_like_blocks_that_return_tensors():
    model = tiny_model("llama")
    plain = model.residuals([ids_of(8), ids_of(8, seed=1)], range(LAYERS), [-1])

    class Tupled(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args, **kwargs):
            return (self.block(*args, **kwargs), None)

    class Untupled(Tupled):
        def forward(self, hidden, *args, **kwargs):
            return self.block(hidden[0] if isinstance(hidden, tuple) else hidden, *args, **kwargs)

    blocks = model.layout.blocks
    for i in range(LAYERS - 1):
        blocks[i + 1] = Untupled(blocks[i + 1])
    blocks[0] = Tupled(blocks[0])
    tupled = model.residuals([ids_of(8), ids_of(8, seed=1)], range(LAYERS), [-1])
    assert torch.equal(plain, tupled)


def test_captured_residuals_do_not_change_when_a_block_works_in_place():
    model = tiny_model("llama")

    def in_place(_module, inputs):
        inputs[0].add_(1.0)

    clean = model.residuals([ids_of(8)], [0], [-1])
    handle = model.layout.blocks[1].register_forward_pre_hook(in_place)
    try:
        assert torch.equal(clean, model.residuals([ids_of(8)], [0], [-1]))
    finally:
        handle.remove()


def test_overflowing_residuals_are_an_error_that_names_the_dtype():
    model = tiny_model("llama")
    with torch.no_grad():
        model.layout.blocks[0].mlp.down_proj.weight.mul_(torch.inf)
    with pytest.raises(KlbError, match="not finite in torch.float32"):
        model.residuals([ids_of(8)], [0], [-1])


def test_generation_reports_every_new_token_and_is_seeded():
    model = tiny_model("llama")
    prompt = ids_of(6)
    first = model.generate([prompt], 5, temperature=1.0, seed=3, stop=False)
    assert [len(row) for row in first] == [5]
    assert first == model.generate([prompt], 5, temperature=1.0, seed=3, stop=False)
    assert first != model.generate([prompt], 5, temperature=1.0, seed=4, stop=False)
    # Every generated token has a residual in a teacher-forced forward pass, the last one too.
    assert model.residuals([prompt + first[0]], [0], range(11)).shape[2] == 11


def test_the_fingerprint_follows_weights_and_survives_a_change_of_dtype():
    model = tiny_model("llama")
    assert model.fingerprint == tiny_model("llama").fingerprint
    assert model.fingerprint != tiny_model("llama", seed=1).fingerprint
    assert from_model(tiny_hf_model("llama").bfloat16(), model.tokenizer).fingerprint == model.fingerprint


def test_the_default_models_last_block_gives_its_own_logits(smollm, yes_no):
    ids = smollm.chat.encode("You are a clerk.", "Is the refund owed? Answer Yes or No.")
    with torch.no_grad():
        own = smollm.model(torch.tensor([ids])).logits[0, -1, yes_no.token_ids]
    last = smollm.residuals([ids], [smollm.n_layers - 1], [-1])[0, 0, 0]
    torch.testing.assert_close(smollm.token_readout(yes_no.token_ids).logits(last), own, atol=1e-4, rtol=1e-5)
