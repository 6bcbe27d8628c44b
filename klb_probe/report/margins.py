"""A run of ``jlens``: margins by depth, of all domains and of each, and the pairs behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tqdm.auto import tqdm

from klb_probe.errors import KlbError
from klb_probe.plots import QUESTION_WORDS, framings_of, main_question
from klb_probe.report.data import Json, curve, lens_title, short
from klb_probe.report.pairs import pairs_view
from klb_probe.report.part import Part, View
from klb_probe.report.recognise import Output
from klb_probe.signals.report import DOES_NOT_SHOW, what_it_shows
from klb_probe.signals.summary import summarise

ALL = "all"
_SUMMARY = (
    *("lens", "layer", "statistic", "framing", "question", "entitled", "value", "low", "high", "n", "n_pairs"),
    "null_q95",
)
_KEYS = ["lens", "statistic", "framing", "question", "entitled"]
_LABELS = ["scenario", "pair", "domain", "entitled", "framing", "paraphrase", "question", "answer"]


@dataclass(frozen=True)
class Readings:
    """What a run read, prompt by prompt.

    Attributes:
        labels: One row a prompt, as in ``scenarios.jsonl``.
        texts: Each prompt.
        lenses: Their names.
        margins: ``[prompt, lens, layer]``.
        random: ``[prompt, lens, layer, row]``.
        own: ``[prompt]``.
    """

    labels: pd.DataFrame
    texts: list[str]
    lenses: list[str]
    margins: np.ndarray
    random: np.ndarray
    own: np.ndarray

    def summary(self, domain: str, *, seed: int) -> pd.DataFrame:
        """The statistics of one domain, by the code that makes ``summary.csv``."""
        here = (self.labels["domain"] == domain).to_numpy()
        arrays = (array[here].astype(float) for array in (self.margins, self.random, self.own))
        return summarise(self.labels[here], self.lenses, *arrays, seed=seed)


def read_readings(output: Output, lenses: list[str]) -> Readings:
    """The prompts of a run and what was read of them; KlbError if files are missing or do not go together."""
    prompts, tensors = output.path / "scenarios.jsonl", output.path / "readouts.safetensors"
    try:
        lines = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
        rows = pd.DataFrame(lines)[[*_LABELS, "prompt"]]
        arrays = load_file(tensors)
        margins, random, own = (arrays[name] for name in ("margins", "random", "own"))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise KlbError(f"{output.path}: its prompts or readouts cannot be read ({error}); run jlens again") from None
    if margins.shape[:2] != (len(rows), len(lenses)):
        raise KlbError(f"{output.path}: {prompts.name} and {tensors.name} are not of the same run; run jlens again")
    return Readings(rows[_LABELS], rows["prompt"].tolist(), lenses, margins, random, own)


def margins_part(output: Output) -> Part:
    """The part of a ``jlens`` run."""
    summary = output.table("summary.csv", _SUMMARY)
    summary["entitled"] = summary["entitled"].astype("boolean")
    lenses = list(dict.fromkeys(summary["lens"]))
    readings = read_readings(output, lenses)
    model = output.of("model", "name")
    domains = list(dict.fromkeys(readings.labels["domain"]))
    data = {
        "model": model,
        "lenses": [{"name": name, "title": lens_title(name)} for name in lenses],
        "framings": framings_of(summary),
        "questions": [{"name": name, "title": QUESTION_WORDS[name]} for name in dict.fromkeys(summary["question"].dropna())],
        "main": main_question(summary),
        "domains": [ALL, *(domains if len(domains) > 1 else [])],
        "last": int(summary["layer"].max()),
    }
    chunks = {ALL: list(series(summary))}
    for domain in tqdm(data["domains"][1:], desc="domains", unit="domain", disable=None):
        chunks[domain] = list(series(readings.summary(domain, seed=int(output.of("arguments", "seed")))))
    return Part(
        title=f"Margins of {model}",
        folder=str(output.path),
        facts=list(_facts(output)),
        tables=[_key_figures(summary, data)],
        says=[what_it_shows(summary, model)],
        limits=[DOES_NOT_SHOW],
        views=[
            View("margins", data, chunks),
            pairs_view(readings.labels, readings.texts, lenses, readings.margins, readings.own),
        ],
    )


def series(summary: pd.DataFrame) -> Iterator[dict[str, Json]]:
    """Every line that can be drawn of a summary: its keys, layers, values with intervals, null, and counts."""
    for keys, rows in summary.groupby(_KEYS, sort=False, dropna=False):
        named = {name: None if pd.isna(key) else key for name, key in zip(_KEYS, keys, strict=True)}
        if named["entitled"] is not None:
            named["entitled"] = bool(named["entitled"])
        line: dict[str, Any] = {**named, **curve(rows)}
        if rows["null_q95"].notna().any():
            line["null"] = short(rows["null_q95"])
        for name in ("n", "n_pairs"):
            line[name] = None if rows[name].isna().any() else int(rows[name].iloc[0])
        yield line


def lens_words(lens: dict[str, Any]) -> str:
    """The lens of a record, in a line."""
    if lens.get("name") == "logit":
        return "logit lens"
    corpus = lens.get("corpus") or {}
    fitted = f", fitted on {corpus['n_prompts']} prompts, {corpus['source']}" if corpus else ""
    return f"J-Lens ({lens['file']}{fitted}; sha256 {lens['sha256'][:12]})"


def contrast_words(contrast: list[list[list[Any]]]) -> str:
    """The tokens of a margin, in a line."""
    return ", ".join(f"{yes[0]!r} ({yes[-1]}) minus {no[0]!r} ({no[-1]})" for yes, no in contrast)


def _facts(output: Output) -> Iterator[tuple[str, str]]:
    counts, record = output.of("counts"), output.record
    yield "model", f"{output.of('model', 'name')}, {record['dtype']} on {record['device']}; {record['chat']}"
    yield "lens", lens_words(output.of("lens"))
    yield "contrast", contrast_words(output.of("contrast"))
    yield "n", f"{counts['prompts']} prompts, {counts['pairs']} pairs, {counts['domains']} domains"
    yield "last block", f"largest difference from the model's own margin {output.of('last_block_max_error'):.1e} logits"


def _key_figures(summary: pd.DataFrame, data: dict[str, Any]) -> dict[str, Json]:
    """At the last layer, the model's own margin: scores beside their null, and contrasts, a line a framing."""
    last = summary[(summary["layer"] == data["last"]) & (summary["lens"] == data["lenses"][0]["name"])]
    last = last[last["question"] == data["main"]]
    names = {
        "auroc": "AUROC of entitlement",
        "pair_accuracy": "pairs in the right order",
        "entitlement_contrast": "owed − not owed (logits)",
    }
    names = {name: title for name, title in names.items() if (last["statistic"] == name).any()}
    rows = []
    for framing in data["framings"]:
        here = last[last["framing"] == framing].set_index("statistic")
        cells = [_with_interval(here.loc[name]) for name in names]
        rows.append([framing, *cells, f"{here.loc['auroc', 'n']:.0f} / {here.loc['auroc', 'n_pairs']:.0f}"])
    wording = QUESTION_WORDS[data["main"]]
    title = f"The model's own margin (last layer), {wording}: value [95 % interval] | 95 % of random readouts stay below"
    return {"title": title, "columns": ["framing", *names.values(), "n prompts / pairs"], "rows": rows}


def _with_interval(line: pd.Series) -> str:
    if pd.isna(line["value"]):
        return ""
    form = "+.3f" if line.name.endswith("contrast") else ".2f"
    shown = f"{line['value']:{form}} [{line['low']:{form}}, {line['high']:{form}}]"
    return shown if pd.isna(line["null_q95"]) else f"{shown} | {line['null_q95']:.2f}"
