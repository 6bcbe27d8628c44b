"""`klb-probe fit` from end to end: text, checkpoints, shards, memory, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from command import klb
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import LAYERS, WIDTH, save_tiny_llama, tiny_model

from klb_probe.errors import KlbError
from klb_probe.lens import fitting, vjp
from klb_probe.lens.checkpoint import Checkpoint
from klb_probe.lens.contrast import TokenContrast
from klb_probe.lens.corpus import Corpus, CorpusRequest
from klb_probe.lens.fitting import FitOptions, fit_full_lens, fit_lens, fit_margin_lens
from klb_probe.lens.jacobian import JacobianLens
from klb_probe.lens.store import read_metadata

N, LENGTH = 9, 24
COMMON = ("--max-len", LENGTH, "--skip-first", 4)


def story(i: int) -> str:
    weather = ("rain", "snow", "wind")[i % 3]
    return f"Number {i * 7919} of the letters told how {weather} kept parcel {i} for {i + 2} weeks on end."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama as a local model folder."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_llama(path)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Twelve records, three of them too short."""
    path = tmp_path_factory.mktemp("corpus") / "stories.jsonl"
    texts = [story(i) for i in range(N)]
    texts[3:3] = ["Too short.", "", "Short too."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def fit(folder, text):
    """Fit the tiny model on the text with further arguments."""
    return lambda *arguments: klb("fit", "--model", folder, "--corpus", text, *COMMON, *arguments)


@pytest.fixture(scope="module")
def whole(folder, text):
    """An uninterrupted fit."""
    out = folder.parent / "whole.margin.safetensors"
    assert klb("fit", "--model", folder, "--corpus", text, *COMMON, "--out", out) == 0
    return out


@pytest.fixture
def tiny():
    return tiny_model("llama")


CONTRAST = TokenContrast(((("a", 11), ("b", 22)),))


def prompts(n: int, length: int = LENGTH) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(5)
    return tuple(tuple(torch.randint(3, 49_000, (length,), generator=generator).tolist()) for _ in range(n))


def corpus_of(n: int) -> Corpus:
    return Corpus(prompts(n), "test", "never", LENGTH)


def same_tensors(one, other) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def partial_of(out):
    return out.with_name(out.name + ".partial.safetensors")


# --- The two kinds are one estimate. ---


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_margin_rows_are_rows_of_the_full_lens_of_the_same_prompts(family, normalise):
    model = tiny_model(family)
    options = FitOptions(skip_first=4, k=8, normalise=normalise, layers=(2, 0))
    margin = fit_margin_lens(model, corpus_of(4), CONTRAST, options)
    full = fit_full_lens(model, corpus_of(4), CONTRAST, options)
    assert margin.metadata.source_layers == full.source_layers == (0, 2)
    rows = fitting.cotangent_rows(model.token_readout(CONTRAST.token_ids), options)
    for i, layer in enumerate(full.source_layers):
        expected = rows @ full.matrix(layer)
        torch.testing.assert_close(torch.cat([margin.rows[i], margin.sketch[i]]), expected, atol=1e-5, rtol=1e-5)
    assert full.metadata.kind == "full"
    assert full.metadata.contrast == ()
    assert (full.metadata.norms is None) is not normalise
    if normalise:
        assert full.metadata.norms == pytest.approx(margin.metadata.norms, rel=1e-5)


def test_on_the_default_model_margin_and_full_lens_agree(smollm, yes_no):
    """Read where each customer's opening ends. (Cut in mid-sentence, the correlation is 0.987 to 0.995, by sketch seed.)"""
    from klb_probe.cases.load import load_domains

    openings = [case.opening for domain in load_domains() for case in domain.cases]
    ids = [tuple(smollm.tokenizer(opening)["input_ids"]) for opening in openings]
    long = [prompt[:24] for prompt in ids if len(prompt) >= 24]
    corpus = Corpus(tuple(long[:2]), "test", "never", 24)
    options = FitOptions(layers=tuple(range(20, 29)))
    full = fit_full_lens(smollm, corpus, yes_no, options)
    margin = fit_margin_lens(smollm, corpus, yes_no, options)
    rows = fitting.cotangent_rows(smollm.token_readout(yes_no.token_ids), options)
    residuals = torch.stack([smollm.residuals([prompt], full.source_layers, [-1])[:, 0, 0] for prompt in ids], dim=1)
    exact, ours = [], []
    for i, layer in enumerate(full.source_layers):
        found, expected = torch.cat([margin.rows[i], margin.sketch[i]]), rows @ full.matrix(layer)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        exact.append(full.margin(smollm, yes_no, residuals[i], layer))
        ours.append(margin.margin(residuals[i], layer))
    exact, ours = torch.stack(exact), torch.stack(ours)
    assert torch.equal(exact.sign(), ours.sign())
    assert torch.corrcoef(torch.stack([exact.flatten(), ours.flatten()]))[0, 1] >= 0.99


def test_normalised_prompts_weigh_the_same(tiny):
    """One prompt in four made 1000 times larger moves a plain fit, and not the direction of a normalised one."""
    options = FitOptions(skip_first=4, k=8)
    rows_of = vjp.prompt_rows
    heavy = prompts(4)[1]

    def heavier(model, ids, *arguments, **named):
        return rows_of(model, ids, *arguments, **named) * (1000 if tuple(ids) == heavy else 1)

    def rows(normalise: bool, changed: bool) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            if changed:
                patch.setattr(fitting, "prompt_rows", heavier)
            chosen = FitOptions(skip_first=4, k=8, normalise=normalise)
            return fit_margin_lens(tiny, corpus_of(4), CONTRAST, chosen).rows.flatten(1)

    def cosine(normalise: bool) -> float:
        a, b = rows(normalise, False), rows(normalise, True)
        return float(torch.nn.functional.cosine_similarity(a, b, dim=1).min())

    assert cosine(True) > 1 - 1e-5
    assert cosine(False) < 0.99
    plain = fit_margin_lens(tiny, corpus_of(1), CONTRAST, options).rows
    single = fit_margin_lens(tiny, corpus_of(1), CONTRAST, FitOptions(skip_first=4, k=8, normalise=True)).rows
    torch.testing.assert_close(single, plain, atol=1e-6, rtol=1e-5)  # one prompt: its own norm is the mean norm


# --- The graph. ---

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "gpt2", "gpt_neox"]


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_before_the_valid_ones_need_no_graph(family):
    model, ids = tiny_model(family), prompts(1)[0]
    rows, layers = torch.randn(3, WIDTH), list(range(LAYERS - 1))
    options = {"target_layer": LAYERS - 1, "skip_first": 9, "batch": 3}
    whole = vjp.prompt_rows(model, ids, rows, layers, **options)
    trimmed = vjp.prompt_rows(model, ids, rows, layers, **options, start=9)
    assert (whole - trimmed).norm() <= 1e-5 * whole.norm()
    assert vjp.graph_start(model, ids, layers, target_layer=LAYERS - 1, skip_first=9) == 9


def test_a_cache_that_passes_no_gradient_keeps_the_whole_graph(tiny, monkeypatch):
    ids, layers = prompts(1)[0], [0, 1]
    assert vjp.graph_start(tiny_model("qwen3_5"), ids, layers, target_layer=3, skip_first=9) == 0
    graph = tiny.gradient_graph

    def forgetful(ids, layers, target_layer, first_position=0):
        return graph(ids[:, first_position:], layers, target_layer)  # the keys and values of the beginning are lost

    monkeypatch.setattr(tiny, "gradient_graph", forgetful)
    assert vjp.graph_start(tiny, ids, layers, target_layer=3, skip_first=9) == 0


def test_batches_are_halved_when_memory_runs_out_and_stay_so(tiny, monkeypatch, caplog):
    options = FitOptions(skip_first=4, k=14, batch=16)
    expected = fit_margin_lens(tiny, corpus_of(3), CONTRAST, options)
    grad, sizes, largest = torch.autograd.grad, [], 5

    def scarce(outputs, inputs, cotangents, **named):
        sizes.append(len(cotangents))
        if len(cotangents) > largest:
            raise (torch.OutOfMemoryError if len(cotangents) > 8 else RuntimeError)("CUDA out of memory. Tried ...")
        return grad(outputs, inputs, cotangents, **named)

    monkeypatch.setattr(torch.autograd, "grad", scarce)
    found = fit_margin_lens(tiny, corpus_of(3), CONTRAST, options)
    torch.testing.assert_close(found.rows, expected.rows, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.sketch, expected.sketch, atol=1e-6, rtol=1e-5)
    assert [size for size in sizes if size > 1] == [16, 8, *[4] * 12]
    assert len([record for record in caplog.records if "out of memory" in record.message]) == 1
    largest = 0
    with pytest.raises(KlbError, match="out of memory with one cotangent"):
        vjp.prompt_rows(tiny, prompts(1)[0], torch.randn(4, WIDTH), [0], target_layer=3, skip_first=2, batch=4)


def test_a_caller_in_inference_mode_still_fits(tiny):
    with torch.inference_mode():
        lens = fit_margin_lens(tiny, corpus_of(1), CONTRAST, FitOptions(skip_first=4))
    assert lens.rows.abs().max() > 0


@pytest.mark.parametrize(
    ("scheme", "refused"),
    [
        ({"quant_method": "awq"}, True),
        (SimpleNamespace(quant_method=SimpleNamespace(value="gptq")), True),
        ({"quant_method": "mxfp4"}, True),
        ({"quant_method": "mxfp4", "dequantize": True}, False),
        ({"quant_method": "bitsandbytes"}, False),
    ],
)
def test_forward_only_quantisation_is_refused_by_name(scheme, refused):
    model = SimpleNamespace(name="m", model=SimpleNamespace(config=SimpleNamespace(quantization_config=scheme)))
    if not refused:
        vjp.refuse_forward_only(model)
        return
    with pytest.raises(KlbError, match="awq|gptq|mxfp4"):
        vjp.refuse_forward_only(model)


def test_a_quantised_model_is_refused_before_any_text_is_read(tiny, monkeypatch):
    monkeypatch.setattr(tiny.model.config, "quantization_config", {"quant_method": "fp8"}, raising=False)
    with pytest.raises(KlbError, match="quantised with fp8"):
        fit_lens(tiny, corpus_of(1), CONTRAST, FitOptions(skip_first=4))


# --- Stopping and going on. ---


def test_an_interrupted_fit_goes_on_to_the_same_lens(fit, whole, tmp_path, monkeypatch, capsys):
    out, rows_of, calls = tmp_path / "lens.margin.safetensors", fitting.prompt_rows, []

    def stop_at_the_sixth(*arguments, **named):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return rows_of(*arguments, **named)

    monkeypatch.setattr(fitting, "prompt_rows", stop_at_the_sixth)
    assert fit("--out", out) == 130
    error = capsys.readouterr().err
    assert "stopped after 5 of 9 prompts; continue with the same command and --resume" in error
    assert not out.exists()
    assert partial_of(out).exists()
    assert fit("--out", out) == 2
    assert "--resume" in capsys.readouterr().err
    assert fit("--out", out, "--resume") == 0
    assert len(calls) == 6 + 4
    assert same_tensors(out, whole)
    assert read_metadata(out).corpus == read_metadata(whole).corpus
    assert read_metadata(out).split_half == read_metadata(whole).split_half
    assert not partial_of(out).exists()


def test_sampled_text_is_kept_in_the_checkpoint(folder, tmp_path, monkeypatch):
    from klb_probe.lens import corpus

    command = ("fit", "--model", folder, *COMMON, "--n", 3)
    whole, out = tmp_path / "a.margin.safetensors", tmp_path / "b.margin.safetensors"
    assert klb(*command, "--out", whole) == 0
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "prompt_rows", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert klb(*command, "--out", out) == 130
    monkeypatch.setattr(corpus, "sampled_corpus", lambda *_, **__: pytest.fail("sampled again"))
    assert klb(*command, "--out", out, "--resume") == 0
    assert same_tensors(out, whole)
    assert read_metadata(out).corpus == read_metadata(whole).corpus


def test_a_lens_that_could_not_be_written_is_not_fitted_again(fit, whole, tmp_path, monkeypatch, capsys):
    from klb_probe.lens import store

    out = tmp_path / "lens.margin.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(store, "save_lens", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device", str(out))))
        assert fit("--out", out) == 2
        assert "No space left" in capsys.readouterr().err
    monkeypatch.setattr(fitting, "prompt_rows", lambda *_, **__: pytest.fail("fitted again"))
    assert fit("--out", out, "--resume") == 0
    assert same_tensors(out, whole)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", 8], "k 32, not 8"),
        (["--n", 5], "n 64, not 5"),
        (["--skip-first", 3, "--layers", "0-1"], "layers [0, 1, 2], not [0, 1]; skip first 4, not 3"),
        (["--contrast", "yes/no"], "contrast"),
        (["--shard", "1/2"], "shard none, not 1/2"),
        (["--normalise"], "normalise False, not True"),
        (["--target-layer", "penultimate"], "target layer last, not penultimate"),
    ],
)
def test_a_checkpoint_of_another_fit_is_refused_by_naming_what_differs(fit, stopped, arguments, words, capsys):
    before = partial_of(stopped).read_bytes()
    assert fit("--out", stopped, "--resume", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert partial_of(stopped).read_bytes() == before


@pytest.fixture(scope="module")
def stopped(folder, text):
    """The --out of a fit that was stopped after two prompts."""
    out, rows_of, calls = folder.parent / "stopped.margin.safetensors", fitting.prompt_rows, []

    def stop_at_the_third(*arguments, **named):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return rows_of(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "prompt_rows", stop_at_the_third)
        assert klb("fit", "--model", folder, "--corpus", text, *COMMON, "--out", out) == 130
    return out


def test_changed_text_is_refused(fit, stopped, text, capsys):
    whole = text.read_text()
    text.write_text(whole.replace("rain", "hail"))
    try:
        assert fit("--out", stopped, "--resume") == 2
        assert "corpus hash" in capsys.readouterr().err
    finally:
        text.write_text(whole)


def test_batch_and_until_may_change_on_the_way(fit, stopped, tmp_path):
    out = tmp_path / "lens.margin.safetensors"
    partial_of(out).write_bytes(partial_of(stopped).read_bytes())
    assert fit("--out", out, "--resume", "--batch", 3, "--until", 0.001) == 0
    assert read_metadata(out).until == 0.001


def test_a_damaged_checkpoint_is_one_line(fit, stopped, tmp_path, capsys):
    out = tmp_path / "lens.margin.safetensors"
    partial_of(out).write_bytes(partial_of(stopped).read_bytes()[:-100])
    assert fit("--out", out, "--resume") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert fit("--out", out, "--overwrite") == 0


def test_a_finished_lens_is_not_replaced_unasked(fit, whole, capsys):
    before = whole.read_bytes()
    assert fit("--out", whole) == 2
    assert fit("--out", whole, "--resume") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert whole.read_bytes() == before


_SLOW = """
import sys, time
from klb_probe import cli
from klb_probe.lens import fitting
rows_of = fitting.prompt_rows
def slow(*arguments, **named):
    time.sleep(0.4)
    return rows_of(*arguments, **named)
fitting.prompt_rows = slow
cli.main()
"""


def start_slowly(folder, text, out, *arguments) -> subprocess.Popen:
    """The command in a process of its own, 0.4 s a prompt, once its first prompt is done."""
    command = ["fit", "--model", folder, "--corpus", text, *COMMON, "--out", out, "--checkpoint-every", 2, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, *map(str, command)], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 60
    while reached(out) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.poll() is None
    return process


def reached(out) -> int:
    """Prompts in the checkpoint."""
    saved = Checkpoint.beside(out).load()
    return saved.sums.index if saved else 0


def test_sigterm_writes_a_checkpoint_and_the_fit_goes_on_bit_for_bit(folder, text, fit, whole, tmp_path):
    out = tmp_path / "lens.margin.safetensors"
    process = start_slowly(folder, text, out)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume" in error.strip().splitlines()[-1]
    assert 2 <= reached(out) < N
    assert fit("--out", out, "--resume") == 0
    assert same_tensors(out, whole)


def test_kill_9_loses_no_more_than_the_prompts_since_the_last_checkpoint(folder, text, fit, whole, tmp_path):
    out = tmp_path / "lens.margin.safetensors"
    process = start_slowly(folder, text, out)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    done = reached(out)
    assert done in (2, 4)
    assert not out.exists()
    assert fit("--out", out, "--resume") == 0
    assert same_tensors(out, whole)


# --- Shards. ---


@pytest.mark.parametrize("extra", [[], ["--normalise"]])
def test_shards_merge_to_the_single_fit(fit, tmp_path, extra):
    whole, merged = tmp_path / "whole.margin.safetensors", tmp_path / "merged.margin.safetensors"
    shards = [tmp_path / f"{i}.margin.safetensors" for i in (1, 2)]
    assert fit("--out", whole, *extra) == 0
    for i, path in enumerate(shards, 1):
        assert fit("--out", path, "--shard", f"{i}/2", *extra) == 0
    assert [read_metadata(path).shard for path in shards] == ["1/2", "2/2"]
    assert [read_metadata(path).corpus.n_prompts for path in shards] == [5, 4]
    assert klb("fit", "merge", *reversed(shards), "--out", merged) == 0
    one, other = load_file(whole), load_file(merged)
    for name in one:
        assert (one[name] - other[name]).abs().max() <= 1e-6 * one[name].abs().max()
    a, b = read_metadata(whole), read_metadata(merged)
    assert a.corpus == b.corpus
    assert b.shard is None
    assert a.split_half == pytest.approx(b.split_half, abs=1e-4)  # two shards are the even and the odd prompts
    assert klb("fit", "merge", *shards, "--out", merged) == 2  # exists


def test_shards_of_a_full_lens_merge_to_the_single_fit(fit, tmp_path):
    whole, merged = tmp_path / "whole.pt", tmp_path / "merged.pt"
    shards = [tmp_path / f"{i}.pt" for i in (1, 2, 3)]
    full = ("--kind", "full", "--layers", "0,2")
    assert fit("--out", whole, *full) == 0
    for i, path in enumerate(shards, 1):
        assert fit("--out", path, "--shard", f"{i}/3", *full) == 0
    assert klb("fit", "merge", *shards, "--out", merged) == 0
    one, other = JacobianLens.open(whole), JacobianLens.open(merged)
    assert one.source_layers == other.source_layers == (0, 2)
    assert one.n_prompts == other.n_prompts == N
    for layer in one.source_layers:  # equal but for the last bit of the format's float16
        torch.testing.assert_close(one.matrix(layer), other.matrix(layer), atol=1e-6, rtol=1e-3)
    in_memory = JacobianLens.merge([JacobianLens.open(path) for path in shards])
    for layer in one.source_layers:
        close = in_memory.matrix(layer).half() == one.matrix(layer).half()
        assert close.float().mean() > 0.98


def test_shards_that_do_not_belong_together_are_refused(fit, whole, tmp_path, capsys):
    first, second, other = (tmp_path / f"{name}.margin.safetensors" for name in ("first", "second", "other"))
    for path, shard, k in ((first, "1/3", 32), (second, "2/3", 32), (other, "3/3", 8)):
        assert fit("--out", path, "--shard", shard, "--k", k) == 0
    out = ("--out", tmp_path / "merged.margin.safetensors")
    for shards, words in (
        ([first, second], "shard 3/3 is missing"),
        ([first], "shard 2/3, 3/3 is missing"),
        ([first, first, second], "both shard 1/3"),
        ([first, second, other], "k 8, not 32"),
        ([whole, first], "not a shard"),
        ([first, tmp_path / "absent.margin.safetensors"], "no such lens file"),
    ):
        capsys.readouterr()
        assert klb("fit", "merge", *shards, *out) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


# --- Text. ---


def test_every_kind_of_text_is_read_cut_and_counted(tiny, text, tmp_path):
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    pd.DataFrame({"text": texts, "id": range(len(texts))}).to_parquet(tmp_path / "stories.parquet")
    (tmp_path / "stories.txt").write_text("\n\n".join(texts))
    made = {
        suffix: CorpusRequest(str(path), 64, LENGTH, 6).make(tiny)
        for suffix, path in (("jsonl", text), ("parquet", tmp_path / "stories.parquet"), ("txt", tmp_path / "stories.txt"))
    }
    assert len(made["jsonl"].prompts) == N
    assert made["jsonl"].n_short == 3
    assert made["jsonl"].prompts == made["parquet"].prompts
    assert made["jsonl"].sha256 == made["parquet"].sha256 != made["txt"].sha256
    assert all(6 <= len(prompt) <= LENGTH for corpus in made.values() for prompt in corpus.prompts)
    for suffix in ("jsonl", "parquet"):
        assert made[suffix].source == f"file stories.{suffix}"
    (tmp_path / "notes.md").write_text("Not text to fit on.")
    both = CorpusRequest(str(tmp_path), 64, LENGTH, 6).make(tiny)
    assert both.prompts == made["parquet"].prompts + made["txt"].prompts  # in the order of their names
    few = CorpusRequest(str(text), 5, LENGTH, 6).make(tiny)
    assert few.prompts == made["jsonl"].prompts[:5]
    assert few.n_short == 3


def test_too_short_texts_are_counted_in_the_lens_and_the_output(fit, whole, tmp_path, capsys):
    metadata = read_metadata(whole)
    assert (metadata.corpus.n_prompts, metadata.corpus.n_skipped) == (N, 3)
    assert metadata.corpus.sha256
    assert fit("--out", tmp_path / "lens.margin.safetensors") == 0
    assert "fitted on 9 prompts (3 too short)" in capsys.readouterr().out


def test_wikitext_is_read_through_datasets(tiny, monkeypatch):
    import datasets

    asked = []

    def load(*names, **options):
        asked.append((names, options))
        lines = ["", " = A heading = \n", f" {story(1)} " + "word " * 1000, "Short .", story(2)]
        return [{"text": line} for line in lines]

    monkeypatch.setattr(datasets, "load_dataset", load)
    lengths = []
    tokenizer = tiny.tokenizer
    monkeypatch.setattr(tiny, "tokenizer", lambda text, **named: lengths.append(len(text)) or tokenizer(text, **named))
    corpus = CorpusRequest("wikitext", 64, LENGTH, 6).make(tiny)
    assert asked == [(("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "train"})]
    assert len(corpus.prompts) == 2
    assert corpus.n_short == 1
    assert max(lengths) == 2000
    assert "wikitext-103-raw-v1" in corpus.source


def test_a_hub_that_cannot_be_reached_is_one_line(fit, monkeypatch, capsys):
    import datasets

    def fail(*_, **__):
        raise ConnectionError("Couldn't reach the hub\nwith many\nlines")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    assert fit("--corpus", "wikitext", "--out", "unused.margin.safetensors") == 2
    error = capsys.readouterr().err
    assert "Salesforce/wikitext" in error
    assert "--corpus" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "x"}\n{"txt": "y"}\n', "line 2: no field 'text'"),
        ("a.jsonl", "not json\n", "line 1: not JSON"),
        ("a.parquet", "not parquet", "no readable column 'text'"),
        ("a.txt", "", "has no text to fit on"),
        ("a.txt", "A word or two.", "1 texts are shorter than 6 tokens"),
    ],
)
def test_text_that_cannot_be_used_is_one_line(fit, tmp_path, capsys, name, content, words):
    (tmp_path / name).write_text(content)
    assert fit("--corpus", tmp_path / name, "--out", tmp_path / "lens.margin.safetensors") == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / name]


def test_prompts_that_repeat_each_other_are_warned_of(fit, tmp_path, caplog):
    fresh, template = Corpus(prompts(6), "test", "never", LENGTH), tuple(range(100, 112))
    assert fresh.warning() is None
    assert "only 1 of 6" in Corpus(prompts(1) * 6, "test", "never", LENGTH).warning()
    boilerplate = Corpus(tuple(template + prompt[:12] for prompt in prompts(6)), "test", "never", LENGTH)
    assert boilerplate.shared_prefix == pytest.approx(0.5)
    assert "share their first 50%" in boilerplate.warning()
    path = tmp_path / "same.jsonl"
    path.write_text((json.dumps({"text": story(1)}) + "\n") * 4)
    assert fit("--corpus", path, "--out", tmp_path / "lens.margin.safetensors") == 0
    assert len([record for record in caplog.records if "only 1 of 4" in record.message]) == 1


# --- Convergence. ---


@pytest.mark.parametrize("kind", ["margin", "full"])
def test_a_fit_stops_once_its_halves_agree(tiny, kind):
    seen = []
    options = FitOptions(skip_first=4, kind=kind, until=0.05)
    lens = fit_lens(tiny, corpus_of(12), CONTRAST, options, on_prompt=lambda fit: seen.append(fit.agreement()))
    metadata = lens.metadata
    assert metadata.stopped_early
    assert metadata.corpus.n_prompts == len(seen) >= 8
    assert metadata.corpus.n_available == 12
    assert metadata.split_half == seen[-1] >= 0.05
    assert seen[0] is None
    never = fit_lens(tiny, corpus_of(12), CONTRAST, FitOptions(skip_first=4, kind=kind, until=1.0))
    assert not never.metadata.stopped_early
    assert never.metadata.corpus.n_prompts == 12


def test_agreement_is_the_median_cosine_of_the_halves(tiny):
    corpus, options = corpus_of(6), FitOptions(skip_first=4)
    halves = [
        fit_margin_lens(tiny, Corpus(corpus.prompts[start::2], "t", "never", LENGTH), CONTRAST, options).rows
        for start in (0, 1)
    ]
    cosines = [torch.nn.functional.cosine_similarity(a[0] - a[1], b[0] - b[1], dim=0) for a, b in zip(*halves, strict=True)]
    found = fit_margin_lens(tiny, corpus, CONTRAST, options).metadata.split_half
    assert found == pytest.approx(float(torch.stack(cosines).median()), abs=1e-5)


# --- The command. ---


def test_the_checkpoint_stands_beside_the_lens_and_holds_what_it_is_of(stopped):
    with safe_open(partial_of(stopped), "pt") as file:
        header = file.metadata()
    assert json.loads(header["state"])["index"] == 2
    settings = json.loads(header["settings"])
    assert settings["corpus hash"]
    assert settings["model"] == "tiny-llama"


def test_layers_are_chosen_and_the_command_is_recorded(fit, tmp_path):
    out = tmp_path / "lens.margin.safetensors"
    assert fit("--layers", "0,2", "--out", out) == 0
    metadata = read_metadata(out)
    assert metadata.source_layers == (0, 2)
    assert "--layers 0,2" in metadata.command
    assert "--kind" not in metadata.command


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kind", "half"], "unknown --kind"),
        (["--kind", "full"], "needs --out"),
        (["--shard", "1/2"], "needs --out"),
        (["--shard", "3/2", "--out", "x.margin.safetensors"], "--shard wants i/n"),
        (["--kind", "full", "--out", "x.safetensors"], "a .pt file"),
        (["--out", "x.pt"], "a .safetensors file"),
        (["--layers", "3-1"], "--layers wants"),
        (["--layers", "0,7"], "source layers 0-2, not 7"),
        (["--until", "1.5"], "--until wants"),
        (["--overwrite", "--resume"], "not both"),
        (["--target-layer", "first"], "unknown target layer"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_written(fit, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path / "cache"))
    assert fit(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("*.safetensors"))
