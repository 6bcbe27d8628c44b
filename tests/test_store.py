"""A lens file is exact, whole, never executed, and refused by name for any model or contrast but its own."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers as hf
from tiny import LAYERS, VOCAB, WIDTH, default_tokenizer, tiny_hf_model, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import Corpus
from klb_probe.lens.fitting import FitOptions, fit_margin_lens
from klb_probe.lens.library import load_lens
from klb_probe.lens.store import FORMAT, SUFFIX, cached_lens_path, find_lens, open_lens, read_metadata, save_lens
from klb_probe.models.load import from_model

LOWER = (("yes", "no"),)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def corpus():
    ids = torch.randint(3, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    return Corpus(tuple(map(tuple, ids.tolist())), "random ids", "never", 12)


@pytest.fixture(scope="module")
def contrast(model):
    return TokenContrast.of(model.chat)


def fitted(model, corpus, contrast, **options):
    return fit_margin_lens(model, corpus, contrast, FitOptions(k=5, skip_first=2, **options), command="made in a test")


@pytest.fixture(scope="module")
def lens(model, corpus, contrast):
    return fitted(model, corpus, contrast)


@pytest.fixture
def path(lens, tmp_path):
    save_lens(lens, tmp_path / f"tiny{SUFFIX}")
    return tmp_path / f"tiny{SUFFIX}"


def refused(path, model, contrast):
    with pytest.raises(KlbError) as caught:
        open_lens(path, model, contrast)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_saved_lens_comes_back_exactly(lens, path, model, contrast):
    opened = open_lens(path, model, contrast)
    assert torch.equal(opened.rows, lens.rows)
    assert torch.equal(opened.sketch, lens.sketch)
    assert opened.metadata == lens.metadata == read_metadata(path)
    assert opened.file == path
    residual = torch.randn(LAYERS, 7, WIDTH)
    for layer in range(LAYERS):
        for one, other in zip(
            vars(opened.decode(residual, layer)).values(), vars(lens.decode(residual, layer)).values(), strict=True
        ):
            assert torch.equal(one, other)


def test_metadata_says_what_the_lens_was_made_of(path, model, corpus, contrast):
    metadata = read_metadata(path)
    assert metadata.model == model.identity
    assert metadata.fingerprint == model.fingerprint
    assert (metadata.n_layers, metadata.d_model, metadata.dtype) == (LAYERS, WIDTH, "float32")
    assert metadata.site == "block_output"
    assert metadata.source_layers == tuple(range(LAYERS - 1))
    assert metadata.target_layer == LAYERS - 1
    assert metadata.contrast == contrast.pairs
    assert (metadata.k, metadata.skip_first, metadata.bos) == (5, 2, "never")
    assert metadata.corpus.sha256 == corpus.sha256
    assert (metadata.corpus.n_prompts, metadata.corpus.n_skipped) == (3, 0)
    assert metadata.versions["torch"] == torch.__version__


def test_the_same_weights_under_another_name_and_dtype_are_the_same_model(path, model, contrast):
    halved = copy.deepcopy(model.model).to(torch.bfloat16)
    again = from_model(halved, model.tokenizer, name="another name")
    assert open_lens(path, again, contrast).metadata.model["name"] == "tiny-llama"


# --- Whose lens it is. ---


def odd_model(**sizes):
    """A Llama of another size."""
    config = {
        "hidden_size": WIDTH,
        "intermediate_size": 8,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
    }
    torch.manual_seed(0)
    network = hf.LlamaForCausalLM(hf.LlamaConfig(**{**config, **sizes}))
    return from_model(network, default_tokenizer(), name="odd one")


def test_other_weights_are_refused(path, contrast):
    message = refused(path, tiny_model("llama", seed=1), contrast)
    assert "tiny-llama" in message
    assert "weights" in message
    assert "klb-probe fit" in message


def test_one_changed_tensor_is_other_weights(path, contrast):
    changed = tiny_hf_model("llama")
    with torch.no_grad():
        changed.model.layers[2].mlp.down_proj.weight.mul_(1.1)
    assert "weights" in refused(path, from_model(changed, tiny_model("llama").tokenizer), contrast)


def test_another_width_is_refused(path, contrast):
    message = refused(path, odd_model(hidden_size=2 * WIDTH), contrast)
    assert f"width {WIDTH}" in message
    assert f"odd one has width {2 * WIDTH}" in message
    assert "tiny-llama" in message


def test_another_depth_is_refused(path, contrast):
    message = refused(path, odd_model(num_hidden_layers=LAYERS + 1), contrast)
    assert f"{LAYERS} layers" in message
    assert f"odd one has {LAYERS + 1}" in message


def test_another_contrast_is_refused(path, model):
    message = refused(path, model, TokenContrast.of(model.chat, LOWER))
    assert "'Yes'" in message
    assert "'yes'" in message
    assert "--contrast" in message


# --- What is no lens. ---


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))], ids=["torch", "pickle"]
)
def test_a_pickled_lens_is_refused_and_never_run(save, tmp_path, model, contrast):
    path, trace = tmp_path / f"trap{SUFFIX}", tmp_path / "was run"
    save({"J": {0: Trap(trace)}}, path)
    assert "not a readable safetensors file" in refused(path, model, contrast)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Trap(trace)))
    assert trace.exists(), "the trap does not work: this test could not fail"


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(path, keep, model, contrast):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep) if isinstance(keep, float) else keep])
    assert "not a readable safetensors file" in refused(path, model, contrast)


@pytest.mark.parametrize("content", [b"not a lens at all", bytes(4096), b"\xff" * 4096], ids=["text", "zeros", "ones"])
def test_garbage_is_refused(tmp_path, content, model, contrast):
    path = tmp_path / f"garbage{SUFFIX}"
    path.write_bytes(content)
    assert "not a readable safetensors file" in refused(path, model, contrast)


def test_a_missing_file_and_a_folder_are_refused(tmp_path, model, contrast):
    assert "no such lens file" in refused(tmp_path / "nowhere", model, contrast)
    assert "not a readable safetensors file" in refused(tmp_path, model, contrast)


@pytest.mark.parametrize("header", [None, {"format": "pt"}, {"format": "klb_probe.margin_lens/99"}], ids=str)
def test_safetensors_of_another_kind_are_refused(tmp_path, header, model, contrast):
    path = tmp_path / f"other{SUFFIX}"
    safetensors.torch.save_file({"rows": torch.ones(2)}, path, metadata=header)
    message = refused(path, model, contrast)
    assert "not a margin lens" in message
    assert FORMAT in message


@pytest.mark.parametrize(
    "metadata",
    [None, "not json", "{}", '{"d_model": "wide"}', "[1]"],
    ids=["absent", "not json", "empty", "wrong type", "list"],
)
def test_a_header_without_readable_metadata_is_refused(tmp_path, metadata, model, contrast):
    path = tmp_path / f"header{SUFFIX}"
    header = {"format": FORMAT} if metadata is None else {"format": FORMAT, "metadata": metadata}
    safetensors.torch.save_file({"rows": torch.ones(2)}, path, metadata=header)
    assert "metadata" in refused(path, model, contrast)


def rewritten(path, change):
    """The lens file again, with its tensors changed and its header kept."""
    with safetensors.safe_open(path, "pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in ("rows", "sketch")}
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata=header)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["rows", "sketch"])
def test_values_that_are_not_finite_are_refused(path, name, value, model, contrast):
    rewritten(path, lambda tensors: tensors[name].view(-1)[3:4].fill_(value))
    assert "not finite" in refused(path, model, contrast)


@pytest.mark.parametrize("name", ["rows", "sketch"])
def test_tensors_that_do_not_fit_the_metadata_are_refused(path, name, model, contrast):
    rewritten(path, lambda tensors: tensors.update({name: tensors[name][:, :1].clone()}))
    assert "do not fit" in refused(path, model, contrast)


@pytest.mark.parametrize("name", ["rows", "sketch"])
def test_a_file_without_one_of_the_tensors_is_refused(path, name, model, contrast):
    rewritten(path, lambda tensors: tensors.pop(name))
    refused(path, model, contrast)


# --- Finding. ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lenses"


def test_a_cached_lens_is_found_by_model_and_contrast_and_never_by_name(cache, lens, model, corpus, contrast):
    lower, other = TokenContrast.of(model.chat, LOWER), tiny_model("llama", seed=1)
    assert find_lens(model, contrast) is None
    save_lens(fitted(other, corpus, contrast), cache / f"a{SUFFIX}")
    assert find_lens(model, contrast) is None
    save_lens(lens, cache / f"b{SUFFIX}")
    save_lens(fitted(model, corpus, lower), cache / f"c{SUFFIX}")
    assert find_lens(model, contrast) == cache / f"b{SUFFIX}"
    assert find_lens(model, lower) == cache / f"c{SUFFIX}"
    assert find_lens(other, contrast) == cache / f"a{SUFFIX}"
    assert find_lens(other, lower) is None
    found = load_lens(model, contrast)
    assert found.file == cache / f"b{SUFFIX}"
    assert torch.equal(found.rows, lens.rows)


def test_cached_paths_tell_models_and_contrasts_apart(cache, model, contrast):
    models, contrasts = [model, tiny_model("llama", seed=1)], [contrast, TokenContrast.of(model.chat, LOWER)]
    paths = {cached_lens_path(one, words) for one in models for words in contrasts}
    assert len(paths) == 4
    assert all(path.parent == cache and path.name.endswith(SUFFIX) for path in paths)


def test_an_explicit_path_is_used_and_no_other(cache, lens, path, model, contrast):
    save_lens(lens, cache / f"b{SUFFIX}")
    assert load_lens(model, contrast, path=path).file == path
    with pytest.raises(KlbError, match="no such lens file"):
        load_lens(model, contrast, path=path.with_name("nowhere"))


# --- Writing. ---


def half_written(tensors, path, metadata=None):
    Path(path).write_bytes(b"half a lens")
    raise OSError("disk full")


def test_a_failed_save_leaves_nothing(lens, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors.torch, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        save_lens(lens, tmp_path / "lenses" / f"new{SUFFIX}")
    assert list((tmp_path / "lenses").iterdir()) == []


def test_a_failed_save_keeps_the_lens_that_was_there(lens, path, model, contrast, monkeypatch):
    before = path.read_bytes()
    monkeypatch.setattr(safetensors.torch, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        save_lens(lens, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    open_lens(path, model, contrast)


def test_a_lens_fitted_for_two_contrasts_serves_each(tmp_path):
    """One fit, one file; each contrast gets its own rows, as if it had been fitted alone."""
    model = tiny_model("llama")
    first, second = (("a", 11), ("b", 22)), (("c", 33), ("d", 44))
    corpus = Corpus((tuple(range(100, 124)),), "test", "never", 24)
    options = FitOptions(skip_first=4)
    save_lens(fit_margin_lens(model, corpus, TokenContrast((first, second)), options), tmp_path / "both.safetensors")
    for pair in (first, second):
        contrast = TokenContrast((pair,))
        opened = open_lens(tmp_path / "both.safetensors", model, contrast)
        alone = fit_margin_lens(model, corpus, contrast, options)
        torch.testing.assert_close(opened.rows, alone.rows, atol=1e-6, rtol=1e-5)
    with pytest.raises(KlbError, match="contrast"):
        open_lens(tmp_path / "both.safetensors", model, TokenContrast(((("a", 11), ("d", 44)),)))
