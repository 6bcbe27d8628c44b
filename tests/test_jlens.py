"""The command from end to end: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from command import klb
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from tiny import LAYERS, default_tokenizer, save_tiny_llama

import klb_probe as klb_module
from klb_probe.cases.load import load_domains
from klb_probe.cases.scenarios import eligibility_scenarios
from klb_probe.lens.library import load_lens
from klb_probe.paths import data_dir
from klb_probe.plots import margins_by_depth, models_side_by_side
from klb_probe.signals import report
from klb_probe.signals.margins import eligibility_margins, prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama as a local model folder."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    return save_tiny_llama(path)


@pytest.fixture(scope="module")
def lens_file(folder):
    path = folder.parent / "tiny.margin.safetensors"
    assert klb("fit", "--model", folder, "--n", 2, "--max-len", 24, "--out", path) == 0
    return path


@pytest.fixture(scope="module")
def run(folder, lens_file):
    """A whole run on the tiny model."""
    out = folder.parent / "run"
    assert klb("jlens", "--model", folder, "--lens", lens_file, "--domains", "airline", "--out", out) == 0
    return out


def test_margins_are_tidy_and_complete(run):
    margins = pd.read_csv(run / "margins.csv")
    assert list(margins) == [
        "scenario", "pair", "domain", "entitled", "framing", "paraphrase", "question", "answer",
        "lens", "layer", "position", "margin",
    ]  # fmt: skip
    assert len(margins) == 28 * 2 * 4 * 2 * 2 * LAYERS  # situations x framings x paraphrases x wordings x lenses x layers
    assert not margins.duplicated(["scenario", "framing", "paraphrase", "question", "lens", "layer", "position"]).any()
    assert margins["margin"].notna().all()
    assert set(margins["lens"]) == {"margin", "logit"}


def test_scenarios_hold_the_prompt_as_the_model_saw_it(run):
    rows = [json.loads(line) for line in (run / "scenarios.jsonl").read_text().splitlines()]
    margins = pd.read_csv(run / "margins.csv")
    last = margins[(margins["layer"] == LAYERS - 1)].set_index(["scenario", "framing", "paraphrase", "question", "lens"])[
        "margin"
    ]
    for row in rows[::17]:
        assert default_tokenizer().decode(row["token_ids"]) == row["prompt"]
        assert row["answer"] == ("Yes" if row["entitled"] is (row["question"] == "plain") else "No")
        for lens in ("margin", "logit"):
            key = (row["scenario"], row["framing"], row["paraphrase"], row["question"], lens)
            assert abs(last[key] - row["own_margin"]) < 1e-4


def views(margins):
    """The margin toward owed: of each wording, and of both as one (their mean, in which a taste for Yes cancels)."""
    plain, reverse = (margins[margins["question"] == one].copy() for one in ("plain", "reversed"))
    reverse["margin"] = -reverse["margin"]
    keys = [name for name in margins if name not in ("question", "answer", "margin")]
    both = plain.merge(reverse, on=keys, suffixes=("", "_reversed"))
    both["margin"] = (both["margin"] + both["margin_reversed"]) / 2
    return {"plain": plain, "reversed": reverse, "both": both}


def test_the_summary_follows_from_the_margins(run):
    margins, summary = pd.read_csv(run / "margins.csv"), pd.read_csv(run / "summary.csv")
    for question, view in views(margins).items():
        assert len(view) == len(margins) / 2
        for (lens, layer, framing), group in view.groupby(["lens", "layer", "framing"]):
            here = summary[(summary["lens"] == lens) & (summary["layer"] == layer) & (summary["framing"] == framing)]
            here = here[here["question"] == question]
            auroc = here[here["statistic"] == "auroc"].iloc[0]
            assert auroc["value"] == pytest.approx(roc_auc_score(group["entitled"], group["margin"]), abs=2e-3)  # 6 digits tie
            assert (auroc["n"], auroc["n_pairs"]) == (112, 14)
            assert auroc["low"] <= auroc["high"]
            assert 0.5 <= auroc["null_q95"] <= 1
            means = group.groupby("entitled")["margin"].mean()
            contrast = here[here["statistic"] == "entitlement_contrast"].iloc[0]
            assert contrast["value"] == pytest.approx(means[True] - means[False], abs=1e-5)
            raw = here[here["statistic"] == "mean_margin"].set_index("entitled")["value"]
            if question == "both":
                assert raw.empty
            else:  # as it is, yes minus no
                assert raw[True] == pytest.approx(means[True] * (1 if question == "plain" else -1), abs=1e-5)
    moved = summary[(summary["statistic"] == "framing_contrast")]
    assert set(moved["framing"]) == {"honest minus deny"}
    assert len(moved) == 2 * 2 * LAYERS * 3


def test_a_taste_for_yes_is_no_knowledge(run, folder, lens_file):
    """Margins that say Yes by surface alone order one wording perfectly, and both wordings as one at chance."""
    model = klb_module.load_model(folder, device="cpu")
    lens = load_lens(model, path=lens_file)
    scenarios = eligibility_scenarios(load_domains(["airline"]), ["honest"])
    margins, _ = prepare(model, lens, scenarios)
    generator = torch.Generator().manual_seed(0)
    surface = torch.tensor([float(s.situation.entitled) for s in scenarios])[:, None, None]  # same in both wordings
    shape = margins.readouts.margins.shape
    margins.readouts.margins[:] = 3 + surface + 1e-3 * torch.randn(shape, generator=generator)
    margins.readouts.random[:] = torch.randn(margins.readouts.random.shape, generator=generator)
    margins.readouts.own[:] = margins.readouts.margins[:, 0, -1]
    summary = margins.summary()
    pairs = (
        summary[(summary["statistic"] == "pair_accuracy") & (summary["lens"] == "margin")].groupby("question")["value"].mean()
    )
    assert pairs["plain"] == 1
    assert pairs["reversed"] == 0
    assert 0.3 < pairs["both"] < 0.7
    # And one that follows the question's right answer is told from it, whatever its taste for Yes.
    right = torch.tensor([1.0 if s.answer == "Yes" else -1.0 for s in scenarios])[:, None, None]
    margins.readouts.margins[:] = 50 + right.expand(shape)
    margins.readouts.own[:] = margins.readouts.margins[:, 0, -1]
    scores = margins.summary().set_index(["statistic", "question", "lens", "layer"])["value"]
    assert (scores[["auroc", "pair_accuracy"]] == 1).all()
    assert (scores["entitlement_contrast"] == 2).all()


def test_pair_accuracy_and_nulls_follow_from_the_raw_readouts(run):
    """Counted here prompt by prompt, from the files, for one framing and both wordings as one."""
    margins, summary = pd.read_csv(run / "margins.csv"), pd.read_csv(run / "summary.csv")
    raw = load_file(run / "readouts.safetensors")
    prompts = margins[(margins["lens"] == "margin") & (margins["layer"] == 0)].reset_index(drop=True)
    chosen = prompts[(prompts["framing"] == "deny") & (prompts["question"] == "plain")]
    same = ["scenario", "framing", "paraphrase"]
    other_wording = prompts[prompts["question"] == "reversed"].reset_index().set_index(same)["index"]
    turned = other_wording[list(chosen[same].itertuples(index=False, name=None))].to_numpy()
    plain = chosen.index.to_numpy()
    chosen = chosen.reset_index(drop=True)
    for number, lens in enumerate(("margin", "logit")):
        for layer in range(LAYERS):
            here = summary[(summary["lens"] == lens) & (summary["layer"] == layer) & (summary["framing"] == "deny")]
            here = here[here["question"] == "both"]
            random = raw["random"][:, number, layer].double().numpy()
            random = (random[plain] - random[turned]) / 2
            values = raw["margins"][:, number, layer].double().numpy()
            values = (values[plain] - values[turned]) / 2
            folded = [max(a, 1 - a) for a in (roc_auc_score(chosen["entitled"], random[:, row]) for row in range(32))]
            rank = 0.95 * 33  # the 31.35th of 32 in order
            expected = sorted(folded)[30] + (rank - 31) * (sorted(folded)[31] - sorted(folded)[30])
            assert here[here["statistic"] == "auroc"]["null_q95"].item() == pytest.approx(expected, abs=1e-5)
            own, null = [], []
            for _, twins in chosen.groupby(["pair", "paraphrase"]):
                owed, other = twins.index[twins["entitled"]].item(), twins.index[~twins["entitled"]].item()
                own.append(float(values[owed] > values[other]))
                null.append(random[owed] > random[other])
            row = here[here["statistic"] == "pair_accuracy"].iloc[0]
            assert row["value"] == pytest.approx(sum(own) / len(own), abs=1e-5)
            assert (row["n"], row["n_pairs"]) == (56, 14)
            shares = sorted(np.maximum(share := np.mean(null, axis=0), 1 - share))
            assert row["null_q95"] == pytest.approx(shares[30] + (rank - 31) * (shares[31] - shares[30]), abs=1e-5)


def test_the_sentence_counts_what_the_summary_holds(run):
    summary = pd.read_csv(run / "summary.csv", dtype={"entitled": "boolean"})
    pairs = (summary["lens"] == "margin") & (summary["statistic"] == "pair_accuracy") & (summary["layer"] < LAYERS - 1)
    summary.loc[pairs, "value"], summary.loc[pairs, "null_q95"] = 0.5, 0.6
    summary.loc[pairs & (summary["framing"] == "deny") & (summary["layer"] == 1), "value"] = 0.35
    summary.loc[pairs & (summary["framing"] == "deny") & (summary["layer"] == 2), "value"] = 0.61
    sentence = report.what_it_shows(summary, "m")
    assert "0 of 3 layers under honest, 2 of 3 layers under deny" in sentence
    last = summary[(summary["layer"] == LAYERS - 1) & (summary["statistic"] == "auroc") & (summary["lens"] == "margin")]
    last = last[last["question"] == "both"]
    assert f"{last.iloc[0]['value']:.2f} [{last.iloc[0]['low']:.2f}, {last.iloc[0]['high']:.2f}]" in sentence


def test_the_figure_draws_what_the_summary_holds(run):
    summary = pd.read_csv(run / "summary.csv", dtype={"entitled": "boolean"})
    figure = margins_by_depth(summary, "m", "c")
    assert len(figure.axes) == 10  # margins of two wordings, contrasts, two scores; two lenses
    upper = figure.axes[0]
    drawn = {line.get_label(): line.get_ydata() for line in upper.get_lines()}
    means = summary[(summary["lens"] == "margin") & (summary["statistic"] == "mean_margin") & (summary["framing"] == "deny")]
    means = means[means["question"] == "plain"]
    np.testing.assert_allclose(drawn["deny, not owed"], means[~means["entitled"]]["value"])
    assert all(axis.get_ylabel() for axis in figure.axes[::2])
    nulls = [line for line in figure.axes[6].get_lines() if "random readouts" in str(line.get_label())]
    assert len(nulls) == 2


def test_a_saved_run_is_drawn_again_by_the_analysis(run, tmp_path):
    script = Path(__file__).parents[1] / "analyses" / "eligibility_margins.py"
    figure = tmp_path / "again.png"
    done = subprocess.run([sys.executable, script, "--run", run, "--out", figure], capture_output=True, text=True, check=True)
    assert "Does not show" in done.stdout
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_several_models_are_drawn_side_by_side(run, tmp_path):
    summary = pd.read_csv(run / "summary.csv", dtype={"entitled": "boolean"})
    other = summary.assign(value=summary["value"] / 2)
    figure = models_side_by_side({"one": summary, "two": other}, "margin")
    here = summary[(summary["lens"] == "margin") & (summary["framing"] == "deny")]
    for column, scale in ((0, 1.0), (1, 0.5)):
        margins, scores = figure.axes[column], figure.axes[2 + column]
        drawn = {line.get_label(): line.get_ydata() for line in margins.get_lines()}
        means = here[(here["statistic"] == "mean_margin") & (here["question"] == "plain")]
        np.testing.assert_allclose(drawn["deny, owed"], means[means["entitled"]]["value"] * scale)
        drawn = {line.get_label(): line.get_ydata() for line in scores.get_lines()}
        auroc = here[(here["statistic"] == "auroc") & (here["question"] == "both")].set_index("layer")["value"]
        np.testing.assert_allclose(drawn["deny"], auroc * scale)
    script = Path(__file__).parents[1] / "analyses" / "models_side_by_side.py"
    again = shutil.copytree(run, tmp_path / "again")
    record = json.loads((again / "run.json").read_text())
    record["model"]["name"] = "another"
    (again / "run.json").write_text(json.dumps(record))
    command = [sys.executable, script, run, again, "--lens", "logit", "--out", tmp_path / "two.png"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "another\n" in done.stdout
    for others, said in (([run], "a second run of"), ([tmp_path], "has no run.json")):
        refused = subprocess.run([*command[:3], *others, *command[4:]], capture_output=True, text=True)
        assert refused.returncode == 2
        assert said in refused.stderr
    auroc = summary[(summary["lens"] == "logit") & (summary["statistic"] == "auroc") & (summary["question"] == "both")]
    last = auroc[(auroc["framing"] == "deny") & (auroc["layer"] == LAYERS - 1)].iloc[0]
    assert f"deny: {last['value']:.2f} [{last['low']:.2f}, {last['high']:.2f}] at layer {LAYERS - 1}" in done.stdout
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


def test_a_scenarios_folder_of_ones_own_is_read_and_its_mistakes_are_placed(folder, lens_file, tmp_path, capsys):
    own = tmp_path / "scenarios"
    shutil.copytree(data_dir("scenarios"), own)
    for path in (own / "domains").iterdir():
        if path.name != "airline":
            shutil.rmtree(path)
    (own / "domains" / "airline").rename(own / "domains" / "ferry")
    for name in ("policy.yaml", "cases.yaml"):
        path = own / "domains" / "ferry" / name
        path.write_text(path.read_text().replace("domain: airline", "domain: ferry").replace("id: airline/", "id: ferry/"))
    command = ("jlens", "--model", folder, "--lens", lens_file, "--framings", "honest", "--quick", "--scenarios", own)
    assert klb(*command, "--out", tmp_path / "out") == 0
    assert set(pd.read_csv(tmp_path / "out" / "margins.csv")["domain"]) == {"ferry"}
    cases = own / "domains" / "ferry" / "cases.yaml"
    cases.write_text(cases.read_text().replace("kind: owed", "kind: calibration", 1))
    capsys.readouterr()
    assert klb(*command, "--out", tmp_path / "bad") == 2
    error = capsys.readouterr().err
    assert str(cases) in error
    assert "entitled" in error
    assert not (tmp_path / "bad").exists()


def test_an_output_that_cannot_be_written_is_refused_before_any_work(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "x", "/proc/x"):
        assert klb("jlens", "--model", folder, "--lens", "logit", "--out", out) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert klb("fit", "--model", folder, "--out", tmp_path) == 2
    assert "is a folder" in capsys.readouterr().err


def test_public_cases_are_read_like_ours_without_pairs(folder, lens_file, tmp_path, capsys):
    public = Path(__file__).parents[1].parent / "shared" / "knownliebench"
    if not public.is_dir():
        pytest.skip(f"no public case data at {public}")
    out = tmp_path / "out"
    command = ("jlens", "--model", folder, "--lens", lens_file, "--cases", f"knownliebench:{public}", "--domains", "debt")
    assert klb(*command, "--quick", "--out", out) == 0
    summary = pd.read_csv(out / "summary.csv")
    assert "pair_accuracy" not in set(summary["statistic"])
    assert json.loads((out / "run.json").read_text())["counts"]["prompts"] == 4 * 2 * 2
    printed = capsys.readouterr().out
    assert "n = 4 cases" in printed
    assert "Pairs with owed" not in printed


def test_a_question_asked_one_way_is_reported_alone(folder, lens_file, tmp_path, capsys):
    out = tmp_path / "out"
    command = ("jlens", "--model", folder, "--lens", lens_file, "--domains", "debt", "--framings", "honest,secret")
    assert klb(*command, "--quick", "--questions", "reversed", "--out", out) == 0
    assert set(pd.read_csv(out / "summary.csv")["question"]) == {"reversed"}
    assert "Shows (reversed question)" in capsys.readouterr().out
    assert klb(*command, "--questions", "sideways", "--out", tmp_path / "no") == 2
    assert "unknown question wording sideways; known: plain, reversed" in capsys.readouterr().err


def test_a_framing_named_twice_counts_once(folder, lens_file, tmp_path):
    out = tmp_path / "out"
    command = ("jlens", "--model", folder, "--lens", lens_file, "--domains", "airline,airline", "--framings", "deny,deny")
    assert klb(*command, "--quick", "--out", out) == 0
    assert json.loads((out / "run.json").read_text())["counts"]["prompts"] == 4 * 2 * 2


def test_the_run_record_says_what_was_used(run, lens_file):
    record = json.loads((run / "run.json").read_text())
    assert record["complete"] is True
    assert record["lens"]["file"] == str(lens_file)
    assert record["last_block_max_error"] < 1e-3
    assert record["counts"] == {"prompts": 448, "pairs": 14, "domains": 1, "tokens": record["counts"]["tokens"]}
    assert record["arguments"]["domains"] == "airline"
    assert {"torch", "transformers", "klb-probe"} <= set(record["versions"])
    assert (run / "margins.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_name_n_and_both_sentences_are_there(run, folder, lens_file, capsys):
    assert klb("jlens", "--model", folder, "--lens", lens_file, "--domains", "airline", "--out", run, "--resume") == 0
    printed = capsys.readouterr().out
    assert "resuming  448 of 448" in printed
    for words in (
        "honest",
        "deny",
        "not owed",
        "n = 112 prompts, 14 pairs",
        "Shows (both wordings of the question as one):",
        "Does not show: belief or intent",
        "= own",
    ):
        assert words in printed


def test_an_interrupted_run_resumes_to_the_same_numbers(run, folder, lens_file, monkeypatch, capsys):
    from klb_probe.models import prefix

    out, calls, read = folder.parent / "interrupted", [], prefix._Walk.read

    def stop_half_way(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return read(*arguments)

    command = ("jlens", "--model", folder, "--lens", lens_file, "--domains", "airline", "--out", out)
    monkeypatch.setattr(prefix._Walk, "read", stop_half_way)
    assert klb(*command) == 130
    assert "--resume" in capsys.readouterr().err
    assert json.loads((out / "run.json").read_text())["complete"] is False
    assert klb(*command) == 2  # neither --resume nor --overwrite
    assert klb(*command, "--resume") == 0
    assert len(calls) > 8
    whole, resumed = pd.read_csv(run / "margins.csv"), pd.read_csv(out / "margins.csv")
    pd.testing.assert_frame_equal(whole, resumed, rtol=1e-4, atol=1e-5)
    assert klb(*command, "--framings", "honest", "--resume") == 2  # other prompts: not that run


def test_overwrite_keeps_what_is_not_ours(folder, lens_file):
    out = folder.parent / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("keep")
    command = ("jlens", "--model", folder, "--lens", "logit", "--framings", "neutral", "--domains", "deposit", "--out", out)
    assert klb(*command) == 2
    assert klb(*command, "--overwrite") == 0
    assert (out / "notes.txt").read_text() == "keep"
    margins = pd.read_csv(out / "margins.csv")
    assert set(margins["lens"]) == {"logit"}
    assert set(margins["framing"]) == {"neutral"}


def test_a_missing_lens_is_fitted_once_and_then_found(folder, tmp_path, monkeypatch, capsys):
    from klb_probe.lens import library

    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "_SPOT_PROMPTS", 3)
    monkeypatch.setattr(library, "_SPOT_TOKENS", 24)
    command = ("jlens", "--model", folder, "--framings", "honest", "--domains", "airline", "--quick")
    assert klb(*command, "--out", tmp_path / "first") == 0
    (cached,) = (tmp_path / "lenses").glob("*.safetensors")
    written = cached.stat().st_mtime_ns
    assert klb(*command, "--out", tmp_path / "second") == 0
    assert cached.stat().st_mtime_ns == written
    assert str(cached) in json.loads((tmp_path / "second" / "run.json").read_text())["lens"]["file"]


def test_a_fit_that_would_take_long_is_not_started_unasked(folder, tmp_path, monkeypatch, capsys):
    from klb_probe.lens import library

    monkeypatch.setenv("KLB_PROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(library, "UNASKED_FIT_SECONDS", 1e-9)
    monkeypatch.setattr(library, "_SPOT_TOKENS", 24)
    assert klb("jlens", "--model", folder, "--out", tmp_path / "out") == 2
    assert "--fit" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "lama-3.1-8b"], ["unknown model", "did you mean llama-3.1-8b", "smollm2-135m"]),
        (["--model", "./no/such/folder"], ["no such model folder"]),
        (["--framings", "honest,denied"], ["unknown framing denied", "incentive"]),
        (["--domains", "airlines"], ["unknown domain airlines", "deposit"]),
        (["--contrast", "Yes"], ["YES/NO pairs"]),
        (["--contrast", "Affirmatively/Negatively"], ["not a single token"]),
        (["--lens", "absent.safetensors"], ["no such lens file"]),
        (["--dtype", "float8"], ["unknown dtype", "bfloat16"]),
        (["--device", "tpu9"], ["device"]),
        (["--overwrite", "--resume"], ["not both"]),
    ],
)
def test_a_mistake_is_one_line_exit_2_and_nothing_written(folder, tmp_path, capsys, arguments, words):
    out = tmp_path / "out"
    model = [] if "--model" in arguments else ["--model", folder]
    assert klb("jlens", *model, "--out", out, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not out.exists()


def test_a_lens_of_another_model_is_refused_by_name(folder, lens_file, tmp_path, capsys):
    shipped = next(data_dir("lenses").glob("smollm2-135m*"))
    assert klb("jlens", "--model", folder, "--lens", shipped, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert "smollm2-135m" in error
    assert "width" in error
    assert not (tmp_path / "out").exists()


def test_help_works_without_importing_torch():
    code = "import sys, klb_probe.cli, klb_probe.jlens; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for module in ("klb_probe", "klb_probe.jlens"):
        done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "Usage" in done.stdout


def test_the_shipped_lens_is_the_default_models_and_well_fitted(smollm, yes_no):
    lens = load_lens(smollm, yes_no)
    assert lens.metadata.corpus.n_prompts >= 64
    assert lens.metadata.corpus.max_tokens == 128
    assert lens.metadata.source_layers == tuple(range(29))
    assert lens.metadata.command.startswith("klb-probe fit --model smollm2-135m")


def test_on_the_default_model_shared_margins_equal_plain_ones(smollm, yes_no):
    lens = load_lens(smollm, yes_no)
    margins = eligibility_margins(smollm, lens, domains=["debt"], framings=["honest"], quick=True)
    assert len(margins.ids) == 16
    assert margins.readouts.last_block_error < 1e-3
    assert margins.readouts.done.all()
    for index in range(0, len(margins.ids), 5):
        ids = margins.ids[index]
        residuals = smollm.residuals([ids], range(30), [-1])[:, 0, 0]
        plain = torch.stack([lens.margin(residual, layer) for layer, residual in enumerate(residuals)])
        torch.testing.assert_close(margins.readouts.margins[index, 0], plain, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            own = smollm.model(torch.tensor([ids])).logits[0, -1, yes_no.token_ids]
        assert abs(margins.readouts.own[index] - (own[0] - own[1])) < 1e-4
