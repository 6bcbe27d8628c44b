"""Three libraries over the same weights: the same numbers, and nothing left behind."""

from __future__ import annotations

import copy
import doctest
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from command import klb
from tiny import LAYERS, WIDTH, default_tokenizer, save_tiny_llama, tiny_hf_model

from klb_probe.errors import KlbError
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.margin import LogitLens
from klb_probe.models.backends import BACKENDS
from klb_probe.models.hook_map import find_hook_map
from klb_probe.models.load import from_model, load_model
from klb_probe.models.prefix import prefill
from klb_probe.signals.readout import Readouts, read_prompts

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "gpt_neox"]
OTHERS = [name for name in BACKENDS if name != "huggingface"]
TOKENS = [5, 17, 40_000]
CLOSE = {"atol": 1e-4, "rtol": 0}

both = pytest.mark.parametrize("backend", OTHERS)
families = pytest.mark.parametrize("family", FAMILIES)
# One of each kind of block; the others share their code with these.
kinds = pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "gpt_neox"])


@cache
def opened(family: str, backend: str):
    return from_model(tiny_hf_model(family), default_tokenizer(), name=f"tiny-{family}", backend=backend)


def pair(family: str, backend: str):
    return opened(family, "huggingface"), opened(family, backend)


def ids_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 49_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def doubled(output: torch.Tensor) -> torch.Tensor:
    return 2 * output


@families
@both
@torch.no_grad()
def test_residuals_and_margins_are_the_same(family, backend):
    plain, other = pair(family, backend)
    assert other.backend == backend
    assert (other.fingerprint, other.settings) == (plain.fingerprint, plain.settings)
    assert (other.n_layers, other.d_model, other.vocab_size) == (LAYERS, WIDTH, plain.vocab_size)
    prompts = [ids_of(n, seed=n) for n in (14, 23, 19)]  # longer than a sliding window
    for padding in ("left", "right"):
        ours, theirs = (model.residuals(prompts, range(LAYERS), [-1, 3, 0], padding) for model in (plain, other))
        assert ours.shape == (LAYERS, 3, 3, WIDTH)
        torch.testing.assert_close(theirs, ours, **CLOSE)
    ids, positions = torch.tensor([ids_of(20), ids_of(20, seed=1)]), torch.tensor([[2, 19], [7, 7]])
    ours, theirs = (model.capture(ids, [LAYERS - 1, 1], positions, TOKENS) for model in (plain, other))
    assert ours.logits.abs().max() > 0.01
    torch.testing.assert_close(theirs.residuals, ours.residuals, **CLOSE)
    torch.testing.assert_close(theirs.logits, ours.logits, **CLOSE)
    torch.testing.assert_close(other.token_readout(TOKENS).logits(theirs.residuals[0]), ours.logits, **CLOSE)
    torch.testing.assert_close(other.unembed(other.final_norm(theirs.residuals[0]))[..., TOKENS], ours.logits, **CLOSE)


@families
@both
def test_what_follows_a_cached_prefix_is_the_same(family, backend):
    plain, other = pair(family, backend)
    shared = ids_of(24)
    prompts = [[*shared, *ids_of(n, seed=n)] for n in (3, 9, 5)]
    whole = [plain.capture(torch.tensor([ids]), [0, LAYERS - 1], torch.tensor([[len(ids) - 1]]), TOKENS) for ids in prompts]
    read = []
    for indices, capture in prefill(other, prompts, [0, LAYERS - 1], TOKENS, min_shared=8):
        read += indices
        for row, index in enumerate(indices):
            torch.testing.assert_close(capture.residuals[:, row], whole[index].residuals[:, 0], **CLOSE)
            torch.testing.assert_close(capture.logits[row], whole[index].logits[0], **CLOSE)
    assert sorted(read) == [0, 1, 2]
    caches = plain.new_cache(), other.new_cache()
    for step in (shared, ids_of(1), ids_of(4)):
        ours, theirs = (m.next_logits(torch.tensor([step]), kept) for m, kept in zip((plain, other), caches, strict=True))
        torch.testing.assert_close(theirs, ours, **CLOSE)
    assert other.keeps_every_position() == plain.keeps_every_position()


@families
@both
def test_generation_is_the_same_changed_or_not(family, backend):
    plain, other = pair(family, backend)
    prompts = [ids_of(12), ids_of(12, seed=1)]
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "stop": False}):
        replies = [model.generate(prompts, 6, seed=3, **options) for model in (plain, other)]
        assert replies[0] == replies[1]
    changed = []
    for model in (plain, other):
        with model.intervening(1, lambda output: output + 3 * torch.arange(WIDTH)):
            changed.append(model.generate(prompts, 6, temperature=0.0, seed=0))
    assert changed[0] == changed[1] != plain.generate(prompts, 6, temperature=0.0, seed=0)


@kinds
@both
def test_changes_reach_later_blocks_and_captures(family, backend):
    plain, other = pair(family, backend)
    prompt, read = ids_of(11), []
    for model in (plain, other):
        with model.intervening(1, doubled), model.intervening(1, lambda output: output + 1), model.intervening(2, doubled):
            inside = model.residuals([prompt], range(LAYERS), [-1])
            logits = model.next_logits(torch.tensor([prompt]), model.new_cache())
        read.append((inside, logits))
        clean = model.residuals([prompt], range(LAYERS), [-1])
        torch.testing.assert_close(inside[0], clean[0])
        torch.testing.assert_close(inside[1], 2 * clean[1] + 1, **CLOSE)  # of two at a layer the outer one acts first
        assert not torch.allclose(inside[3], clean[3], **CLOSE)
    torch.testing.assert_close(read[1], read[0], **CLOSE)


@kinds
@both
@pytest.mark.parametrize("first_position", [0, 6])
def test_gradients_are_the_same(family, backend, first_position):
    ids = torch.tensor([ids_of(14)])
    found = []
    for model in pair(family, backend):
        flags = [parameter.requires_grad for parameter in model.model.parameters()]
        with model.gradient_graph(ids, [0, 2], LAYERS - 1, first_position) as (sources, target):
            assert not any(parameter.requires_grad for parameter in model.model.parameters())
            direction = torch.linspace(-1, 1, target.numel()).view_as(target)
            found.append([target.detach(), *torch.autograd.grad((direction * target).sum(), sources)])
        assert [parameter.requires_grad for parameter in model.model.parameters()] == flags
    assert found[0][1].shape == (1, 14 - first_position, WIDTH)
    assert found[0][1].abs().max() > 1e-3
    torch.testing.assert_close(found[1], found[0], **CLOSE)


def left_on(model) -> list[object]:
    """Whatever waits in a model to act on its next pass."""
    hooks = [hook for module in model.model.modules() for hook in [*module._forward_hooks, *module._forward_pre_hooks]]
    if model.backend == "transformer_lens":
        hooks += [handle for point in model.bridge.hook_points() for handle in point.fwd_hooks + point.bwd_hooks]
    if model.backend == "nnsight":
        hooks += [*model._taps, *model.nnsight.interleaver.mediators]
    return hooks


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_left_behind_after_an_exception(backend):
    model, prompt = from_model(tiny_hf_model("llama"), default_tokenizer(), backend=backend), ids_of(8)
    before, clean = left_on(model), model.residuals([prompt], range(LAYERS), [-1])
    flags = [parameter.requires_grad for parameter in model.model.parameters()]

    def fail(_output):
        raise RuntimeError("in the change")

    with pytest.raises(RuntimeError, match="in the change"), model.intervening(2, fail):
        model.residuals([prompt], [0, 3], [-1])
    with pytest.raises(RuntimeError, match="in the change"), model.intervening(2, fail):
        model.generate([prompt], 3, temperature=0.0, seed=0)
    with pytest.raises(RuntimeError, match="outside"), model.intervening(1, doubled):
        raise RuntimeError("outside")
    with pytest.raises(IndexError):
        model.residuals([[10**9]], [0], [0])
    with pytest.raises(RuntimeError), model.gradient_graph(torch.tensor([prompt]), [0], 3):
        raise RuntimeError("half way")
    with pytest.raises(KlbError, match="layers 0-3"):
        model.residuals([prompt], [LAYERS], [0])
    with pytest.raises(KlbError, match="layers 0-3"):
        model.hook_name(-1)
    assert left_on(model) == before
    assert [parameter.requires_grad for parameter in model.model.parameters()] == flags
    assert torch.equal(model.residuals([prompt], range(LAYERS), [-1]), clean)


def test_models_of_all_backends_in_one_process_do_not_disturb_each_other():
    models = [
        from_model(tiny_hf_model("llama", seed=seed), default_tokenizer(), backend=b) for seed in (0, 1) for b in BACKENDS
    ]
    prompt = ids_of(9)
    clean = [model.residuals([prompt], range(LAYERS), [-1]) for model in models]
    for changed in models:
        with changed.intervening(0, doubled):
            for model, before in zip(models, clean, strict=True):
                now = model.residuals([prompt], range(LAYERS), [-1])
                assert torch.equal(now, before) == (model is not changed)


def test_what_a_user_holds_is_taken_as_it_is():
    from nnsight import LanguageModel, NNsight, NNsightDeprecationWarning
    from transformer_lens.model_bridge import TransformerBridge

    tokenizer, prompt = copy.deepcopy(default_tokenizer()), ids_of(9)
    plain = opened("qwen2", "huggingface").residuals([prompt], range(LAYERS), [-1, 0])
    bridge = TransformerBridge.boot_transformers("tiny", hf_model=tiny_hf_model("qwen2"), tokenizer=tokenizer)
    with pytest.warns(NNsightDeprecationWarning):
        language_model = LanguageModel(tiny_hf_model("qwen2"), tokenizer=tokenizer)
    held = {
        "huggingface": from_model(tiny_hf_model("qwen2"), tokenizer),
        "transformer_lens": load_model(bridge),
        "nnsight": load_model(language_model),
    }
    for backend, model in held.items():
        assert model.backend == backend
        torch.testing.assert_close(model.residuals([prompt], range(LAYERS), [-1, 0]), plain, **CLOSE)
    assert held["transformer_lens"].bridge is bridge
    assert held["nnsight"].model is language_model._module
    assert from_model(NNsight(tiny_hf_model("qwen2")), tokenizer).backend == "nnsight"

    with language_model.trace(torch.tensor([prompt])):  # still the user's to use
        theirs = language_model.model.layers[2].output.save()
    torch.testing.assert_close(theirs[:, [-1, 0]], plain[2], **CLOSE)
    with language_model.edit(inplace=True):
        language_model.model.layers[0].output[:] = 0
    refused = [
        ("clear_edits", lambda: from_model(language_model)),
        ("read by backend transformer_lens, not nnsight", lambda: from_model(bridge, backend="nnsight")),
        ("pass the tokenizer", lambda: from_model(tiny_hf_model("qwen2"))),
        ("keeps its device", lambda: load_model(bridge, device="cpu")),
        ("not Linear", lambda: from_model(torch.nn.Linear(2, 2), tokenizer)),
        ("around Linear", lambda: from_model(NNsight(torch.nn.Linear(2, 2)), tokenizer)),
    ]
    bridge.enable_compatibility_mode(disable_warnings=True)
    refused.append(("processed weights", lambda: from_model(bridge)))
    for words, call in refused:
        with pytest.raises(KlbError, match=words):
            call()


def test_an_unknown_backend_and_a_missing_library_say_what_to_do(monkeypatch):
    with pytest.raises(KlbError, match="unknown backend 'jax'; one of huggingface, transformer_lens, nnsight"):
        load_model("smollm2-135m", backend="jax")
    for backend in OTHERS:
        monkeypatch.delitem(sys.modules, f"klb_probe.models.{backend}", raising=False)
        for name in [name for name in sys.modules if name.partition(".")[0] == backend]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, backend, None)
        with pytest.raises(KlbError, match=rf'pip install "klb-probe\[{BACKENDS[backend]}\]"'):
            load_model("smollm2-135m", backend=backend)
    with pytest.raises(KlbError, match=r'pip install "klb-probe\[nnsight\]"'):
        load_model("meta-llama/Llama-3.1-8B", remote=True)


def test_no_backend_is_imported_unless_asked_for():
    code = """
import sys
from tiny import default_tokenizer, tiny_hf_model
from klb_probe.models.load import from_model
from_model(tiny_hf_model("llama"), default_tokenizer()).residuals([[5, 6]], [0], [-1])
print([name for name in ("transformer_lens", "nnsight") if name in sys.modules])
"""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_each_backend_adds_a_direction_where_it_says(backend):
    model, ids, direction = opened("llama", backend), ids_of(7), torch.linspace(-2, 2, WIDTH)
    names = {"model": model, "ids": ids, "direction": direction, "torch": torch}
    example = doctest.DocTestParser().get_doctest(type(model).__doc__, names, backend, None, None)
    assert doctest.DocTestRunner().run(example, clear_globs=False).failed == 0
    assert example.examples
    with model.intervening(2, lambda output: output + direction):
        if backend == "huggingface":
            wanted, found = model.residuals([ids], [2], [-1]), example.globs["changed"]
        else:
            wanted, found = model.next_logits(torch.tensor([ids]), model.new_cache()), example.globs["logits"][:, -1]
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_a_trace_reads_and_changes_blocks_that_return_tuples():
    class Tupled(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, *args, **kwargs):
            return (self.block(*args, **kwargs), None)

    class Untupled(Tupled):
        def forward(self, hidden, *args, **kwargs):
            return self.block(hidden[0], *args, **kwargs)

    inner, prompt = tiny_hf_model("llama"), ids_of(8)
    layers = inner.model.layers
    layers[0], layers[1] = Tupled(layers[0]), Untupled(layers[1])
    tupled, plain = from_model(inner, default_tokenizer(), backend="nnsight"), opened("llama", "huggingface")
    changed = []
    for model in (tupled, plain):
        with model.intervening(0, doubled):
            changed.append(model.residuals([prompt], range(LAYERS), [-1]))
    torch.testing.assert_close(*changed)
    tupled.residuals([prompt], [0], [-1])
    assert tupled.hook_name(0) == "model.model.layers[0].output[0]"


def test_hook_names_are_the_libraries_own():
    assert opened("gpt2", "huggingface").hook_name(2) == "transformer.h.2"
    assert opened("gpt2", "transformer_lens").hook_name(2) == "blocks.2.hook_resid_post"
    assert opened("gpt2", "nnsight").hook_name(2) == "model.transformer.h[2].output"


def test_a_command_reads_through_the_backend_and_records_it(tmp_path):
    asked = ["--model", save_tiny_llama(tmp_path / "tiny"), "--device", "cpu", "--lens", "logit", "--domains", "airline"]
    asked += ["--quick", "--framings", "honest", "--questions", "plain", "--out"]
    margins = {}
    for backend in BACKENDS:
        out = tmp_path / backend
        assert klb("jlens", *asked, out, "--backend", backend) == 0
        record = json.loads((out / "run.json").read_text())
        assert record["backend"] == record["arguments"]["backend"] == backend
        margins[backend] = [json.loads(line)["own_margin"] for line in (out / "scenarios.jsonl").read_text().splitlines()]
    for backend in OTHERS:
        assert margins[backend] == pytest.approx(margins["huggingface"], abs=1e-4)
    assert klb("jlens", *asked, tmp_path / "none", "--backend", "jax") == 2


def test_the_default_model_is_the_same_through_every_backend(smollm, yes_no):
    prompts = [
        smollm.chat.encode("You are a clerk.", question) for question in ("Is the refund owed?", "Is it owed? Yes or no.")
    ]
    layers, last = range(smollm.n_layers), torch.tensor([[len(prompts[0]) - 1]])
    ids = torch.tensor(prompts[:1])

    def read(model):
        capture = model.capture(ids, [smollm.n_layers - 1], last, yes_no.token_ids)
        margin = yes_no.margin(model.token_readout(yes_no.token_ids).logits(capture.residuals[0]))
        replies = model.generate(prompts[:1], 4, temperature=0.0, seed=0)
        return model.residuals(prompts, layers, [-1, 2]), capture.logits, margin, replies

    residuals, logits, margin, replies = read(smollm)
    inner = copy.deepcopy(smollm.model)  # the bridge replaces modules
    for backend in ("nnsight", "transformer_lens"):
        model = from_model(inner, smollm.tokenizer, backend=backend)
        assert model.fingerprint == smollm.fingerprint
        theirs, their_logits, their_margin, their_replies = read(model)
        # Some residuals of this model are in the thousands: the tolerance is that of float32 there.
        torch.testing.assert_close(theirs, residuals, atol=1e-4 * residuals.abs().max().item(), rtol=0)
        torch.testing.assert_close(their_logits, logits, **CLOSE)
        torch.testing.assert_close(their_margin, margin, **CLOSE)
        assert their_replies == replies


def served(family: str, monkeypatch):
    """A model without weights here, and a server: nnsight's rehearsal, which sends the block as source, runs it with ours."""
    from nnsight import NNsight
    from nnsight.modeling.transformers import TransformersModel

    from klb_probe.models import ndif

    server = TransformersModel(tiny_hf_model(family), tokenizer=copy.deepcopy(default_tokenizer()), task="text-generation")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the rehearsal hides our modules, and puts them back at the end

    def at_server(boundary):
        return lambda _client, *asked: boundary(server, *asked[:-1], "local")

    for name in ("read", "read_rows", "read_samples"):
        monkeypatch.setattr(ndif, name, at_server(getattr(ndif, name)))
    client = NNsight(tiny_hf_model(family).to("meta"))
    hook_map = find_hook_map(client._module)
    return ndif.NdifModel(client, default_tokenizer(), hook_map, name="served", identity={"name": "served"})


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_only_what_is_asked_for_leaves_a_server(family, monkeypatch):
    import nnsight

    plain, model, saved, save = opened(family, "huggingface"), served(family, monkeypatch), [], nnsight.save
    assert model.fingerprint == plain.fingerprint
    assert model.self_check_error < 1e-4
    # nnsight's own `save`, looked up where the block runs: whatever a block saves comes by here, and nothing else leaves.
    monkeypatch.setattr(nnsight, "save", lambda value: saved.append(value) or save(value))
    shared, layers = ids_of(20), [0, 2, LAYERS - 1]
    prompts = [[*shared, *ids_of(n, seed=n)] for n in (3, 6, 4)]
    for indices, capture in prefill(model, prompts, layers, TOKENS, min_shared=8, batch_size=2):
        for row, index in enumerate(indices):
            last = torch.tensor([[len(prompts[index]) - 1]])
            alone = plain.capture(torch.tensor([prompts[index]]), layers, last, TOKENS)
            torch.testing.assert_close(capture.residuals[:, row], alone.residuals[:, 0], **CLOSE)
            torch.testing.assert_close(capture.logits[row], alone.logits[0], **CLOSE)
    assert [tuple(one.shape) for one in saved] == [(3, 2, 1, WIDTH), (2, 1, 3), (3, 1, 1, WIDTH), (1, 1, 3)]
    saved.clear()
    readout = model.token_readout(TOKENS)
    torch.testing.assert_close(readout.directions, plain.token_readout(TOKENS).directions, **CLOSE)
    assert [None if one is None else tuple(one.shape) for one in saved[0]][::2] == [(3, WIDTH), (WIDTH,)]
    assert len(saved) == 1


def test_margins_of_a_served_model_are_those_of_the_model(monkeypatch):
    plain, model = opened("llama", "huggingface"), served("llama", monkeypatch)
    prompts = [[*ids_of(40), *ids_of(n, seed=n)] for n in (3, 6, 4)]
    found = []
    for one in (plain, model):
        lens = LogitLens.of(one, TokenContrast.of(one.chat))
        readouts = Readouts.empty(3, 1, LAYERS, len(lens.random_rows), "key", 1)
        read_prompts(one, [lens], prompts, readouts)
        assert readouts.done.all()
        found.append((readouts.margins, readouts.random, readouts.own))
    torch.testing.assert_close(found[1], found[0], **CLOSE)
    assert found[0][0].abs().min() > 1e-3


def test_what_a_server_cannot_do_is_refused(monkeypatch):
    from nnsight.intervention.backends.remote import RemoteError

    from klb_probe.models import ndif

    model, ids = served("llama", monkeypatch), ids_of(5)
    calls = [
        lambda: model.generate([ids], 2, temperature=0.0, seed=0),
        lambda: model.gradient_graph(torch.tensor([ids]), [0], 2),
        lambda: model.intervening(0, doubled),
        lambda: model.next_logits(torch.tensor([ids]), model.new_cache()),
        lambda: model.residuals([ids, ids_of(3)], [0], [-1], padding="left"),
    ]
    for call in calls:
        with pytest.raises(KlbError, match="served by NDIF"):
            call()
    monkeypatch.setenv("NDIF_API_KEY", "a-secret")
    for error in (RemoteError("the key a-secret is not known"), ConnectionRefusedError("nobody listens")):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr(ndif, "read", fail)
        with pytest.raises(KlbError, match="served could not be read at") as refusal:
            model.residuals([ids], [0], [-1])
        assert "a-secret" not in str(refusal.value)


def test_remote_says_what_it_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("NDIF_API_KEY", raising=False)
    assert klb("jlens", "--remote", "--model", "meta-llama/Llama-3.1-8B", "--out", tmp_path / "out") == 2
    assert "NDIF_API_KEY" in capsys.readouterr().err
    with pytest.raises(KlbError, match="tiny is not one"):
        load_model(str(save_tiny_llama(tmp_path / "tiny")), remote=True)
    with pytest.raises(KlbError, match="goes through nnsight"):
        load_model("meta-llama/Llama-3.1-8B", backend="transformer_lens", remote=True)
