"""What is too large for one pass, one device or its type is read all the same, with the same numbers or a clear line."""

from __future__ import annotations

import gc
import sys
import types
from pathlib import Path

import accelerate
import pytest
import torch
import transformers as hf
from command import klb
from tiny import LAYERS, WIDTH, default_tokenizer, save_tiny_llama, tiny_hf_model, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens.vjp import prompt_rows
from klb_probe.models import quantised
from klb_probe.models.batch_size import BatchSize, is_out_of_memory
from klb_probe.models.hook_map import find_hook_map
from klb_probe.models.huggingface import SELF_CHECK_TOLERANCE
from klb_probe.models.load import from_model as wrap
from klb_probe.models.load import load_model
from klb_probe.models.placement import is_spread, places
from klb_probe.models.prefix import prefill
from klb_probe.paths import data_dir

CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def ids_of(n: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 49_000, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


# Memory runs out


def read_all(model, prompts, **options):
    read = {}
    for indices, capture in prefill(model, prompts, range(LAYERS), [5, 6], **options):
        for row, index in enumerate(indices):
            assert index not in read, "a prompt was read twice"
            read[index] = capture.residuals[:, row, 0], capture.logits[row, 0]
    return [torch.stack(parts) for parts in zip(*(read[index] for index in range(len(prompts))), strict=True)]


def scarce(model, monkeypatch, most: int, error: Exception) -> list[int]:
    """Let passes of more than ``most`` rows fail; returns the sizes that are tried."""
    run, tried = model._run, []

    def step(function, ids, **inputs):
        tried.append(len(ids))
        if len(ids) > most:
            raise error
        return run(function, ids, **inputs)

    monkeypatch.setattr(model, "_run", step)
    return tried


ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize("error", ERRORS)
def test_a_batch_that_does_not_fit_is_halved_and_stays_so(error, monkeypatch, caplog):
    model = tiny_model("llama")
    shared = ids_of(40)
    prompts = [shared + ids_of(n, seed=n) for n in range(3, 12)] + [ids_of(n, seed=n) for n in range(20, 24)]
    expected = read_all(model, prompts, batch_size=8)
    tried = scarce(model, monkeypatch, 2, error)
    for found, whole in zip(read_all(model, prompts, batch_size=8), expected, strict=True):
        torch.testing.assert_close(found, whole, atol=2e-5, rtol=1e-4)
    assert [size for size in tried if size > 2] == [8, 4]
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["out of memory with --batch 8: going on with 4"]


def test_one_prompt_too_many_and_any_other_error_go_on_as_they_are(monkeypatch):
    model = tiny_model("llama")
    prompts = [ids_of(5), ids_of(6)]
    with monkeypatch.context() as patch:
        scarce(model, patch, 0, ERRORS[0])
        with pytest.raises(torch.OutOfMemoryError):
            read_all(model, prompts, batch_size=2)
    tried = scarce(model, monkeypatch, 1, RuntimeError("The size of tensor a must match the size of tensor b"))
    with pytest.raises(RuntimeError, match="must match"):
        read_all(model, prompts, batch_size=2)
    assert tried == [2]


def test_out_of_memory_is_known_by_type_or_words():
    assert all(map(is_out_of_memory, [*ERRORS, MemoryError()]))
    assert not is_out_of_memory(RuntimeError("pin_memory: no such device"))
    with pytest.raises(KlbError, match="a smaller one"):
        BatchSize(1, "take a smaller one").attempt(lambda: torch.empty(1 << 60), tried=1)


# Long prompts


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt2", "qwen3_5"])
def test_a_long_prompt_read_in_pieces_gives_the_same_numbers(family):
    model = tiny_model(family)
    ids = torch.tensor([ids_of(43, seed=row) for row in range(2)])
    # Rows that differ in the pieces their positions are in; a piece without any; the ends of pieces.
    positions = torch.tensor([[0, 4, 5, 37, 42], [2, 15, 31, 38, 40]])
    from_end = torch.where(positions > 30, positions - 43, positions)
    whole = model.capture(ids, range(LAYERS), positions, [5, 6])
    prompts = [ids_of(n, seed=n) for n in (30, 43, 8)]
    batch, logits = model.residuals(prompts, [1, 3], [0, 6, -1]), model.next_logits(ids, model.new_cache())
    for chunk in (5, 16):
        model.chunk, tokens = chunk, []
        with model._hooks([0], lambda _layer, output, tokens=tokens: tokens.append(output.shape[1])):
            pieces = model.capture(ids, range(LAYERS), from_end, [5, 6])
        assert max(tokens) <= chunk
        assert sum(tokens) == 43
        torch.testing.assert_close(pieces.residuals, whole.residuals, **CLOSE)
        torch.testing.assert_close(pieces.logits, whole.logits, **CLOSE)
        torch.testing.assert_close(model.residuals(prompts, [1, 3], [0, 6, -1]), batch, **CLOSE)
        torch.testing.assert_close(model.next_logits(ids, model.new_cache()), logits, **CLOSE)


def test_pieces_go_on_from_a_shared_prefix_and_into_what_is_written():
    model = tiny_model("llama")
    shared = ids_of(40)
    prompts = [shared + ids_of(n, seed=n) for n in (3, 30, 25)]
    whole = read_all(model, prompts)
    written = model.generate([prompts[1]], 6, temperature=0, seed=0)
    logits = model.capture(torch.tensor([shared]), [], torch.tensor([[7, 39]]), [9]).logits
    model.chunk = 7
    for found, expected in zip(read_all(model, prompts), whole, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert model.generate([prompts[1]], 6, temperature=0, seed=0) == written
    capture = model.capture(torch.tensor([shared]), [], torch.tensor([[7, 39]]), [9])
    torch.testing.assert_close(capture.logits, logits, **CLOSE)
    assert capture.residuals.numel() == 0


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_model_whose_frequencies_depend_on_the_length_is_read_whole(kind):
    """transformers takes them from the last position of each pass: keys of the first piece would have others."""
    base = tiny_hf_model("llama")
    half = base.config.head_dim // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half} if kind == "longrope" else {"factor": 4.0}
    said = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    changes = {"rope_parameters": said, "max_position_embeddings": 64 if kind == "longrope" else 16}
    loaded = type(base)(type(base.config).from_dict({**base.config.to_dict(), **changes})).eval()
    loaded.load_state_dict(base.state_dict())
    model = wrap(loaded, default_tokenizer())
    ids, positions = torch.tensor([ids_of(43)]), torch.tensor([[0, 20, 42]])
    whole = model.capture(ids, range(LAYERS), positions, [5])
    logits = model.next_logits(ids, model.new_cache())
    model.chunk = 8
    torch.testing.assert_close(model.capture(ids, range(LAYERS), positions, [5]).residuals, whole.residuals, **CLOSE)
    torch.testing.assert_close(model.next_logits(ids, model.new_cache()), logits, **CLOSE)
    model._frequencies_change = False
    assert (model.capture(ids, range(LAYERS), positions, [5]).residuals - whole.residuals).abs().max() > 1e-2


def test_the_length_of_a_piece_is_chosen_at_loading():
    assert wrap(tiny_hf_model("llama"), default_tokenizer(), chunk=64).chunk == 64


# Weights in several places


def spread(family: str, how: str, folder):
    """A tiny model, part of which accelerate keeps on disk."""
    model = tiny_hf_model(family)
    if how == "all on disk":
        return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    layout = find_hook_map(model)
    base, head = layout.blocks[0].rpartition(".")[0], "lm_head"
    device_map = {name: "disk" for name, _ in model.get_submodule(base).named_children() if not name.startswith("layers")}
    device_map = {f"{base}.{name}": "disk" for name in device_map} | {head: "disk"}
    device_map |= {f"{base}.layers.{layer}": "cpu" if layer % 2 else "disk" for layer in range(LAYERS)}
    device_map[f"{base}.embed_tokens"] = "cpu"
    return accelerate.dispatch_model(model, device_map, offload_dir=str(folder))


@pytest.mark.parametrize(("family", "how"), [("llama", "a map"), ("gemma3", "a map"), ("gpt2", "all on disk")])
def test_a_model_partly_on_disk_reads_as_one_in_memory(family, how, tmp_path):
    whole, model = tiny_model(family), wrap(spread(family, how, tmp_path), default_tokenizer(), name="spread")
    assert is_spread(model.model)
    assert not is_spread(whole.model)
    assert "offloaded" in places(model.model)
    assert "offloaded" in model.where
    assert str(model.device) == "cpu"
    assert model.fingerprint == whole.fingerprint
    prompts = [ids_of(n, seed=n) for n in (12, 9)]
    expected = whole.residuals(prompts, range(LAYERS), [-1, 3])
    torch.testing.assert_close(model.residuals(prompts, range(LAYERS), [-1, 3]), expected, **CLOSE)
    for found, plain in zip(read_all(model, prompts), read_all(whole, prompts), strict=True):
        torch.testing.assert_close(found, plain, **CLOSE)
    readouts = [one.token_readout([5, 6]).logits(expected) for one in (model, whole)]
    torch.testing.assert_close(*readouts, **CLOSE)
    torch.testing.assert_close(*(one.unembed(one.final_norm(expected[1])) for one in (model, whole)), **CLOSE)
    written = [one.generate([prompts[0]], 5, temperature=0, seed=0) for one in (model, whole)]
    assert written[0] == written[1]
    rows = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))
    fit = {"rows": rows, "layers": [0, 1, 2], "target_layer": 3, "skip_first": 4, "batch": 2}
    torch.testing.assert_close(*(prompt_rows(one, prompts[0], **fit) for one in (model, whole)), **CLOSE)
    changed = []
    for one in (model, whole):
        with one.intervening(1, lambda residual: residual + 1):
            changed.append(one.residuals(prompts, [1, 3], [-1]))
    torch.testing.assert_close(*changed, **CLOSE)
    assert (changed[1] - expected[[1, 3]][:, :, :1]).abs().max() > 0.1


def test_nnsight_reads_a_model_partly_on_disk_and_transformer_lens_refuses_it(tmp_path):
    prompts = [ids_of(12)]
    expected = tiny_model("llama").residuals(prompts, range(LAYERS), [-1, 3])
    model = spread("llama", "a map", tmp_path)
    traced = wrap(model, default_tokenizer(), name="spread", backend="nnsight")
    torch.testing.assert_close(traced.residuals(prompts, range(LAYERS), [-1, 3]), expected, **CLOSE)
    with pytest.raises(KlbError, match="spread over devices; use --backend huggingface"):
        wrap(model, default_tokenizer(), backend="transformer_lens")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_auto_map_loads_with_accelerates_map(family, tmp_path, monkeypatch):
    """What is put together at loading, such as experts, is written anew to disk, for as long as the model lives."""
    folder, own = tmp_path / "tiny", tiny_hf_model(family)
    own.save_pretrained(folder)
    default_tokenizer().save_pretrained(folder)
    whole = load_model(str(folder), device="cpu")
    asked, load = {}, type(own).from_pretrained.__func__

    def from_pretrained(cls, *args, **options):
        asked.update(options)
        # What accelerate would choose where the memory holds two layers.
        names = {"embed_tokens": "cpu", "rotary_emb": "cpu", "layers.0": "cpu", "layers.1": "cpu"}
        chosen = {f"model.{name}": device for name, device in names.items()}
        chosen |= dict.fromkeys(("model.layers.2", "model.layers.3", "model.norm", "lm_head"), "disk")
        return load(cls, *args, **options | {"device_map": chosen})

    monkeypatch.setattr(type(own), "from_pretrained", classmethod(from_pretrained))
    model = load_model(str(folder), device="auto-map", dtype="float32")
    assert asked["device_map"] == "auto"
    written = Path(asked["offload_folder"])
    assert any(written.iterdir()) == (family == "mixtral")
    assert "offloaded" in model.where
    assert model.fingerprint == whole.fingerprint
    prompts = [ids_of(12)]
    expected = whole.residuals(prompts, range(LAYERS), [-1])
    torch.testing.assert_close(model.residuals(prompts, range(LAYERS), [-1]), expected, **CLOSE)
    del model
    gc.collect()
    assert not written.exists()


def test_weights_that_do_not_go_together_are_named():
    model = tiny_hf_model("llama")
    model.model.layers[2].to(torch.bfloat16)
    with pytest.raises(KlbError, match="bfloat16 on cpu, float32 on cpu: bring them to one type and device"):
        wrap(model, default_tokenizer())
    model = tiny_hf_model("llama")
    model.model.layers[2].to("meta")
    with pytest.raises(KlbError, match="float32 on cpu, float32 on meta: bring them"):
        wrap(model, default_tokenizer())


# Types


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_half_precision_reads_nearly_the_same(family, dtype, tmp_path):
    """Within the self-check's tolerance of the largest own logit, 5 % in bfloat16 and 2 % in float16."""
    exact = tiny_model(family)
    exact.model.save_pretrained(tmp_path)
    default_tokenizer().save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype=dtype)
    assert model.dtype == getattr(torch, dtype)
    assert model.self_check_error <= (tolerance := SELF_CHECK_TOLERANCE[model.dtype])
    prompts = [ids_of(n, seed=n) for n in (12, 9, 20)]
    margins = []
    for one in (model, exact):
        readout = one.token_readout([5, 6])
        logits = readout.logits(one.residuals(prompts, range(LAYERS), [-1])[:, :, 0])
        margins.append(logits[..., 0] - logits[..., 1])
    assert (margins[0] - margins[1]).abs().max() <= tolerance * logits.abs().max()


# Quantised weights


class Reached(Exception):
    """Loading went as far as the library that is not installed here."""


@pytest.fixture
def bitsandbytes(monkeypatch):
    """The library's boundary alone: it says which devices it knows; nothing can be quantised."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.SimpleNamespace(supported_torch_devices={"cpu"}))
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: True)
    monkeypatch.setattr(hf.BitsAndBytesConfig, "post_init", lambda self: None)


@pytest.mark.parametrize(("device", "placed"), [("cpu", {"": torch.device("cpu")}), ("auto-map", "auto")])
def test_quantised_weights_are_asked_of_bitsandbytes(device, placed, bitsandbytes, tmp_path, monkeypatch):
    folder, asked = save_tiny_llama(tmp_path), []

    def from_pretrained(cls, *args, **options):
        asked.append(options)
        raise Reached

    monkeypatch.setattr(hf.LlamaForCausalLM, "from_pretrained", classmethod(from_pretrained))
    for quantise in ("4bit", "8bit"):
        with pytest.raises(Reached):
            load_model(str(folder), device=device, dtype="bfloat16", quantise=quantise)
    four, eight = (options["quantization_config"] for options in asked)
    assert (four.load_in_4bit, four.load_in_8bit, eight.load_in_4bit, eight.load_in_8bit) == (True, False, False, True)
    assert (four.bnb_4bit_quant_type, four.bnb_4bit_compute_dtype) == ("nf4", torch.bfloat16)
    assert {options["dtype"] for options in asked} == {torch.bfloat16}
    assert [options["device_map"] for options in asked] == [placed] * 2
    folders = [options["offload_folder"] for options in asked if "offload_folder" in options]
    assert len(folders) == (2 if device == "auto-map" else 0)
    assert not any(Path(one).exists() for one in folders)


@pytest.mark.parametrize(
    ("scheme", "mark"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "4bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "8bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq 4bit"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4", "dequantize": True}, None),
    ],
)
def test_a_quantised_model_says_so_wherever_it_is_named(scheme, mark, bitsandbytes):
    model = tiny_hf_model("llama")
    model.config.quantization_config = scheme
    loaded = wrap(model, default_tokenizer(), name="tiny")
    assert loaded.identity == {"name": "tiny"} | ({"quantised": mark} if mark else {})
    assert loaded.where == (f"{mark}, " if mark else "") + "float32 on cpu"
    if mark in ("4bit", "8bit"):
        model.config.quantization_config = hf.BitsAndBytesConfig(load_in_4bit=mark == "4bit", load_in_8bit=mark == "8bit")
        assert quantised.quantised_as(model.config) == mark


def test_what_cannot_be_quantised_is_refused_with_a_remedy(bitsandbytes, tmp_path, monkeypatch):
    folder = save_tiny_llama(tmp_path)
    with pytest.raises(KlbError, match="unknown --quantise '2bit'; one of 4bit, 8bit"):
        load_model(str(folder), device="cpu", quantise="2bit")
    for options in ({"quantise": "4bit"}, {"remote": True}):
        with pytest.raises(KlbError, match="keeps its device, dtype, weights"):
            load_model(tiny_hf_model("llama"), **options)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.SimpleNamespace(supported_torch_devices={"cuda"}))
    with pytest.raises(KlbError, match="bitsandbytes does not run on cpu \\(devices: cuda\\)"):
        load_model(str(folder), device="cpu", quantise="4bit")
    monkeypatch.setattr(quantised, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(KlbError, match='pip install "klb-probe\\[quantise\\]"'):
        load_model(str(folder), device="cpu", quantise="4bit")
    config = hf.AutoConfig.from_pretrained(folder)
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(folder)
    with pytest.raises(KlbError, match="comes quantised \\(awq 4bit\\); leave out --quantise"):
        load_model(str(folder), device="cpu", quantise="4bit")


@pytest.mark.parametrize(
    "command",
    [
        ("jlens", "--domains", "airline", "--quick"),
        ("fit",),
        ("probe", "--domains", "airline"),
        ("run", "--domains", "airline", "--quick"),
        ("lens", "check", data_dir("lenses") / "smollm2-135m.margin.safetensors"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_commands_pass_on_how_a_model_is_loaded(command, monkeypatch, tmp_path, capsys):
    asked = {}

    def loading(name, **options):
        asked.update(options)
        raise KlbError("as far as this goes")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("klb_probe.models.load.load_model", loading)
    assert klb(*command, "--quantise", "4bit", "--device", "auto-map", "--backend", "nnsight") == 2
    assert "as far as this goes" in capsys.readouterr().err
    assert (asked["quantise"], asked["device"], asked["backend"]) == ("4bit", "auto-map", "nnsight")
