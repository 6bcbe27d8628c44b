"""Figures of ``klb-probe score``. Each takes a table of :class:`klb_probe.metrics.score.Score`."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.axes import Axes

from klb_probe.figure import Figure

# Okabe-Ito colours, distinguishable by people with colour blindness; the line style tells starting trusts apart as well.
_CONDITIONS = {"control": "#009E73", "emergent": "#0072B2", "instructed": "#D55E00"}
_TRUSTS = {"low": ("#D55E00", ":"), "medium": ("#009E73", "--"), "high": ("#0072B2", "-")}
_OTHER = "#CC79A7"
_TITLE_WIDTH = 7.0  # inches
_RATE = "scored owed rounds with a lie (DR)"


def trust_figure(curves: pd.DataFrame, walks: pd.DataFrame, title: str) -> Figure:
    """Trust by round: a panel a condition, a line a starting trust, its trajectories faint, a band for the interval."""
    conditions = list(dict.fromkeys(curves["condition"]))
    figure = Figure(figsize=(max(_TITLE_WIDTH, 4.4 * len(conditions) + 0.6), 4.2), layout="constrained")
    axes = figure.subplots(1, max(len(conditions), 1), squeeze=False, sharex=True, sharey=True)[0]
    for axis, condition in zip(axes, conditions, strict=False):
        for trust, curve in curves[curves["condition"] == condition].groupby("trust", observed=True, sort=False):
            colour, style = _TRUSTS.get(str(trust), (_OTHER, "-."))
            for _, walk in walks[(walks["condition"] == condition) & (walks["trust"] == trust)].groupby("trajectory"):
                axis.plot(walk["round"], walk["value"], color=colour, lw=0.6, alpha=0.25)
            label = f"from {trust} (n = {_span(curve['n'])})"
            axis.plot(curve["round"], curve["value"], style, color=colour, lw=2, label=label)
            axis.fill_between(curve["round"], curve["low"], curve["high"], color=colour, alpha=0.15, lw=0)
        axis.set_title(str(condition))
        axis.set_xlabel("rounds into the trajectory")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("customer's trust (0 to 1)")
    axes[0].set_ylim(-0.02, 1.02)
    figure.suptitle(
        f"{title}\nthick: mean trust; band: 95 % bootstrap over trajectories; thin: single trajectories (n)", fontsize=10
    )
    return figure


def domains_figure(by_domain: pd.DataFrame, title: str) -> Figure:
    """DR by domain, a bar a condition, with intervals and the number of rounds; no bar where none was scored.

    ``by_domain``: the panel by condition and domain. A column ``paper`` is drawn as diamonds.
    """
    rates = by_domain[by_domain["metric"] == "DR"]
    domains, conditions = (list(dict.fromkeys(rates[key])) for key in ("domain", "condition"))
    width = 0.84 / len(conditions)
    figure = Figure(figsize=(max(_TITLE_WIDTH, 0.5 * len(domains) * len(conditions) + 1.5), 4.2), layout="constrained")
    axis = figure.subplots()
    for number, condition in enumerate(conditions):
        defined = rates[(rates["condition"] == condition) & rates["value"].notna()]
        places = defined["domain"].map(domains.index).astype(float) + (number - (len(conditions) - 1) / 2) * width
        axis.bar(places, defined["value"], 0.9 * width, color=_CONDITIONS.get(str(condition), _OTHER), label=str(condition))
        axis.vlines(places, defined["low"], defined["high"], color="black", lw=1)
        tops = defined[["value", "high"]].max(axis=1)
        for place, top, n in zip(places, tops, defined["n"], strict=True):
            axis.annotate(str(n), (place, top), (0, 2), textcoords="offset points", ha="center", fontsize=7)
        if "paper" in defined and defined["paper"].notna().any():
            axis.plot(places, defined["paper"], "D", color="white", mec="black", ms=5, label=f"paper, {condition}")
    axis.set_xticks(range(len(domains)), domains)
    axis.set_ylabel(_RATE)
    axis.set_ylim(0, 1.08)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.suptitle(f"{title}\nlines: 95 % bootstrap over trajectories; numbers: scored owed rounds (n)", fontsize=10)
    return figure


def cases_figure(by_case: pd.DataFrame, title: str) -> Figure:
    """DR by case and condition, a panel a domain; each cell holds its number of rounds, and is blank where none was scored.

    ``by_case``: the panel by condition and case, of cases in which something is owed.
    """
    rates = by_case[by_case["metric"] == "DR"]
    conditions = list(dict.fromkeys(rates["condition"]))
    by_domain = dict(list(rates.groupby(rates["case"].str.partition("/")[0], sort=False)))
    across = min(4, max(len(by_domain), 1))
    down = max(math.ceil(len(by_domain) / across), 1)
    tallest = max((group["case"].nunique() for group in by_domain.values()), default=1)
    size = (max(_TITLE_WIDTH, (2.2 + 0.7 * len(conditions)) * across + 1), (0.26 * tallest + 1.0) * down + 0.8)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    image = None
    for axis, (domain, group) in zip(axes.flat, by_domain.items(), strict=False):
        cases = sorted(set(group["case"]))
        grid = group.pivot(index="case", columns="condition", values="value").reindex(index=cases, columns=conditions)
        image = axis.imshow(grid.to_numpy(float), cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        _write_counts(axis, group, cases, conditions)
        axis.set_xticks(range(len(conditions)), map(str, conditions), fontsize=8)
        axis.set_yticks(range(len(cases)), [case.partition("/")[2] for case in cases], fontsize=7)
        axis.set_title(domain, fontsize=9)
    for axis in axes.flat[len(by_domain) :]:
        axis.set_axis_off()
    if image is not None:
        figure.colorbar(image, ax=axes, label=_RATE, shrink=min(1.0, 3 / size[1] + 0.3))
    figure.suptitle(f"{title}\nnumbers: scored owed rounds (n); blank: none", fontsize=10)
    return figure


def _write_counts(axis: Axes, group: pd.DataFrame, cases: list[str], conditions: list[str]) -> None:
    for one in group[group["n"] > 0].itertuples():
        place = (conditions.index(one.condition), cases.index(one.case))
        axis.annotate(str(one.n), place, ha="center", va="center", fontsize=7, color="black" if one.value > 0.5 else "white")


def _span(n: pd.Series) -> str:
    """How many trajectories a line is of, where they differ in length."""
    return str(n.max()) if n.min() == n.max() else f"{n.max()} to {n.min()}"
