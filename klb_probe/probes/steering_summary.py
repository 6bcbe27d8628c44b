"""What interventions do on average, beside random directions; and the same in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from rich.table import Table

from klb_probe.probes.steering import ABLATE, PROBE, RANDOM
from klb_probe.probes.steering_passes import AT_ANSWER, PLACES
from klb_probe.signals.statistics import LEVEL, Estimate, PairBootstrap

ALL = "all"
NONE = "none"
OWED, RAW, SIGN, OTHER = "toward_owed_change", "yes_minus_no_change", "changed_sign", "other"
OWED_BEFORE, RAW_BEFORE = "toward_owed", "yes_minus_no"

_DOES_NOT_SHOW = (
    "Does not show: that the direction is one of knowledge or deceit. A direction that moves the answer may be one of the "
    "words yes and no, of refusing, or of tone; what moves both wordings of a question toward yes is a taste for yes and "
    "cancels in the margin toward owed. Random directions are a low bar, as residuals hardly vary along most of them, and p "
    "is not corrected for the number of doses. A large dose breaks a model: read it with the share of prompts whose likeliest "
    "next token is neither yes nor no, and with the random directions at that dose."
)
_ONLY_THERE = (
    " Only the last prompt token is changed: later blocks still read the tokens before it as they were, so a small effect does "
    "not rule out that the direction matters there (--at all)."
)


def steering_summary(effects: pd.DataFrame, *, seed: int = 0) -> pd.DataFrame:
    """Mean effects by framing, direction, mode and dose.

    Args:
        effects: What :func:`~klb_probe.probes.steering.steering_effects` gives, with the columns pair, framing and question
            (``plain`` or ``reversed``) of each prompt.
        seed: Of the bootstrap over pairs.

    Returns:
        One row a framing (and ``all``, if there are several), direction, mode, dose and statistic; value, low, high, p_random,
        n (prompts), n_pairs, n_directions. Direction ``none`` holds the mean margins without intervention (``toward_owed``,
        ``yes_minus_no``), a probe direction what becomes of them (``toward_owed_change``: sign flipped for the reversed
        wording; ``yes_minus_no_change``; ``changed_sign``: share of prompts whose margin changed sign), each with its 95 %
        bootstrap interval; direction ``random`` has the median over the random directions, and low and high hold 95 % of them
        between them. ``other`` is the share of prompts whose likeliest next token is neither yes nor no. ``p_random``: the
        share of random directions (plus one, of all plus one) whose absolute value is at least the probe's.
    """
    keys = ["direction", "kind", "mode", "dose"]
    planned = effects[keys].drop_duplicates(ignore_index=True)
    number = effects.groupby(keys, dropna=False, sort=False).ngroup()
    prompts = effects.drop_duplicates("prompt").sort_values("prompt")

    def matrix(name: str) -> np.ndarray:
        """``[prompt, intervention]``."""
        return effects.assign(number=number).pivot(index="prompt", columns="number", values=name).to_numpy(float)

    margin, before = matrix("margin"), prompts["baseline"].to_numpy()[:, None]
    toward = np.where(prompts["question"] == "plain", 1, -1)[:, None]
    changes = {
        OWED: toward * (margin - before),
        RAW: margin - before,
        SIGN: (np.sign(margin) != np.sign(before)).astype(float),
        OTHER: matrix("other"),
    }
    baseline = {OWED_BEFORE: toward * before, RAW_BEFORE: before, OTHER: prompts["baseline_other"].to_numpy(float)[:, None]}
    bootstrap = PairBootstrap(prompts["pair"].to_numpy(), seed=seed)
    framings = list(dict.fromkeys(prompts["framing"]))
    nothing = pd.DataFrame([(NONE, NONE, NONE, 0.0)], columns=keys)
    rows: list[dict] = []
    for framing in [*framings, *([ALL] if len(framings) > 1 else [])]:
        chosen = np.ones(len(prompts), bool) if framing == ALL else (prompts["framing"] == framing).to_numpy()
        for plan, statistics in ((nothing, baseline), (planned, changes)):
            for statistic, values in statistics.items():
                estimate = bootstrap.mean(values, chosen)
                counts = {"n": estimate.n, "n_pairs": estimate.n_pairs}
                rows += [
                    {"framing": framing, **row, "statistic": statistic, **counts}
                    for row in _rows(plan, estimate, ranked=statistic in (OWED, RAW, SIGN))
                ]
    columns = ["framing", "direction", "mode", "dose", "statistic", "value", "low", "high", "p_random", "n", "n_pairs"]
    return pd.DataFrame(rows)[[*columns, "n_directions"]]


def _rows(plan: pd.DataFrame, estimate: Estimate, *, ranked: bool) -> Iterator[dict]:
    tail = (1 - LEVEL) / 2
    for (mode, dose), here in plan.groupby(["mode", "dose"], dropna=False, sort=False):
        what, random = {"mode": mode, "dose": dose}, estimate.value[here.index[here["kind"] == RANDOM]]
        for at, row in here[here["kind"] != RANDOM].iterrows():
            value = estimate.value[at]
            low, high = (estimate.low[at], estimate.high[at]) if estimate.n_pairs > 1 else (np.nan, np.nan)
            beyond = (np.abs(random) >= abs(value)).sum()
            p = (1 + beyond) / (1 + len(random)) if ranked and len(random) else np.nan
            found = {"value": value, "low": low, "high": high, "p_random": p}
            yield {"direction": row["direction"], **what, **found, "n_directions": 1}
        if len(random):
            low, median, high = np.quantile(random, [tail, 0.5, 1 - tail])
            found = {"value": median, "low": low, "high": high, "p_random": np.nan}
            yield {"direction": RANDOM, **what, **found, "n_directions": len(random)}


def table(summary: pd.DataFrame) -> Table:
    """A line a framing and change of the probe direction, beside the random directions."""
    printed = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    printed.add_column("framing", no_wrap=True)
    beside = ("random\n95 %", "p")
    titles = ["change", "toward owed\n[95 %]", *beside, "yes minus no\n[95 %]", *beside]
    for title in (*titles, "sign changed\n(random)", "neither\n(random)"):
        printed.add_column(title, justify="right", no_wrap=True)
    for framing in _framings(summary):
        here = summary[summary["framing"] == framing]
        none = here[here["direction"] == NONE].set_index("statistic")
        before = [[_interval(none.loc[name]), "", ""] for name in (OWED_BEFORE, RAW_BEFORE)]
        printed.add_row(framing, "none: margin", *before[0], *before[1], "", f"{none.loc[OTHER, 'value']:.2f}")
        for (mode, dose), lines in here[here["direction"] != NONE].groupby(["mode", "dose"], dropna=False, sort=False):
            probe, random = (lines[lines["direction"] == name].set_index("statistic") for name in (PROBE, RANDOM))
            cells = []
            for name in (OWED, RAW):
                band = f"[{random.loc[name, 'low']:+.2f}, {random.loc[name, 'high']:+.2f}]"
                cells += [_interval(probe.loc[name]), band, f"{probe.loc[name, 'p_random']:.2f}"]
            shares = [f"{probe.loc[name, 'value']:.2f} ({random.loc[name, 'value']:.2f})" for name in (SIGN, OTHER)]
            printed.add_row("", change_name(mode, dose), *cells, *shares)
    return printed


def does_not_show(at: str) -> str:
    """What a reader might take from the numbers and should not."""
    return _DOES_NOT_SHOW + (_ONLY_THERE if at == AT_ANSWER else "")


def what_it_shows(summary: pd.DataFrame, at: str) -> str:
    """One sentence of the numbers, chosen without regard to their size."""
    parts = []
    for framing in _framings(summary):
        probe = summary[(summary["framing"] == framing) & (summary["direction"] == PROBE)]
        random = summary[(summary["framing"] == framing) & (summary["direction"] == RANDOM)]
        least = 1 / (1 + random["n_directions"].max())
        owed, raw = (probe[probe["statistic"] == name] for name in (OWED, RAW))
        most = owed.loc[owed["value"].abs().idxmax()]
        band = random[(random["statistic"] == OWED) & (random["mode"] == most["mode"])]
        band = band[(band["dose"] == most["dose"]) | (band["mode"] == ABLATE)].iloc[0]
        counts = [int(np.isclose(lines["p_random"], least).sum()) for lines in (owed, raw)]
        parts.append(
            f"{framing}, in {counts[0]} of {len(owed)} changes the probe direction moves the margin toward owed further than "
            f"every random one, and the yes-minus-no margin in {counts[1]}; furthest toward or away from owed with "
            f"{change_name(most['mode'], most['dose'])}: {_interval(most)} (random [{band['low']:+.2f}, {band['high']:+.2f}])"
        )
    n = summary["n_directions"].max()
    prompts, pairs = summary["n"].max(), summary["n_pairs"].max()
    return (
        f"Shows: {'; '.join(parts)}. Changes are in logits; add: in mean residual norms of the layer, {PLACES[at]}; "
        f"{prompts} prompts, {pairs} pairs, {n} random directions (smallest possible p: {1 / (n + 1):.2f})."
    )


def change_name(mode: str, dose: float) -> str:
    """An intervention in a word: ``add +0.1``, ``ablate``."""
    return mode if mode == ABLATE else f"{mode} {dose:+g}"


def _framings(summary: pd.DataFrame) -> list[str]:
    """Each framing; the pooled rows are for the file."""
    names = list(dict.fromkeys(summary["framing"]))
    return [name for name in names if name != ALL]


def _interval(line: pd.Series) -> str:
    return f"{line['value']:+.2f} [{line['low']:+.2f}, {line['high']:+.2f}]"
