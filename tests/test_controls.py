"""Controls keep what they should keep of a lens, and lose what they should lose."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from command import klb
from tiny import LAYERS, WIDTH, save_tiny_llama, tiny_model

from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.controls import control_lenses, random_pairs, random_transport
from klb_probe.lens.corpus import Corpus
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.store import read_metadata

CONTRAST = TokenContrast(((("a", 11), ("b", 22)),))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def lens():
    generator = torch.Generator().manual_seed(5)
    matrices = {layer: torch.eye(WIDTH) + 0.4 * torch.randn(WIDTH, WIDTH, generator=generator) for layer in range(LAYERS - 1)}
    return JacobianLens(matrices, n_prompts=3, target_layer=LAYERS - 1)


def test_a_random_transport_keeps_the_spectrum_and_nothing_else(lens):
    matrix = lens.matrix(0)
    other = random_transport(matrix, torch.Generator().manual_seed(0))
    torch.testing.assert_close(torch.linalg.svdvals(other), torch.linalg.svdvals(matrix), atol=1e-5, rtol=1e-5)
    overlap = (other * matrix).sum() / (other.norm() * matrix.norm())
    assert overlap.abs() < 0.3


def test_random_orthogonal_factors_are_uniform():
    """The mean of Haar-distributed transports is zero; without QR's sign fix it is not."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.stack([random_transport(torch.eye(4), generator) for _ in range(3000)]).mean(0)
    assert mean.abs().max() < 4 * 0.5 / 3000**0.5 * 1.5


def test_the_permuted_control_reads_through_permuted_rows(lens, model):
    permuted, _, _ = control_lenses(lens, model, CONTRAST, k=2000, seed=3)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))
    residual = torch.randn(40, WIDTH)
    expected = CONTRAST.margin(model.token_readout(CONTRAST.token_ids).logits(residual @ lens.matrix(1)[order].T))
    torch.testing.assert_close(permuted.decode(residual, 1).margin, expected, atol=0.02, rtol=0.08)
    real = lens.margin(model, CONTRAST, residual, 1)
    assert torch.corrcoef(torch.stack([permuted.decode(residual, 1).margin, real]))[0, 1].abs() < 0.9


def test_random_pairs_read_the_lens_itself_at_other_tokens(lens, model):
    _, _, pairs = control_lenses(lens, model, CONTRAST, k=500, seed=3)
    residual = torch.randn(10, WIDTH)
    decoded = pairs.decode(residual, 0)
    assert decoded.random.shape == (10, 500)
    torch.testing.assert_close(decoded.margin, decoded.random[:, 0])
    exact = model.token_readout(pairs.contrast.token_ids).logits(lens.transport(residual, 0))
    torch.testing.assert_close(decoded.random, exact[:, 0::2] - exact[:, 1::2], atol=0.05, rtol=0.15)


def test_pairs_are_distinct_ordinary_tokens_of_the_tokenizer(model):
    pairs = random_pairs(model, 200, torch.Generator().manual_seed(0))
    assert len(set(pairs.token_ids)) == 400
    assert not set(pairs.token_ids) & set(model.tokenizer.all_special_ids)
    assert max(pairs.token_ids) < len(model.tokenizer)


def test_at_the_target_every_transport_is_the_identity(lens, model):
    residual = torch.randn(5, WIDTH)
    own = CONTRAST.margin(model.token_readout(CONTRAST.token_ids).logits(residual))
    for control in control_lenses(lens, model, CONTRAST)[:2]:
        torch.testing.assert_close(control.decode(residual, LAYERS - 1).margin, own)


def test_controls_stand_in_every_file_of_a_run(tmp_path, model, lens):
    """The command, with a full lens file: five lenses, each with scores and nulls, and the same last-block check."""
    folder, file = tmp_path / "tiny-llama", tmp_path / "lens.pt"
    save_tiny_llama(folder)
    lens.save(file)
    command = ["--model", folder, "--domains", "deposit", "--framings", "honest", "--quick", "--controls"]
    assert klb("jlens", *command, "--lens", file, "--out", tmp_path / "out") == 0
    summary = pd.read_csv(tmp_path / "out" / "summary.csv")
    names = ["margin", "logit", "permuted", "random transport", "random pairs"]
    assert list(dict.fromkeys(summary["lens"])) == names
    last = summary[(summary["layer"] == LAYERS - 1) & (summary["statistic"] == "agreement")].set_index("lens")["value"]
    assert (last[names[:4]] == 1).all()  # the identity at the last block, whatever the transport below
    scores = summary[summary["statistic"] == "pair_accuracy"]
    assert scores["null_q95"].notna().all()
    assert klb("jlens", *command, "--lens", "logit", "--out", tmp_path / "none") == 2


def test_a_lens_of_some_layers_is_read_at_those_and_at_the_last(tmp_path, model, lens):
    folder, file = tmp_path / "tiny-llama", tmp_path / "some.pt"
    save_tiny_llama(folder)
    lens.subset([1]).save(file)
    command = ["--model", folder, "--domains", "deposit", "--framings", "honest,deny", "--quick"]
    assert klb("jlens", *command, "--lens", file, "--out", tmp_path / "out") == 0
    margins, summary = (pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("margins", "summary"))
    assert set(margins[margins["lens"] == "margin"]["layer"]) == {1, LAYERS - 1}
    assert set(margins[margins["lens"] == "logit"]["layer"]) == set(range(LAYERS))
    assert set(summary[summary["lens"] == "margin"]["layer"]) == {1, LAYERS - 1}
    assert summary["value"].notna().all()


def test_shuffled_text_keeps_every_prompts_tokens_and_its_first():
    corpus = Corpus(((1, 5, 6, 7, 8, 9), (2, 5, 5, 6, 6, 7)), "text", "auto", 6)
    shuffled = corpus.shuffled(3)
    assert [sorted(ids) for ids in shuffled.prompts] == [sorted(ids) for ids in corpus.prompts]
    assert [ids[0] for ids in shuffled.prompts] == [1, 2]
    assert shuffled.prompts != corpus.prompts
    assert shuffled == corpus.shuffled(3)
    assert shuffled.source == "text, tokens shuffled"


def test_a_lens_of_shuffled_text_stands_beside_the_lens(tmp_path):
    folder = tmp_path / "tiny-llama"
    save_tiny_llama(folder)
    fit = ["fit", "--model", folder, "--n", 3, "--max-len", 24]
    plain, mixed = tmp_path / "plain.safetensors", tmp_path / "mixed.safetensors"
    assert klb(*fit, "--out", plain) == 0
    assert klb(*fit, "--shuffle", "--out", mixed) == 0
    assert read_metadata(mixed).corpus.source.endswith("tokens shuffled")
    assert "--shuffle" in read_metadata(mixed).command
    assert read_metadata(mixed).corpus.sha256 != read_metadata(plain).corpus.sha256
    command = ["jlens", "--model", folder, "--domains", "deposit", "--framings", "honest", "--quick", "--lens", plain]
    assert klb(*command, "--shuffled", mixed, "--out", tmp_path / "out") == 0
    margins = pd.read_csv(tmp_path / "out" / "margins.csv")
    inner = margins[margins["layer"] == 0].pivot_table(index=["scenario", "paraphrase"], columns="lens", values="margin")
    assert list(inner) == ["logit", "margin", "shuffled text"]
    assert (inner["margin"] - inner["shuffled text"]).abs().max() > 1e-3
