"""Figures. Each takes a table that is also written to a file, so that any figure can be drawn again."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from klb_probe.figure import Figure

LENS_TITLES = {
    "margin": "J-Lens",
    "logit": "logit lens (twin)",
    "permuted": "control: rows of J permuted",
    "random transport": "control: random J, same spectrum",
    "random pairs": "control: random token pairs",
    "shuffled text": "control: lens of shuffled text",
}
_SCORES = {"auroc": "AUROC of entitlement", "pair_accuracy": "pairs with owed above its twin"}
# Okabe-Ito colours, distinguishable by people with colour blindness; the line style carries the entitlement.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_DIFFERENCES = ("#666666", "#56B4E9", "#E69F00")


QUESTION_WORDS = {
    "plain": "plain question",
    "reversed": "reversed question",
    "both": "both wordings of the question as one",
}


def main_question(summary: pd.DataFrame) -> str:
    """The wording whose scores stand for a run: both as one, where it has both."""
    questions = list(dict.fromkeys(summary.loc[summary["statistic"] == "auroc", "question"]))
    return "both" if "both" in questions else questions[0]


def framings_of(summary: pd.DataFrame) -> list[str]:
    """The framings of a summary, in order."""
    return list(dict.fromkeys(summary.loc[summary["statistic"] == "auroc", "framing"]))


def margins_by_depth(summary: pd.DataFrame, model: str, contrast: str) -> Figure:
    """By lens and layer: margin (one line a framing x entitlement; a row a wording of the question), its contrasts, AUROC
    of entitlement, pair accuracy.

    Contrasts and scores are of the margin toward owed, both wordings as one where a run has both. Bands are 95 % bootstrap
    intervals over pairs; crosses at the last layer mark the model's own margin; dotted lines under a score hold 95 % of the
    lens's random readouts between them.
    """
    lenses = list(dict.fromkeys(summary["lens"]))
    framings = framings_of(summary)
    colours = dict(zip(framings, _COLOURS * len(framings), strict=False))
    shares = summary[summary["statistic"] == "identity_share"]
    main = main_question(summary)
    scores = [name for name in _SCORES if (summary["statistic"] == name).any()]
    questions = list(dict.fromkeys(summary.loc[summary["statistic"] == "mean_margin", "question"]))
    # Only a run with controls has identity shares.
    titles = [f"yes-minus-no margin (logits),\n{QUESTION_WORDS[question]}" for question in questions]
    titles += ["contrast of margins toward owed (logits)", *(_SCORES[name] for name in scores)]
    titles += ["agreement with final sign; tr(J)/d"] * bool(len(shares))
    figure = Figure(figsize=(5.6 * len(lenses) + 1, 3.1 * len(titles)), layout="constrained")
    axes = figure.subplots(len(titles), len(lenses), squeeze=False, sharex=True, sharey="row")
    for column, lens in enumerate(lenses):
        table = summary[summary["lens"] == lens]
        rows = iter(axes[:, column])
        for question in questions:
            _draw_margins(next(rows), table[table["question"] == question], framings, colours)
        here = table[table["question"] == main]
        _draw_contrasts(next(rows), here, colours)
        for name in scores:
            _draw_score(next(rows), here, name, framings, colours)
        if len(shares):
            _draw_agreement(next(rows), pd.concat([here, table[table["statistic"] == "identity_share"]]), framings, colours)
        axes[0, column].set_title(LENS_TITLES[lens])
        axes[-1, column].set_xlabel("layer (output of block)")
    for row, title in zip(axes, titles, strict=True):
        row[0].set_ylabel(title)
        row[0].legend(fontsize=8, frameon=False)
        if title in _SCORES.values():
            row[0].set_ylim(0, 1)
    counts = summary[(summary["statistic"] == "auroc") & (summary["question"] == main)].iloc[0]
    each = ", each in two wordings" if main == "both" else ""
    paired = summary.loc[(summary["statistic"] == "pair_accuracy") & (summary["question"] == main), "n_pairs"].max()
    units = "pairs of a case and its twin" if paired == counts["n_pairs"] else "cases"
    units += f" ({paired} with a twin)" if units == "cases" and "pair_accuracy" in scores else ""
    figure.suptitle(
        f"{model}: {contrast}\n{counts['n_pairs']} {units}, {counts['n']} prompts a framing{each}; contrasts and scores: "
        f"{QUESTION_WORDS[main]}; bands: 95 % bootstrap over {units.split()[0]}",
        fontsize=10,
    )
    return figure


def models_side_by_side(summaries: Mapping[str, pd.DataFrame], lens: str) -> Figure:
    """A column a model, through one lens: margin by depth (one line a framing x entitlement), and AUROC of entitlement.

    Args:
        summaries: ``summary.csv`` of each model's run, over the same prompts.
        lens: Of LENS_TITLES.
    """
    figure = Figure(figsize=(4.6 * len(summaries) + 1, 6.6), layout="constrained")
    axes = figure.subplots(2, len(summaries), squeeze=False, sharex="col", sharey="row")
    for column, (name, summary) in zip(axes.T, summaries.items(), strict=True):
        table, main = summary[summary["lens"] == lens], main_question(summary)
        framings = framings_of(summary)
        colours = dict(zip(framings, _COLOURS * len(framings), strict=False))
        _draw_margins(column[0], table[table["question"] == "plain"], framings, colours)
        _draw_score(column[1], table[table["question"] == main], "auroc", framings, colours)
        counts = table[(table["statistic"] == "auroc") & (table["question"] == main)].iloc[0]
        column[0].set_title(f"{name}\n{counts['n_pairs']} pairs, {counts['n']} prompts a framing", fontsize=10)
        column[1].set(xlabel="layer (output of block)", ylim=(0, 1))
    axes[0, 0].set_ylabel("yes-minus-no margin (logits),\nplain question")
    axes[1, 0].set_ylabel(f"AUROC of entitlement,\n{QUESTION_WORDS[main]}")
    for row in axes:
        row[-1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{LENS_TITLES[lens]}; bands: 95 % bootstrap over pairs", fontsize=10)
    return figure


def _draw_margins(axis: Axes, table: pd.DataFrame, framings: list[str], colours: dict[str, str]) -> None:
    means = table[table["statistic"] == "mean_margin"]
    for framing in framings:
        for entitled, style in ((True, "-"), (False, "--")):
            line = means[(means["framing"] == framing) & (means["entitled"] == entitled)]
            _draw_line(axis, line, colours[framing], f"{framing}, {owed_words(entitled)}", style)
            last = line.iloc[-1]
            own = "model's own margin" if (framing, entitled) == (framings[-1], False) else None
            axis.plot(last["layer"], last["value"], "x", color="black", ms=7, label=own, zorder=5)
    axis.axhline(0, color="black", lw=0.6)


def _draw_contrasts(axis: Axes, table: pd.DataFrame, colours: dict[str, str]) -> None:
    for framing, line in table[table["statistic"] == "entitlement_contrast"].groupby("framing", sort=False):
        _draw_line(axis, line, colours[framing], f"owed minus not owed, {framing}")
    moved = table[table["statistic"] == "framing_contrast"]
    for number, (name, lines) in enumerate(moved.groupby("framing", sort=False)):
        for entitled, style in ((True, "-."), (False, ":")):
            line = lines[lines["entitled"] == entitled]
            _draw_line(axis, line, _DIFFERENCES[number % len(_DIFFERENCES)], f"{name}, {owed_words(entitled)}", style)
    axis.axhline(0, color="black", lw=0.6)


def _draw_score(axis: Axes, table: pd.DataFrame, statistic: str, framings: list[str], colours: dict[str, str]) -> None:
    scores = table[table["statistic"] == statistic]
    for framing in framings:
        line = scores[scores["framing"] == framing]
        for edge, label in ((line["null_q95"], f"95 % of random readouts, {framing}"), (1 - line["null_q95"], None)):
            axis.plot(line["layer"], edge, ":", color=colours[framing], lw=1, label=label)
        _draw_line(axis, line, colours[framing], framing)
    axis.axhline(0.5, color="black", lw=0.6)


def _draw_agreement(axis: Axes, table: pd.DataFrame, framings: list[str], colours: dict[str, str]) -> None:
    for framing in framings:
        line = table[(table["statistic"] == "agreement") & (table["framing"] == framing)]
        _draw_line(axis, line, colours[framing], f"agreement, {framing}")
    share = table[table["statistic"] == "identity_share"]
    if len(share):
        axis.plot(share["layer"], share["value"], ":", color="black", lw=1.6, label="identity share tr(J)/d")


def _draw_line(axis: Axes, line: pd.DataFrame, colour: str, label: str, style: str = "-") -> None:
    axis.plot(line["layer"], line["value"], style, color=colour, label=label, lw=1.6)
    axis.fill_between(line["layer"], line["low"], line["high"], color=colour, alpha=0.15, lw=0)


def owed_words(entitled: bool) -> str:
    """How an entitlement is named in figures and tables."""
    return "owed" if entitled else "not owed"
