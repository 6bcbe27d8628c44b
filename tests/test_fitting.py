"""The targeted rows of a margin lens against independent computations of the Jacobian estimator."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from einops import einsum
from tiny import LAYERS, WIDTH, tiny_model

from klb_probe.cases.load import load_domains
from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast, gaussian_rows
from klb_probe.lens.corpus import Corpus, file_corpus, sampled_corpus
from klb_probe.lens.fitting import FitOptions, cotangent_rows, fit_margin_lens, prompt_rows
from klb_probe.lens.margin import LogitLens
from klb_probe.sharding import Shard


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 49_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class MixingToy:
    """A linear residual model whose blocks MIX positions causally: h' = h + A h W with A lower triangular."""

    name, n_layers, d_model, device, dtype = "toy", 4, 5, torch.device("cpu"), torch.float64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.length = 9
        shape = {"generator": generator, "dtype": torch.float64}
        self.embedded = torch.randn(self.length, self.d_model, **shape)
        self.mixing = [torch.randn(self.length, self.length, **shape).tril() * 0.3 for _ in range(self.n_layers)]
        self.weights = [torch.randn(self.d_model, self.d_model, **shape) * 0.3 for _ in range(self.n_layers)]

    @contextmanager
    def gradient_graph(self, ids, layers, target_layer):
        residual, kept = self.embedded, {}
        for layer in range(target_layer + 1):
            residual = residual + self.mixing[layer] @ residual @ self.weights[layer]
            if layer == min(layers):
                residual = residual.detach().requires_grad_()
            kept[layer] = residual[None]
            residual = kept[layer][0]
        yield [kept[layer] for layer in layers], kept[target_layer]

    def closed_form(self, layer: int, target_layer: int, skip: int) -> torch.Tensor:
        """Mean over valid p of the sum over valid p' of d target[p'] / d source[p]."""
        return self.transport(layer, target_layer)[skip:-1, :, skip:-1].sum(0).mean(1)

    def diagonal(self, layer: int, target_layer: int, skip: int) -> torch.Tensor:
        """What is left of it when only p' = p counts."""
        return self.transport(layer, target_layer).diagonal(dim1=0, dim2=2)[:, :, skip:-1].mean(-1)

    def transport(self, layer: int, target_layer: int) -> torch.Tensor:
        """d target[p'] / d source[p] as ``[p', out, p, in]``: one product of Kronecker sums."""
        size = self.length * self.d_model
        transport = torch.eye(size, dtype=torch.float64)
        for block in range(layer + 1, target_layer + 1):
            transport = (torch.eye(size) + torch.kron(self.mixing[block], self.weights[block].T.contiguous())) @ transport
        return transport.reshape(self.length, self.d_model, self.length, self.d_model)


@pytest.mark.parametrize("target_layer", [3, 2])
@pytest.mark.parametrize("batch", [2, 7])
def test_rows_equal_the_closed_form_of_a_model_that_mixes_positions(target_layer, batch):
    toy, skip = MixingToy(), 2
    rows = torch.randn(7, toy.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    layers = list(range(target_layer))
    found = prompt_rows(toy, range(toy.length), rows, layers, target_layer=target_layer, skip_first=skip, batch=batch)
    for layer in layers:
        expected = rows @ toy.closed_form(layer, target_layer, skip)
        torch.testing.assert_close(found[layer], expected, atol=1e-12, rtol=1e-10)
        # Positions matter here: an estimator that kept only p' = p would be far off.
        assert (toy.closed_form(layer, target_layer, skip) - toy.diagonal(layer, target_layer, skip)).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_rows_equal_finite_differences(family):
    """Push every valid source position by +-eps along one axis and watch the cotangents' sum over valid targets."""
    model = tiny_model(family, dtype=torch.float64)
    for module in model.model.modules():
        if type(module).__name__ == "LlamaRMSNorm":  # transformers' own works in float32 whatever it is given
            module.forward = lambda x, m=module: m.weight * x * (x.square().mean(-1, keepdim=True) + m.variance_epsilon).rsqrt()
    ids, skip, eps = ids_of(12), 3, 1e-5
    readout = model.token_readout([11, 22])
    rows = cotangent_rows(readout, FitOptions(k=3)).double()
    found = prompt_rows(model, ids, rows, list(range(LAYERS - 1)), target_layer=LAYERS - 1, skip_first=skip, batch=4)

    def total(layer: int, axis: int, step: float) -> torch.Tensor:
        def push(_module, _inputs, output):
            moved = output.clone()
            moved[:, skip:-1, axis] += step
            return moved

        handle = model.layout.blocks[layer].register_forward_hook(push)
        try:
            last = model.residuals([ids], [LAYERS - 1], range(len(ids)))[0, 0]
        finally:
            handle.remove()
        return rows @ last[skip:-1].sum(0)

    for layer in range(LAYERS - 1):
        difference = torch.stack(
            [(total(layer, axis, eps) - total(layer, axis, -eps)) / (2 * eps) for axis in range(WIDTH)], dim=-1
        ) / (len(ids) - 1 - skip)
        assert (found[layer] - difference).norm() / difference.norm() <= 1e-4
        assert found[layer].norm() > 1e-2


def full_jacobian(model, ids, skip: int, target_layer: int, batch: int = 64) -> torch.Tensor:
    """All d_model rows of J_l of one prompt: ``[layer, d_model, d_model]``."""
    rows = torch.eye(model.d_model, dtype=model.dtype)
    layers = list(range(target_layer))
    return prompt_rows(model, ids, rows, layers, target_layer=target_layer, skip_first=skip, batch=batch)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_numerator_and_scale_are_those_of_the_full_lens(family):
    """Full lens: the model's own norm and head on J h. Margin lens: the same, but for its estimate of one positive scale."""
    model = tiny_model(family)
    contrast = TokenContrast(((("a", 11), ("b", 22)),))
    ids = ids_of(24)
    options = FitOptions(skip_first=4, k=1024, batch=1026)
    corpus = Corpus((tuple(ids),), "test", "never", 24)
    lens = fit_margin_lens(model, corpus, contrast, options)
    full = full_jacobian(model, ids, 4, LAYERS - 1)
    residuals = model.residuals([ids_of(24, seed=s) for s in range(6)], range(LAYERS), [-1])[:, :, 0]
    for layer in range(LAYERS - 1):
        transported = residuals[layer] @ full[layer].T
        expected = model.unembed(model.final_norm(transported))[:, [11, 22]].float()
        torch.testing.assert_close(
            residuals[layer] @ lens.rows[layer].T,
            transported @ model.token_readout([11, 22]).directions.T,
            atol=1e-4,
            rtol=1e-4,
        )
        # With this many sketch rows the norm is known to about 1 / sqrt(2 * 1024) = 2.2 %.
        margin = lens.margin(residuals[layer], layer)
        torch.testing.assert_close(margin, expected[:, 0] - expected[:, 1], atol=0.05, rtol=0.1)
    own = model.unembed(model.final_norm(residuals[-1]))[:, [11, 22]].float()
    torch.testing.assert_close(lens.margin(residuals[-1], LAYERS - 1), own[:, 0] - own[:, 1], atol=1e-5, rtol=1e-4)


def test_rows_equal_transformer_lenss_own_jacobian_lens_on_the_default_model(smollm, yes_no):
    from transformer_lens.model_bridge import TransformerBridge
    from transformer_lens.tools.analysis.jacobian_lens import JacobianLens

    ids, layers, last = ids_of(32), [27, 28], smollm.n_layers - 1
    bridge = TransformerBridge.boot_transformers("SmolLM2", hf_model=copy.deepcopy(smollm.model), tokenizer=smollm.tokenizer)
    bridge.to_tokens = lambda _prompt: torch.tensor([ids])  # ids, not text: its tokenizer call would add a BOS
    theirs = JacobianLens.fit(bridge, ["any"], corpus="test", source_layers=layers, dim_batch=64, show_progress=False)
    rows = cotangent_rows(smollm.token_readout(yes_no.token_ids), FitOptions())
    ours = prompt_rows(smollm, ids, rows, layers, target_layer=last, skip_first=16, batch=34)
    for i, layer in enumerate(layers):
        expected = rows @ theirs.jacobians[layer].float()
        assert (ours[i] - expected).norm() / expected.norm() <= 1e-4


def test_margins_have_the_full_lenss_numerator_and_sign_at_every_layer_of_the_default_model(smollm, yes_no):
    """Numerators equal, signs equal, and with 32 sketch rows correlation of at least 0.99 with the full lens's margins."""
    openings = [case.opening for domain in load_domains() for case in domain.cases]
    prompts = [smollm.tokenizer(opening)["input_ids"][:24] for opening in openings]
    ids, skip, last = prompts[0], 4, smollm.n_layers - 1
    corpus = Corpus((tuple(ids),), "test", "never", 24)
    lens = fit_margin_lens(smollm, corpus, yes_no, FitOptions(skip_first=skip))
    full = full_jacobian(smollm, ids, skip, last, batch=96)
    residuals = smollm.residuals(prompts, range(last), [-1])[:, :, 0]
    transported = einsum(full, residuals, "layer out d, layer prompt d -> layer prompt out")
    readout = smollm.token_readout(yes_no.token_ids)
    exact = yes_no.margin(readout.logits(transported))
    ours = torch.stack([lens.margin(residuals[layer], layer) for layer in range(last)])
    numerators = yes_no.margin(einsum(residuals, lens.rows, "layer prompt d, layer token d -> layer prompt token"))
    expected = yes_no.margin(transported @ readout.directions.T)
    assert ((numerators - expected).abs() / expected.abs().amax(1, keepdim=True)).max() <= 1e-4
    clear = exact.abs() > 1e-3 * exact.abs().max()
    assert torch.equal(ours.sign()[clear], exact.sign()[clear])
    assert torch.corrcoef(torch.stack([ours.flatten(), exact.flatten()]))[0, 1] >= 0.99


def test_random_readouts_are_the_sketch_of_the_transported_residual_over_its_rms():
    model = tiny_model("llama")
    contrast = TokenContrast(((("a", 11), ("b", 22)),))
    lens = fit_margin_lens(model, Corpus((tuple(ids_of(24)),), "t", "never", 24), contrast, FitOptions(skip_first=4, k=8))
    full, sketch = full_jacobian(model, ids_of(24), 4, LAYERS - 1), gaussian_rows(8, WIDTH, 0)
    residual = torch.randn(6, WIDTH)
    for layer in range(LAYERS - 1):
        readings = residual @ full[layer].T @ sketch.T
        scale = (readings.square().sum(-1) / WIDTH + lens.readout.eps).sqrt()
        torch.testing.assert_close(lens.decode(residual, layer).random, readings / scale[:, None], atol=1e-4, rtol=1e-3)
    rms = residual.square().mean(-1, keepdim=True).sqrt()
    twin = LogitLens.of(model, contrast, k=8).decode(residual, 0).random
    torch.testing.assert_close(twin, residual @ sketch.T / rms, atol=1e-3, rtol=1e-3)


def test_the_default_models_last_block_is_the_logit_lens(smollm, yes_no):
    corpus = Corpus((tuple(ids_of(20)),), "test", "never", 20)
    lens = fit_margin_lens(smollm, corpus, yes_no, FitOptions(skip_first=4, k=2))
    residual = torch.randn(3, smollm.d_model)
    last = smollm.n_layers - 1
    assert torch.equal(lens.margin(residual, last), LogitLens.of(smollm, yes_no).margin(residual, last))


def test_a_penultimate_target_moves_the_identity_down():
    model = tiny_model("llama")
    contrast = TokenContrast(((("a", 11), ("b", 22)),))
    corpus = Corpus((tuple(ids_of(24)),), "test", "never", 24)
    lens = fit_margin_lens(model, corpus, contrast, FitOptions(target="penultimate", skip_first=4))
    assert lens.metadata.source_layers == (0, 1)
    assert lens.metadata.target_layer == 2
    residual = torch.randn(3, WIDTH)
    assert torch.equal(lens.margin(residual, 2), lens.margin(residual, 3))
    assert not torch.equal(lens.margin(residual, 1), lens.margin(residual, 2))


def test_margins_do_not_depend_on_the_scale_of_the_jacobian():
    """A missing final norm would show here."""
    model = tiny_model("llama")
    contrast = TokenContrast(((("a", 11), ("b", 22)),))
    lens = fit_margin_lens(model, Corpus((tuple(ids_of(24)),), "t", "never", 24), contrast, FitOptions(skip_first=4))
    residual = torch.randn(5, WIDTH) * 10
    before = lens.margin(residual, 0)
    lens.rows, lens.sketch = lens.rows * 3, lens.sketch * 3
    torch.testing.assert_close(lens.margin(residual, 0), before, atol=1e-4, rtol=1e-3)


def test_a_fit_is_the_mean_of_its_prompts_and_counts_the_short_ones():
    model = tiny_model("llama")
    contrast = TokenContrast(((("a", 11), ("b", 22)),))
    long = [tuple(ids_of(24, seed=s)) for s in range(3)]
    options = FitOptions(skip_first=4)
    whole = fit_margin_lens(model, Corpus((*long, tuple(ids_of(5))), "t", "never", 24), contrast, options)
    single = [fit_margin_lens(model, Corpus((one,), "t", "never", 24), contrast, options).rows for one in long]
    torch.testing.assert_close(whole.rows, torch.stack(single).mean(0), atol=1e-6, rtol=1e-5)
    assert (whole.metadata.corpus.n_prompts, whole.metadata.corpus.n_skipped) == (3, 1)
    with pytest.raises(KlbError, match="nothing to fit on"):
        fit_margin_lens(model, Corpus((tuple(ids_of(5)),), "t", "never", 24), contrast, options)
    with pytest.raises(KlbError, match="shard 4/4 has none of the 3 prompts of t; make 3 shards at most"):
        fit_margin_lens(model, Corpus(tuple(long), "t", "never", 24), contrast, replace(options, shard=Shard(4, 4)))


def test_a_caller_under_no_grad_still_fits_and_a_dead_gradient_is_an_error():
    model = tiny_model("llama")
    rows = torch.randn(2, WIDTH)
    with torch.no_grad():
        assert prompt_rows(model, ids_of(9), rows, [0], target_layer=3, skip_first=2, batch=2).abs().max() > 0
    with pytest.raises(KlbError, match="all zero"):
        prompt_rows(model, ids_of(9), rows * 0, [0], target_layer=3, skip_first=2, batch=2)


def test_the_sketch_estimates_norms_without_bias():
    vectors = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    ratios = torch.stack([(vectors @ gaussian_rows(32, 64, s).T).square().sum(-1) for s in range(200)]) / vectors.square().sum(
        -1
    )
    assert abs(ratios.mean().item() - 1) < 0.01
    assert abs(ratios.sqrt().std().item() - 1 / (2 * 32) ** 0.5) < 0.02


def test_corpora_record_their_bos_policy_and_cut_to_length(tmp_path):
    model = tiny_model("llama")
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i} tells a short story of a parcel that came late." for i in range(40)))
    plain = file_corpus(model, path, n=5, max_tokens=30)
    forced = file_corpus(model, path, n=5, max_tokens=30, bos="always")
    assert [len(prompt) for prompt in plain.prompts] == [30] * 5
    bos = model.tokenizer.bos_token_id
    assert all(prompt[0] != bos for prompt in plain.prompts)  # this tokenizer adds none by itself
    assert all(prompt[0] == bos and prompt[1] != bos for prompt in forced.prompts)
    assert plain.sha256 != forced.sha256
    with pytest.raises(KlbError, match="cannot read corpus"):
        file_corpus(model, tmp_path / "absent.txt", n=1, max_tokens=8)


def test_sampled_text_has_the_asked_length_and_repeats_with_its_seed():
    model = tiny_model("llama")
    first, again = (sampled_corpus(model, n=9, max_tokens=12, seed=4) for _ in range(2))
    assert first == again
    assert len(first.prompts) == 9
    assert {len(prompt) for prompt in first.prompts} == {12}
    assert len(set(first.prompts)) == 9
    assert first != sampled_corpus(model, n=9, max_tokens=12, seed=5)
