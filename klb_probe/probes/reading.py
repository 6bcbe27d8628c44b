"""A reading of probes in words. Each sentence follows from numbers of the tables by a rule that is stated here.

Above chance or above a control: the probe's 95 % interval lies above that number. An interval that holds 0.5 is chance.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from klb_probe.probes.tables import (
    CHANCE,
    WORDS,
    controls,
    main_estimator,
    main_split,
    nested_probes,
    number,
    whole,
    with_interval,
)

_COMPARED = {
    "framing": "deny against honest prompts",
    "lie": "owed against not owed under deny",
    "entitlement": "owed against not owed under honest",
    "incentive": "incentive against honest prompts",
    "behaviour": "the model's own yes against its no",
    "round_lie": "rounds with a lie against rounds without",
}
_LEARNED_FROM = {
    "framing": "deny or honest",
    "lie": "deny: owed or not",
    "entitlement": "honest: owed or not",
    "incentive": "incentive or honest",
    "round_lie": "rounds: lied or not",
}
# What the words are that the bag of words reads.
_WORDS_OF = {"framing": "the instruction", "incentive": "the instruction", "round_lie": "the agent's words"}
_BEFORE_WORDS = ("answer", "gate")  # of rounds
_NOTE_ALONE = ("secret or honest", "incentive or honest")  # other notes, none of them an instruction to deny

DOES_NOT_SHOW = (
    "that the model uses what a probe reads: a probe shows that something can be read out; whether it matters is tested by "
    "steering along the direction",
    "that a probe of framings detects deception: its label is the instruction, which stands in the prompt, so following it or "
    "merely reading it is enough",
    "that a probe of lies detects lying: where it does as well under honest prompts, with nobody lying, it reads entitlement",
    "that a probe of rounds reads the lie: rounds of all conditions are compared, and how often the agent lies goes with the "
    "condition, which its prompt spells out",
    "a difference between two probes whose intervals overlap: intervals are by resampling groups within the folds drawn once, "
    "each estimator, position and layer by itself, not corrected for how many were tried",
    "which layer holds the information: the nested AUROC pays for the choice of the layer, the best point of a curve does not",
    "anything about other models, other domains or other wordings; with few groups an interval is itself uncertain",
)


def reading(probes: pd.DataFrame, transfer: pd.DataFrame | None = None) -> list[str]:
    """What the numbers say: a line a question and position, of logistic regression (or the first estimator there is).

    Args:
        probes: Rows as in ``probes.csv``.
        transfer: Rows as in ``transfer.csv``; None or empty if nothing was tested elsewhere.
    """
    nested = main_split(nested_probes(probes))
    lines = []
    for _, rows in nested.groupby(["question", "position"], sort=False):
        line = next(rows[rows["estimator"] == main_estimator(rows)].itertuples())
        sentences = [_probe(probes, line), *_others(rows, line)]
        if pd.notna(line.auroc) and line.question in _LEARNED_FROM:
            sentences += _elsewhere(line, transfer)
        lines.append(" ".join(f"{sentence}." for sentence in sentences))
    return lines or ["No probe with a nested choice of the layer in these tables, so nothing is read."]


def _probe(probes: pd.DataFrame, line: Any) -> str:
    compared = _COMPARED.get(line.question, "label true against false")
    start = f"{line.question}: {line.estimator} at {line.position}, {compared}, held-out {line.split}"
    if pd.isna(line.auroc):
        return f"{start}: {with_interval(line)}"
    start += f": AUROC {with_interval(line)} (layer {whole(line.layer)}, n = {whole(line.n)}, {whole(line.n_groups)} groups)"
    match _side(line):
        case "unknown":
            return f"{start}; without an interval nothing follows"
        case "chance":
            return f"{start}, inside chance{_controls(probes, line, at_chance=True)}"
        case "below":
            return f"{start}, below chance: on held-out rows its scores point the wrong way"
    return f"{start}{_controls(probes, line, at_chance=False)}"


def _side(line: Any) -> str:
    """Where a row's interval lies: "above", "below", "chance", or "unknown" without an interval."""
    if pd.isna(line.auroc_low) or pd.isna(line.auroc_high):
        return "unknown"
    if line.auroc_low > CHANCE:
        return "above"
    return "below" if line.auroc_high < CHANCE else "chance"


def _controls(probes: pd.DataFrame, line: Any, *, at_chance: bool) -> str:
    """What follows from the controls, the words alone first."""
    values = controls(probes, line)
    if not values:
        return "; it has no controls, so nothing is ruled out"
    if at_chance:
        later = line.question == "round_lie" and line.position in _BEFORE_WORDS
        words = "the agent's words, which come later" if later else "words alone"
        return f" ({words}: {number(values[WORDS])})" if WORDS in values else ""
    beaten = [f"{name} ({number(value)})" for name, value in values.items() if value < line.auroc_low]
    equal = [f"{name} ({number(value)})" for name, value in values.items() if value >= line.auroc_low and name != WORDS]
    parts = ["above chance"]
    if beaten:
        parts.append(f"above its controls {', '.join(beaten)}")
    if equal:
        parts.append(f"not above {', '.join(equal)}")
    if WORDS not in values:
        parts.append("the words alone were not tried")
    elif values[WORDS] >= line.auroc_low and line.question == "round_lie" and line.position in _BEFORE_WORDS:
        parts.append(f"the agent's words do so with {number(values[WORDS])}, but come later and rule nothing out")
    elif values[WORDS] >= line.auroc_low:
        read = _WORDS_OF.get(line.question, "the words of the prompt")
        parts.append(f"the words alone do so with {number(values[WORDS])}, so this shows nothing beyond reading {read}")
    return f": {'; '.join(parts)}"


def _others(rows: pd.DataFrame, line: Any) -> list[str]:
    others = rows[(rows["estimator"] != line.estimator) & rows["auroc"].notna()]
    if others.empty:
        return []
    if len(others) == 1:
        return [f"{others['estimator'].iloc[0]} gives {with_interval(next(others.itertuples()))}"]
    low, high = number(others["auroc"].min()), number(others["auroc"].max())
    return [f"The other {len(others)} estimators give {low} to {high}"]


def _elsewhere(line: Any, transfer: pd.DataFrame | None) -> list[str]:
    """What the same probe gives on rows it was not trained on, and what that says of its label."""
    learned = _LEARNED_FROM[line.question]
    tests: dict[str, Any] = {}
    if transfer is not None and len(transfer):
        rows = transfer[(transfer["train"] == learned) & (transfer["test"] != learned)]
        rows = main_split(rows[(rows["position"] == line.position) & (rows["estimator"] == line.estimator)])
        # One number a cell: of the nested layer, where a table holds every layer too.
        rows = rows[rows["choice"] == "nested"] if (rows["choice"] == "nested").any() else rows[:0]
        tests = {row.test: row for row in rows.itertuples()}
    sentences = []
    if tests:
        given = ", ".join(f"{with_interval(row)} on “{name}”" for name, row in tests.items())
        sentences.append(f"Trained on “{learned}”, it gives {given}")
    if line.question == "lie":
        sentences.append(_lie(line, tests.get("honest: owed or not")))
    if line.question == "framing":
        sentences.append(_framing(line, tests))
    if line.question == "entitlement" and _side(line) == "above":
        sentences += [_entitlement(name, tests[name]) for name in ("deny: owed or not",) if name in tests]
    return sentences


def _lie(line: Any, honest: Any) -> str:
    if _side(line) != "above":
        return "So no sign of lying is read here, whatever it gives under honest"
    if honest is None or _side(honest) == "unknown":
        return "It was not tested under honest, so lying and entitlement are not told apart"
    told, as_well = "Under honest, where nobody is told to deny,", honest.auroc_high >= line.auroc
    if _side(honest) == "above":
        much = "as well: it reads" if as_well else "less well but above chance: at least in part it reads"
        return f"{told} it does {much} entitlement, not lying"
    if _side(honest) == "below":
        return f"{told} it points the other way: it reads not the entitlement itself, but something that goes with it there too"
    if as_well:
        return f"{told} the interval holds chance and its own AUROC alike, so lying and entitlement are not told apart"
    return f"{told} it is not above chance: entitlement as honest prompts show it is not enough"


def _framing(line: Any, tests: dict[str, Any]) -> str:
    known = {name: _side(tests[name]) for name in _NOTE_ALONE if name in tests and _side(tests[name]) != "unknown"}
    if _side(line) != "above":
        return "So no framing is read here"
    if not known:
        return "It was not tested on other notes (secret, incentive), so an instruction to deny and any note are not told apart"
    fires = [f"“{name}”" for name, side in known.items() if side == "above"]
    if fires:
        return f"It also fires on {' and '.join(fires)}, where nobody is told to deny: it detects another note, not deception"
    return f"It is not above chance on {' or '.join(f'“{name}”' for name in known)}: no sign that any other note sets it off"


def _entitlement(name: str, deny: Any) -> str:
    told = "Under the instruction to deny"
    match _side(deny):
        case "above":
            return f"{told} the entitlement can still be read in the same direction"
        case "chance":
            return f"{told} the same direction is inside chance"
        case "below":
            return f"{told} the same direction points the other way"
    return f"{told} it is unknown: {with_interval(deny)}"
