"""The full lens: exact against its definition, read from every known file or refused by name, never executed."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import LAYERS, WIDTH, default_tokenizer, tiny_hf_model, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import Corpus
from klb_probe.lens.fitting import FitOptions, fit_margin_lens, prompt_rows
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.library import load_lens
from klb_probe.lens.metadata import CorpusRecord, LensMetadata
from klb_probe.lens.published import HubFile, find_published, parse_lens_spec, published_lenses
from klb_probe.models.load import from_model

SOURCES = range(LAYERS - 1)
LAST = LAYERS - 1
CONTRAST = TokenContrast(((("a", 11), ("b", 22)), (("c", 33), ("d", 44))))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def matrices(layers=SOURCES, *, width=WIDTH, dtype=torch.float16, seed=0):
    """Something like Jacobians: the identity plus noise."""
    generator = torch.Generator().manual_seed(seed)
    return {layer: (torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator)).to(dtype) for layer in layers}


def public(**changes):
    """The public format, from its description alone."""
    content = {"J": matrices(), "n_prompts": 7, "source_layers": list(SOURCES), "d_model": WIDTH, **changes}
    return {key: value for key, value in content.items() if value is not None}


def checkpoint(**changes):
    """The state of an unfinished fit of 5 prompts, from its description alone."""
    sums = {layer: 5 * matrix for layer, matrix in matrices(dtype=torch.float32).items()}
    return {
        "jacobian_sum": sums,
        "n_done": 5,
        "next_idx": 6,
        "source_layers": list(SOURCES),
        "target_layer": LAST,
        "skip_first": 16,
        **changes,
    }


@pytest.fixture
def written(tmp_path):
    """Write a payload, give its path."""

    def write(payload, name="lens.pt"):
        torch.save(payload, tmp_path / name)
        return tmp_path / name

    return write


def refused(path):
    with pytest.raises(KlbError) as caught:
        JacobianLens.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def metadata_of(model, **changes):
    known = {
        "model": model.identity,
        "fingerprint": model.fingerprint,
        "n_layers": model.n_layers,
        "d_model": model.d_model,
        "dtype": "float32",
        "source_layers": tuple(SOURCES),
        "target_layer": LAST,
        "contrast": (),
        "k": 0,
        "seed": 0,
        "skip_first": 4,
        "bos": "never",
        "corpus": CorpusRecord(source="test", sha256="0" * 64, n_prompts=7, n_skipped=0, max_tokens=24),
        "command": "made in a test",
        "versions": {},
        "kind": "full",
    }
    return LensMetadata(**{**known, **changes})


# --- Reading residuals. ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma"])
def test_readings_are_the_models_own_norm_and_head_on_the_matrix_product(family):
    model, stored = tiny_model(family), matrices()
    lens = JacobianLens(stored, n_prompts=7, target_layer=LAST)
    residual = torch.randn(5, 3, WIDTH)
    for layer in range(LAYERS):
        expected = residual if layer == LAST else torch.einsum("ij,bpj->bpi", stored[layer].float(), residual)
        torch.testing.assert_close(lens.transport(residual, layer), expected)
        logits = model.unembed(model.final_norm(expected))[..., : len(model.tokenizer)].float()
        torch.testing.assert_close(lens.logits(model, residual, layer), logits)
        top = lens.logits(model, residual, layer, top_k=4)
        assert torch.equal(top.logits, lens.logits(model, residual, layer).topk(4).values)
        torch.testing.assert_close(logits.gather(-1, top.ids), top.logits)
        margin = (logits[..., 11] - logits[..., 22] + logits[..., 33] - logits[..., 44]) / 2
        torch.testing.assert_close(lens.margin(model, CONTRAST, residual, layer), margin, atol=2e-5, rtol=1e-4)


def test_the_maths_is_float32_whatever_is_stored_and_read(model):
    """fp16 maths would overflow here: 400 times 300, 16 times."""
    lens = JacobianLens({0: torch.full((WIDTH, WIDTH), 400.0).half() + torch.eye(WIDTH).half()}, n_prompts=1)
    residual = torch.full((WIDTH,), 300.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        transported = lens.transport(residual.to(dtype), 0)
        assert transported.dtype == torch.float32
        torch.testing.assert_close(transported, torch.full((WIDTH,), 300.0 * (400 * WIDTH + 1)))


def test_readings_do_not_depend_on_the_scale_of_the_matrices(model):
    """A missing final norm would show here."""
    stored, residual = matrices(dtype=torch.float32), 10 * torch.randn(4, WIDTH)
    one, three = (
        JacobianLens({layer: factor * matrix for layer, matrix in stored.items()}, n_prompts=1, target_layer=LAST)
        for factor in (1, 3)
    )
    for layer in SOURCES:
        torch.testing.assert_close(
            one.logits(model, residual, layer), three.logits(model, residual, layer), atol=1e-4, rtol=1e-3
        )


def test_from_the_target_on_the_lens_is_the_identity(model):
    lens, residual = JacobianLens(matrices([0, 1]), n_prompts=1, target_layer=2), torch.randn(3, WIDTH)
    assert torch.equal(lens.transport(residual, 2), residual)
    assert torch.equal(lens.transport(residual, 3), residual)
    assert not torch.allclose(lens.transport(residual, 1), residual)


def test_padded_head_rows_are_never_read():
    """A head padded beyond the tokenizer: its rows are the largest here, and never come up."""
    network, tokenizer = tiny_hf_model("llama"), default_tokenizer()
    network.resize_token_embeddings(len(tokenizer) + 64)
    with torch.no_grad():
        network.lm_head.weight[len(tokenizer) :] = 1e3 * network.lm_head.weight[:64]
    padded = from_model(network, tokenizer, name="padded")
    lens, residual = JacobianLens(matrices(), n_prompts=1, target_layer=LAST), torch.randn(9, WIDTH)
    for layer in range(LAYERS):
        assert (padded.unembed(padded.final_norm(lens.transport(residual, layer))).argmax(-1) >= len(tokenizer)).any()
        assert lens.logits(padded, residual, layer, top_k=50).ids.max() < len(tokenizer)
        assert lens.logits(padded, residual, layer).shape == (9, len(tokenizer))


def test_a_missing_layer_is_named(model):
    lens, residual = JacobianLens(matrices([0, 2]), n_prompts=1), torch.randn(WIDTH)
    with pytest.raises(KlbError, match="no layer 1; it has 0, 2"):
        lens.transport(residual, 1)
    with pytest.raises(KlbError, match="no layer 3"):  # without a model nobody knows whether 3 is the target
        lens.transport(residual, 3)
    assert torch.equal(lens.for_model(model).transport(residual, 3), residual)


# --- Other lenses from it. ---


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("target", ["last", "penultimate"])
def test_its_margin_lens_is_the_one_fitted_on_the_same_prompts(family, target):
    model = tiny_model(family)
    prompts = [tuple(torch.randint(3, 49_000, (18,), generator=torch.Generator().manual_seed(s)).tolist()) for s in range(2)]
    options = FitOptions(target=target, k=6, seed=3, skip_first=4)
    target_layer = options.target_layer(LAYERS)
    fitted = fit_margin_lens(model, Corpus(tuple(prompts), "test", "never", 18), CONTRAST, options)
    how = {"target_layer": target_layer, "skip_first": 4, "batch": WIDTH}
    full = [prompt_rows(model, ids, torch.eye(WIDTH), list(range(target_layer)), **how) for ids in prompts]
    means = dict(enumerate((full[0] + full[1]) / 2))
    lens = JacobianLens(means, n_prompts=2, target_layer=target_layer)
    converted = lens.to_margin_lens(model, CONTRAST, k=6, seed=3)
    scale = fitted.rows.abs().max(), fitted.sketch.abs().max()
    assert (converted.rows - fitted.rows).abs().max() <= 1e-5 * scale[0]
    assert (converted.sketch - fitted.sketch).abs().max() <= 1e-5 * scale[1]
    residual = torch.randn(LAYERS, 4, WIDTH)
    for layer in range(LAYERS):
        torch.testing.assert_close(
            converted.margin(residual[layer], layer), fitted.margin(residual[layer], layer), atol=1e-4, rtol=1e-3
        )
        # The rows give the margin's numerator exactly.
        if layer < target_layer:
            numerator = lens.transport(residual[layer], layer) @ model.token_readout(CONTRAST.token_ids).directions.T
            torch.testing.assert_close(residual[layer] @ converted.rows[layer].T, numerator, atol=1e-4, rtol=1e-3)


def test_a_margin_lens_keeps_what_the_full_lens_knows(model):
    known = JacobianLens(matrices(), n_prompts=7, metadata=metadata_of(model)).to_margin_lens(model, CONTRAST, k=4, seed=9)
    assert known.metadata.corpus.n_prompts == 7
    assert (known.metadata.k, known.metadata.seed, known.metadata.contrast) == (4, 9, CONTRAST.pairs)
    assert (known.metadata.kind, known.metadata.fingerprint) == ("margin", model.fingerprint)
    assert "7 prompts" in known.metadata.command
    unknown = JacobianLens(matrices(), n_prompts=7).to_margin_lens(model, CONTRAST)
    assert unknown.metadata.corpus is unknown.metadata.fingerprint is unknown.metadata.bos is None
    assert (unknown.metadata.target_layer, unknown.metadata.n_layers) == (LAST, LAYERS)
    assert "target layer not recorded" in unknown.metadata.command
    assert "target layer not recorded" not in known.metadata.command


def test_an_unrecorded_target_is_taken_for_the_last_block_and_that_is_said(model, caplog):
    caplog.set_level("INFO", "klb_probe")
    JacobianLens(matrices(), n_prompts=7).to_margin_lens(model, CONTRAST)
    assert "target layer not recorded, taken to be the last block (3)" in caplog.text
    assert "though" not in caplog.text
    JacobianLens(matrices([0, 1]), n_prompts=7).for_model(model)
    assert "though its layers end at 1" in caplog.text


def test_merging_weighs_by_prompts(model):
    one, two = matrices(dtype=torch.float32), matrices(dtype=torch.float32, seed=1)
    lenses = [JacobianLens(J, n_prompts=n, metadata=metadata_of(model)) for J, n in ((one, 3), (two, 9))]
    merged = JacobianLens.merge(lenses)
    assert merged.n_prompts == 12
    assert merged.metadata.corpus.n_prompts == 14
    for layer in SOURCES:
        torch.testing.assert_close(merged.matrix(layer), (3 * one[layer] + 9 * two[layer]) / 12, atol=1e-6, rtol=1e-6)
    halves = JacobianLens.merge([JacobianLens(matrices(seed=s), n_prompts=1) for s in range(2)])
    assert halves.matrix(0, dtype=torch.float16).equal(halves._matrices[0])  # stays as narrow as it came


def test_merging_normalised_fits_merges_their_norms_too(model):
    """A normalised fit is a mean of directions times a mean norm; so is the merged one."""
    one, two = matrices(dtype=torch.float32), matrices(dtype=torch.float32, seed=1)
    norms = (2.0, 3.0, 4.0), (5.0, 6.0, 8.0)
    lenses = [
        JacobianLens({i: m * J[i] for i, m in enumerate(n)}, n_prompts=count, metadata=metadata_of(model, norms=n))
        for J, n, count in zip((one, two), norms, (1, 3), strict=True)
    ]
    merged = JacobianLens.merge(lenses)
    for i in SOURCES:
        norm = (norms[0][i] + 3 * norms[1][i]) / 4
        assert merged.metadata.norms[i] == pytest.approx(norm)
        torch.testing.assert_close(merged.matrix(i), norm * (one[i] + 3 * two[i]) / 4)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"target_layer": None}, "target_layer"),
        ({"target_layer": 9}, "target_layer"),
        ({"facts": {"model_name": "other"}}, "model_name"),
        ({"facts": {"skip_first": 4}}, "skip_first"),
        ({"jacobians": matrices([0, 1])}, "source_layers"),
        ({"jacobians": matrices(width=8)}, "d_model"),
    ],
    ids=["no target", "target", "model", "skip", "layers", "width"],
)
def test_lenses_of_different_kinds_are_not_merged(other, what):
    first = {"jacobians": matrices(), "n_prompts": 2, "target_layer": LAST, "facts": {"model_name": "one", "skip_first": 16}}
    facts = {**first["facts"], **other.pop("facts", {})}
    with pytest.raises(KlbError, match=f"differ in {what}"):
        JacobianLens.merge([JacobianLens(**first), JacobianLens(**{**first, **other, "facts": facts})])


def test_lenses_of_other_weights_are_not_merged(model):
    lenses = [JacobianLens(matrices(), n_prompts=2, metadata=metadata_of(m)) for m in (model, tiny_model("llama", seed=1))]
    with pytest.raises(KlbError, match="differ in fingerprint"):
        JacobianLens.merge(lenses)
    with pytest.raises(KlbError, match="no lenses"):
        JacobianLens.merge([])


def test_a_subset_keeps_its_layers_and_what_is_known(model):
    lens = JacobianLens(matrices(), n_prompts=7, metadata=metadata_of(model, norms=(1.0, 2.0, 3.0)))
    some = lens.subset([2, 0, 2])
    assert some.source_layers == some.metadata.source_layers == (0, 2)
    assert some.metadata.norms == (1.0, 3.0)
    assert torch.equal(some.matrix(2), lens.matrix(2))
    assert lens.source_layers == (0, 1, 2)
    with pytest.raises(KlbError, match="no layer 7"):
        lens.subset([0, 7])
    with pytest.raises(KlbError, match="no layers"):
        lens.subset([])


# --- Files. ---


def test_a_file_written_by_hand_reads_right(written):
    path = written(public())
    lens = JacobianLens.open(path)
    assert (lens.source_layers, lens.d_model, lens.n_prompts, lens.file) == (tuple(SOURCES), WIDTH, 7, path)
    assert lens.target_layer is lens.metadata is None
    residual = torch.randn(2, WIDTH)
    for layer, matrix in matrices().items():
        torch.testing.assert_close(lens.transport(residual, layer), residual @ matrix.float().T)


@pytest.mark.parametrize(
    "more",
    [
        {"d_source": WIDTH},
        {"metadata": {"model_name": "owner/model", "corpus": "wikitext", "estimator": "jacobian_lens", "n_prompts": 7}},
        {"provenance": {"capture_point": "block_output", "stream_reduce": "none"}},
        {"model_name": "owner/model", "corpus": "wikitext"},
        {"metadata": {"weights": torch.ones(2), "nested": {"fine": [1, None]}}},
    ],
    ids=["d_source", "TransformerLens", "neuronpedia", "flat", "tensors"],
)
def test_known_additions_are_read(written, more):
    lens = JacobianLens.open(written(public(**more)))
    assert torch.equal(lens.matrix(1), matrices()[1].float())
    assert "weights" not in lens.facts
    if "corpus" in {**more, **more.get("metadata", {})}:
        assert (lens.facts["model_name"], lens.facts["corpus"]) == ("owner/model", "wikitext")


def test_an_unfinished_fit_is_divided_by_its_prompts_and_said_to_be_one(written, caplog, tmp_path, model):
    lens = JacobianLens.open(written(checkpoint()))
    assert "unfinished" in caplog.text
    assert "5 prompts" in caplog.text
    assert (lens.n_prompts, lens.target_layer) == (5, LAST)
    for layer, matrix in matrices(dtype=torch.float32).items():
        torch.testing.assert_close(lens.matrix(layer), matrix)
    assert "after 5 prompts" in lens.to_margin_lens(model, CONTRAST).metadata.command
    lens.save(tmp_path / "finished.pt")
    again = JacobianLens.open(tmp_path / "finished.pt")
    torch.testing.assert_close(again.matrix(0), lens.matrix(0), atol=1e-3, rtol=1e-3)
    assert "after 5 prompts" in again.facts["unfinished"]


def test_what_we_write_is_the_public_format(model, tmp_path):
    JacobianLens(matrices(), n_prompts=7, metadata=metadata_of(model)).save(tmp_path / "new" / "lens.pt")
    content = torch.load(tmp_path / "new" / "lens.pt", weights_only=True)
    assert set(content) == {"J", "n_prompts", "source_layers", "d_model", "metadata"}
    assert (content["n_prompts"], content["source_layers"], content["d_model"]) == (7, list(SOURCES), WIDTH)
    assert {matrix.dtype for matrix in content["J"].values()} == {torch.float16}
    assert content["metadata"]["target_layer"] == LAST
    again = JacobianLens.open(tmp_path / "new" / "lens.pt")
    assert again.metadata == metadata_of(model)
    assert all(torch.equal(again.matrix(layer), matrix.float()) for layer, matrix in matrices().items())
    JacobianLens(matrices(), n_prompts=7).save(tmp_path / "bare.pt")
    assert set(torch.load(tmp_path / "bare.pt", weights_only=True)) == {"J", "n_prompts", "source_layers", "d_model"}


def test_an_assumed_target_is_not_written_as_a_fact(model, tmp_path):
    JacobianLens(matrices(), n_prompts=7).for_model(model).save(tmp_path / "lens.pt")
    assert JacobianLens.open(tmp_path / "lens.pt").target_layer is None


def test_a_view_is_saved_without_what_it_looks_into(tmp_path):
    stack = torch.stack([*matrices(width=64).values()])
    JacobianLens({0: stack[0], 1: stack[1].T}, n_prompts=1).save(tmp_path / "lens.pt")
    assert (tmp_path / "lens.pt").stat().st_size < 2.3 * stack[0].nbytes
    assert torch.equal(JacobianLens.open(tmp_path / "lens.pt").matrix(1), stack[1].T.float())


def test_files_pass_to_transformer_lens_and_back(model, tmp_path):
    from transformer_lens.tools.analysis.jacobian_lens import JacobianLens as Theirs

    JacobianLens(matrices(), n_prompts=7, metadata=metadata_of(model)).save(tmp_path / "ours.pt")
    theirs = Theirs.load(str(tmp_path / "ours.pt"))
    assert (theirs.source_layers, theirs.n_prompts, theirs.d_model) == (list(SOURCES), 7, WIDTH)
    residual = torch.randn(2, WIDTH)
    for layer, matrix in matrices().items():
        assert torch.equal(theirs.jacobians[layer], matrix.float())
    theirs.save(str(tmp_path / "back.pt"))
    back = JacobianLens.open(tmp_path / "back.pt")
    assert back.metadata == metadata_of(model)
    torch.testing.assert_close(back.transport(residual, 1), theirs.transport(residual, 1))
    fitted = {"model_name": "owner/name", "target_layer": LAST, "hook_convention": "blocks.{layer}.hook_out"}
    Theirs(matrices(), n_prompts=3, d_model=WIDTH, metadata=fitted).save(str(tmp_path / "theirs.pt"))
    opened = JacobianLens.open(tmp_path / "theirs.pt")
    assert (opened.n_prompts, opened.target_layer, opened.facts["model_name"]) == (3, LAST, "owner/name")


@pytest.mark.parametrize("largest", [1e5, torch.finfo(torch.float16).max * 1.1])
def test_what_float16_cannot_hold_is_not_written(tmp_path, largest):
    stored = matrices(dtype=torch.float32)
    stored[1][2, 3] = largest
    with pytest.raises(KlbError, match="layer 1 does not fit into float16"):
        JacobianLens(stored, n_prompts=1).save(tmp_path / "lens.pt")
    with pytest.raises(KlbError, match="layer 0 is all zero in float16"):
        JacobianLens({0: torch.full((4, 4), 1e-9)}, n_prompts=1).save(tmp_path / "lens.pt")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    path, lens = tmp_path / "lens.pt", JacobianLens(matrices(), n_prompts=1)
    lens.save(path)
    before = path.read_bytes()

    def half_written(_payload, target):
        Path(target).write_bytes(b"half a lens")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half_written)
    with pytest.raises(OSError, match="disk full"):
        lens.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_lens_can_be_saved_over_the_file_it_is_mapped_from(written):
    path = written(public())
    lens = JacobianLens.open(path)
    lens.save(path)
    assert torch.equal(lens.matrix(2), matrices()[2].float())
    assert torch.equal(JacobianLens.open(path).matrix(2), matrices()[2].float())


def test_a_folder_with_one_lens_is_that_lens(written, tmp_path):
    path = written(public())
    (tmp_path / "config.yaml").write_text("n: 7")
    assert JacobianLens.open(tmp_path).file == path
    written(public(), "second.pth")
    assert "found lens.pt, second.pth" in refused(tmp_path)
    for file in tmp_path.glob("*.pt*"):
        file.unlink()
    assert "found none" in refused(tmp_path)


# --- What is refused, by name. ---

_WITH_NAN = {**matrices(), 1: matrices()[1] * torch.nan}
_WITH_INF = {**matrices(), 2: torch.full((WIDTH, WIDTH), torch.inf).half()}
_WITH_ZERO = {**matrices(), 1: torch.zeros(WIDTH, WIDTH).half()}
_WIDE = {**matrices(), 1: torch.ones(WIDTH, WIDTH + 1).half()}
_MIXED = {**matrices(), 1: torch.ones(8, 8).half()}


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        ({"avg_jacobians": {}, "corpus_jh": {}, "layer_indices": [0], "model_id": "m", "n_proj": 32}, "low-rank estimate"),
        ({**public(), "n_proj": 32}, "n_proj belong to a randomised low-rank"),
        ({"state_dict": {"w": torch.ones(2)}}, "its keys are: state_dict"),
        (public(n_prompts=None), "its keys are: J, d_model, source_layers"),
        ({**public(), "rotation": 1}, "its keys are: J, d_model, n_prompts, rotation"),
        ({}, "its keys are: none"),
        ([1, 2], "holds a list"),
        (torch.ones(3), "holds a Tensor"),
        (public(d_source=WIDTH // 2), "rectangular"),
        (public(d_source="wide"), "d_source 'wide'"),
        (public(d_model=WIDTH + 1), f"d_model {WIDTH + 1}, its matrices are {WIDTH} wide"),
        (public(d_model="16"), "d_model '16'"),
        (public(n_prompts=0), "n_prompts 0"),
        (public(n_prompts=2.5), "n_prompts 2.5"),
        (public(J=_WITH_NAN), "layer 1 holds values that are not finite"),
        (public(J=_WITH_INF), "layer 2 holds values that are not finite"),
        (public(J=_WITH_ZERO), "layer 1 is zero everywhere"),
        (public(J=_WIDE), "layer 1 has shape (16, 17)"),
        (public(J=_MIXED), "layer 1 is 8 wide"),
        (public(J={0: torch.tensor(1.0)}, source_layers=[0]), "layer 0 has shape ()"),
        (public(J={0: torch.ones(WIDTH, WIDTH, dtype=torch.long)}, source_layers=[0]), "torch.int64"),
        (public(J={0: torch.eye(WIDTH).to_sparse()}, source_layers=[0]), "without plain floating-point values"),
        (public(J={}), "no matrices"),
        (public(J=torch.ones(3, WIDTH, WIDTH)), "no matrices"),
        (public(J={"0": torch.ones(WIDTH, WIDTH)}), "layer key '0'"),
        (public(J={-1: torch.ones(WIDTH, WIDTH)}), "layer key -1"),
        (public(J={True: torch.ones(WIDTH, WIDTH)}), "layer key True"),
        (public(J={0: [[1.0]]}), "layer 0 is no tensor"),
        (public(source_layers=[0, 1]), "source layers 0-1 (2 of them), has matrices for 0-2"),
        (public(source_layers=[0, 1, 5]), "source layers 0-5"),
        (public(source_layers=[]), "source layers none"),
        (public(source_layers="012"), "not a list of layer numbers"),
        (public(metadata=["x"]), "metadata is not a dictionary"),
        (public(metadata={"model_name": 8}), "says model_name 8, which is no str"),
        (public(metadata={"estimator": "tangent_lens"}), "says estimator 'tangent_lens'"),
        (public(metadata={"hook_convention": "blocks.{layer}.hook_in"}), "says hook_convention"),
        (public(metadata={"target_layer": 2}), "layer 2 is not below the target layer 2"),
        (public(metadata={"target_layer": "last"}), "target_layer 'last'"),
        (public(metadata={"klb_probe": {"format": "klb_probe.jacobian_lens/99"}}), "update klb_probe"),
        (public(metadata={"klb_probe": {"format": "klb_probe.jacobian_lens/1", "k": []}}), "metadata cannot be read"),
        (public(provenance={"capture_point": "attn_out"}), "says capture_point 'attn_out'"),
        (public(provenance={"capture_point": "block_output", "stream_reduce": "mean"}), "says stream_reduce 'mean'"),
        (checkpoint(n_done=0), "n_done 0"),
        (checkpoint(jacobian_sum={}), "no matrices"),
        (checkpoint(source_layers=[0]), "source layers 0-0"),
        (checkpoint(halves={}), "its keys are: halves, jacobian_sum"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_such_lens_is_refused_by_name(written, payload, why):
    assert why in refused(written(payload))


def test_metadata_of_other_matrices_is_refused(model):
    with pytest.raises(KlbError, match="matrices of layers"):
        JacobianLens(matrices([0, 1]), n_prompts=1, metadata=metadata_of(model))
    with pytest.raises(KlbError, match="the metadata says 3"):
        JacobianLens(matrices(), n_prompts=1, metadata=metadata_of(model), target_layer=9)
    with pytest.raises(KlbError, match="width 8, but the metadata says 16"):
        JacobianLens(matrices(width=8), n_prompts=1, metadata=metadata_of(model))
    with pytest.raises(KlbError, match="0 prompts"):
        JacobianLens(matrices(), n_prompts=0)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


def raw_pickle(value, path):
    path.write_bytes(pickle.dumps(value))


def legacy(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, raw_pickle, legacy], ids=["zip", "pickle", "old torch"])
def test_code_in_a_file_is_never_run(save, tmp_path):
    path, trace = tmp_path / "lens.pt", tmp_path / "was run"
    save({**public(), "n_prompts": Trap(trace)}, path)
    assert "nothing in it was run" in refused(path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if save is not raw_pickle else pickle.loads(path.read_bytes())
    assert trace.exists(), "the trap does not work: this test could not fail"


@pytest.mark.parametrize("keep", [0, 4, 1000, 0.5, -1])
def test_a_truncated_file_is_refused(written, keep):
    path = written(public())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    assert "not a whole torch.save archive" in refused(path)


@pytest.mark.parametrize("content", [b"not a lens", bytes(4096), b"\xff" * 4096], ids=["text", "zeros", "ones"])
def test_garbage_is_refused(tmp_path, content):
    (tmp_path / "lens.pt").write_bytes(content)
    assert "not a whole torch.save archive" in refused(tmp_path / "lens.pt")


def test_every_damaged_stretch_of_a_file_is_refused(written):
    """A flipped bit in a matrix is no error to torch.load."""
    path = written(public())
    whole = path.read_bytes()
    inside = [info.header_offset + 200 for info in zipfile.ZipFile(path).infolist() if info.file_size > 400]
    assert len(inside) >= len(SOURCES)
    for place in inside:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        refused(path)


def test_other_archives_are_refused(tmp_path):
    path = tmp_path / "lens.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("lens/readme.txt", "no pickle here")
    assert "cannot be read" in refused(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lens/data.pkl", bytes(10**6))
    assert "compressed" in refused(path)
    assert "no such lens file" in refused(tmp_path / "nowhere.pt")


# --- Whose it is. ---


def test_a_lens_is_refused_by_other_weights_of_the_same_shape(model, tmp_path):
    JacobianLens(matrices(), n_prompts=7, metadata=metadata_of(model)).save(tmp_path / "lens.pt")
    lens, other = JacobianLens.open(tmp_path / "lens.pt"), tiny_model("llama", seed=1)
    lens.check(model)
    for use in (lens.check, lambda m: lens.to_margin_lens(m, CONTRAST), lambda m: lens.logits(m, torch.ones(WIDTH), 0)):
        with pytest.raises(KlbError, match=r"lens.pt: fitted on tiny-llama, whose weights are not those of"):
            use(other)
    halved = from_model(copy.deepcopy(model.model).to(torch.bfloat16), model.tokenizer, name="halved")
    assert lens.mismatch(halved) is None


@pytest.mark.parametrize(
    ("lens", "why"),
    [
        (
            JacobianLens(matrices(width=8), n_prompts=1),
            "width 8, fitted on a model it does not name; tiny-llama has width 16",
        ),
        (JacobianLens(matrices(range(LAYERS)), n_prompts=1), "has a matrix for layer 3, the last block of tiny-llama"),
        (JacobianLens(matrices(range(9)), n_prompts=1), "reaches layer 8"),
        (JacobianLens(matrices(), n_prompts=1, target_layer=7), "reaches layer 7"),
        (JacobianLens(matrices(width=8), n_prompts=1, facts={"model_name": "owner/other"}), "fitted on owner/other"),
    ],
    ids=["width", "last block", "deeper", "target", "named"],
)
def test_a_lens_of_another_shape_or_place_is_refused(model, lens, why):
    assert why in lens.mismatch(model)
    with pytest.raises(KlbError, match="lens memory: "):
        lens.to_margin_lens(model, CONTRAST)


def test_metadata_of_a_deeper_model_is_refused(model):
    lens = JacobianLens(matrices(), n_prompts=1, metadata=metadata_of(model, n_layers=LAYERS + 1))
    assert f"with {LAYERS + 1} layers" in lens.mismatch(model)


def test_model_names_are_compared_where_both_are_known(model):
    hub = copy.copy(model)
    hub.identity = {"name": "llama", "hub": "meta-llama/Llama-3.1-8B-Instruct"}
    for said, fits in {
        "meta-llama/Llama-3.1-8B-Instruct": True,
        "Llama-3.1-8B-Instruct": True,
        "meta-llama/Llama-3.1-8B": False,  # the base model's lens
        None: True,
    }.items():
        lens = JacobianLens(matrices(), n_prompts=1, facts={"model_name": said} if said else {})
        assert (lens.mismatch(hub) is None) == fits
        assert lens.mismatch(model) is None  # a local model has no hub id to compare with


# --- Memory. ---


def test_an_open_lens_stays_on_disk_in_half_precision(written, model):
    path = written(public())
    lens = JacobianLens.open(path)
    lens.to_margin_lens(model, CONTRAST)
    assert {matrix.dtype for matrix in lens._matrices.values()} == {torch.float16}
    if sys.platform == "linux":
        assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_one_layer_at_a_time_is_widened(written, model, monkeypatch):
    lens = JacobianLens.open(written(public(J=matrices(range(3)))))
    alive, most, matrix = weakref.WeakSet(), 0, JacobianLens.matrix

    def counted(self, *arguments, **options):
        nonlocal most
        made = matrix(self, *arguments, **options)
        alive.add(made)
        most = max(most, len(alive))
        return made

    monkeypatch.setattr(JacobianLens, "matrix", counted)
    lens.to_margin_lens(model, CONTRAST)
    for layer in SOURCES:
        lens.margin(model, CONTRAST, torch.ones(WIDTH), layer)
        lens.logits(model, torch.ones(WIDTH), layer)
    lens.save(lens.file.with_name("again.pt"))
    assert most == 1
    JacobianLens.merge([lens, lens])
    assert most <= 2


# --- Specs, hub, registry. ---


def test_specs_are_paths_or_hub_files(tmp_path):
    assert parse_lens_spec("some/lens.pt") == Path("some/lens.pt")
    assert parse_lens_spec("~/lens.pt") == Path.home() / "lens.pt"
    assert parse_lens_spec("hub:owner/repo::a/b.pt") == HubFile("owner/repo", "a/b.pt")
    assert parse_lens_spec("hub:owner/repo::a/b.pt@refs/pr/3") == HubFile("owner/repo", "a/b.pt", "refs/pr/3")
    assert str(Path("hub:owner/repo::a/b.pt@v1")) == str(parse_lens_spec("hub:owner/repo::a/b.pt@v1"))
    for wrong in ("hub:", "hub:owner/repo", "hub:repo::a.pt", "hub:owner/repo::", "hub:owner/repo::a.pt@", "hub:a/b/c::d"):
        with pytest.raises(KlbError, match="a hub file is written hub:OWNER/REPO::FILE"):
            parse_lens_spec(wrong)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the model hub cannot be reached"),
    ],
    ids=["offline", "unreachable"],
)
def test_no_hub_is_one_line_at_once(tmp_path, setting, why):
    """In a process of its own: the hub client reads its environment when it is imported."""
    code = (
        "from klb_probe.lens.published import parse_lens_spec\nfrom klb_probe.errors import KlbError\n"
        "try: parse_lens_spec('hub:owner/repo::lens.pt@main').fetch()\nexcept KlbError as error: print(error)"
    )
    environment = {**setting, "HF_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert run.stdout.strip() == f"owner/repo: {why} and it is not in the local cache; pass a lens file with --lens"
    assert "Retrying" not in run.stderr


def hub_with(monkeypatch, outcome):
    """A hub client that returns a file or raises."""

    def download(repo, file, revision=None):
        asked.append((repo, file, revision))
        if isinstance(outcome, Exception):
            raise outcome
        return str(outcome)

    asked = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(HubFile, "cached", lambda _: True)
    return asked


def test_a_hub_lens_is_fetched_and_its_origin_kept(written, monkeypatch, model):
    asked = hub_with(monkeypatch, written(public()))
    lens = JacobianLens.open("hub:owner/repo::a/lens.pt@v1")
    assert asked == [("owner/repo", "a/lens.pt", "v1")]
    assert lens.origin == "hub:owner/repo::a/lens.pt@v1"
    assert "hub:owner/repo::a/lens.pt@v1" in lens.to_margin_lens(model, CONTRAST).metadata.command


def test_a_hub_lens_that_is_not_there_is_one_line(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError, RepositoryNotFoundError

    response = SimpleNamespace(headers={}, request=None)
    hub_with(monkeypatch, RemoteEntryNotFoundError("404\nnot there", response=response))
    with pytest.raises(KlbError, match="^owner/repo has no file lens.pt at revision main$"):
        JacobianLens.open("hub:owner/repo::lens.pt")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub_with(monkeypatch, LocalEntryNotFoundError("lost the connection\nunder way"))
    with pytest.raises(KlbError, match=r"^owner/repo: the model hub cannot be reached and .*--lens$"):
        JacobianLens.open("hub:owner/repo::lens.pt")
    hub_with(monkeypatch, RepositoryNotFoundError("404\nnot there", response=response))
    with pytest.raises(KlbError, match=r"^no owner/repo \(or no such revision\) on the hub, or it is private$"):
        JacobianLens.open("hub:owner/repo::lens.pt")


def test_published_lenses_are_listed_by_the_model_they_were_fitted_on():
    listing = published_lenses()
    assert listing.revision == "a4114d7752d11eb546e6cf372213d7e75526d3a1"
    for name in ("meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-12b-it", "Qwen/Qwen3.5-27B"):
        assert name in listing.lenses
    for name, lens in listing.lenses.items():
        stem = lens.file.rsplit("/", 1)[-1].removesuffix("_jacobian_lens.pt")
        assert stem.lower() == name.rsplit("/", 1)[-1].lower()  # never a base lens under an instruct model's name


@pytest.fixture
def llama(model, tmp_path, monkeypatch):
    """The tiny model as if it had come from the hub, and an empty cache."""
    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path / "cache"))
    hub = copy.copy(model)
    hub.identity = {"name": "llama-3.1-8b", "hub": "meta-llama/Llama-3.1-8B-Instruct"}
    return hub


def test_the_published_lens_of_a_hub_model_is_taken_first(llama, model, written, monkeypatch, caplog):
    caplog.set_level("INFO", "klb_probe")
    path = written(public())
    asked = hub_with(monkeypatch, path)
    lens = load_lens(llama, CONTRAST)
    listing = published_lenses()
    assert set(asked) == {(listing.repo, listing.lenses[llama.identity["hub"]].file, listing.revision)}
    assert lens.file == path
    assert listing.revision in lens.metadata.command
    assert [record.message for record in caplog.records if record.message.startswith("lens for")] == [
        f"lens for tiny-llama: {path}"
    ]
    assert find_published(model) is None  # not from the hub: a name proves nothing
    here = llama.identity
    for mark in ({"adapter_sha256": "0" * 64}, {"quantised": "4bit"}):  # then it is another model
        llama.identity = {**here, **mark}
        assert find_published(llama) is None
    llama.identity = {**here, "quantised": "mxfp4"}  # as it was published
    assert find_published(llama) is not None


@pytest.mark.parametrize("problem", ["offline", "broken"])
def test_a_published_lens_that_cannot_be_had_is_passed_over(llama, written, monkeypatch, caplog, problem):
    caplog.set_level("INFO", "klb_probe")
    from klb_probe.lens.store import cached_lens_path, save_lens

    hub_with(monkeypatch, OSError("couldn't connect\nat all") if problem == "offline" else written(public(n_prompts=0)))
    lens = JacobianLens(matrices(), n_prompts=7).to_margin_lens(llama, CONTRAST)
    lens.metadata = lens.metadata.model_copy(update={"fingerprint": llama.fingerprint})
    save_lens(lens, cached_lens_path(llama, CONTRAST))
    found = load_lens(llama, CONTRAST)
    assert found.file == cached_lens_path(llama, CONTRAST)
    assert torch.equal(found.rows, lens.rows)  # that one, and none fitted for the purpose
    said = [record.message for record in caplog.records if "passed over" in record.message]
    assert len(said) == 1
    assert "\n" not in said[0]


def test_load_lens_takes_full_lenses_by_any_name(model, written, monkeypatch, tmp_path):
    path = written(public())
    expected = JacobianLens.open(path).to_margin_lens(model, CONTRAST)
    hub_with(monkeypatch, path)
    for name in (path, str(path), tmp_path, "hub:owner/repo::lens.pt@v1", Path("hub:owner/repo::lens.pt@v1")):
        lens = load_lens(model, CONTRAST, path=name)
        assert lens.file == path
        assert torch.equal(lens.rows, expected.rows)
        assert torch.equal(lens.sketch, expected.sketch)
    with pytest.raises(KlbError, match="no such lens file"):
        load_lens(model, CONTRAST, path=tmp_path / "nowhere.pt")
