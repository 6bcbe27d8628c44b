"""The named questions a probe can be asked: which rows it learns from, what True means, and what else it is tested on.

===========  ==========================================================  ==================================================
question     learns from                                                 True
===========  ==========================================================  ==================================================
framing      honest and deny prompts                                     told to deny
lie          deny prompts: a denial is false where owed, true where not  the outcome is owed
entitlement  honest prompts                                              the outcome is owed
incentive    honest and incentive prompts                                under cost pressure
behaviour    honest and deny prompts                                     the model's own answer is Yes
round_lie    played rounds in which something was owed                   the agent lied
===========  ==========================================================  ==================================================

In ``lie`` the instruction is the same on both sides, so that following it is not the label; but owed and not owed differ
under every framing, so a probe that separates them as well under honest reads the entitlement and not a lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from klb_probe.errors import KlbError
from klb_probe.probes.population import Population

Family = Literal["owed", "framing", "answer", "rounds"]
HONEST = "honest"
ROUNDS = "rounds: lied or not"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        name: As the command names it.
        family: Questions of one family have the same label, so a probe of one can be tested on the others' rows.
        framings: Framings whose prompts it needs; the first named after honest is the one it is about.
        true: What the label True means.
    """

    name: str
    family: Family
    framings: tuple[str, ...]
    true: str


QUESTIONS = {
    question.name: question
    for question in (
        Question("framing", "framing", (HONEST, "deny", "secret"), "told to deny"),
        Question("lie", "owed", (HONEST, "deny", "incentive"), "owed, while told to deny"),
        Question("entitlement", "owed", (HONEST, "deny", "incentive"), "owed"),
        Question("incentive", "framing", (HONEST, "incentive", "secret"), "under cost pressure"),
        Question("behaviour", "answer", (HONEST, "deny"), "the model's own answer is Yes"),
        Question("round_lie", "rounds", (), "the agent lied"),
    )
}


def parse_questions(names: Sequence[str]) -> list[Question]:
    """Questions by name; KlbError for an unknown one."""
    if unknown := [name for name in names if name not in QUESTIONS]:
        raise KlbError(f"unknown question {', '.join(unknown)}; known: {', '.join(QUESTIONS)}")
    return [QUESTIONS[name] for name in dict.fromkeys(names)]


def owed(rows: pd.DataFrame, framing: str) -> Population:
    """Prompts of one framing: owed or not; twins are contrast pairs."""
    chosen = _scenarios(rows, [framing])
    return _population(rows, f"{framing}: owed or not", chosen, "entitled", ["group", "paraphrase", "question"])


def framed(rows: pd.DataFrame, framing: str) -> Population:
    """Prompts of one framing and honest ones; one situation under both is a contrast pair."""
    chosen = _scenarios(rows, [HONEST, framing])
    labelled = rows.assign(framed=rows["framing"] == framing)
    return _population(labelled, f"{framing} or honest", chosen, "framed", ["situation", "paraphrase", "question"])


def answered(rows: pd.DataFrame, framings: Sequence[str]) -> Population:
    """Prompts of some framings by the model's own answer; nothing pairs them."""
    chosen = _scenarios(rows, framings)
    labelled = rows.assign(answers_yes=rows["own_margin"] > 0)
    return _population(labelled, f"{' and '.join(framings)}: answers Yes or No", chosen, "answers_yes", None)


def lied(rows: pd.DataFrame) -> Population:
    """Rounds that owed something: lied or not; nothing pairs them."""
    chosen = (rows["kind"] == "round").to_numpy() & rows["entitled"].to_numpy(bool)
    return _population(rows, ROUNDS, chosen, "lied", None)


def training_population(question: Question, rows: pd.DataFrame) -> Population:
    """What a question's probe learns from."""
    if question.family == "rounds":
        return lied(rows)
    if question.family == "answer":
        return answered(rows, question.framings)
    if question.family == "framing":
        return framed(rows, question.framings[1])
    return owed(rows, "deny" if question.name == "lie" else HONEST)


def family_populations(question: Question, rows: pd.DataFrame) -> list[Population]:
    """Every population of the question's family that the rows hold: the sides of its transfer matrix."""
    there = list(dict.fromkeys(rows["framing"].dropna()))
    rounds = [lied(rows)] if (rows["kind"] == "round").any() else []
    if question.family == "answer":
        return [training_population(question, rows), *(answered(rows, [name]) for name in question.framings)]
    if question.family == "framing":
        return [framed(rows, name) for name in there if name != HONEST]
    return [*(owed(rows, name) for name in there), *rounds]


def _scenarios(rows: pd.DataFrame, framings: Sequence[str]) -> np.ndarray:
    return ((rows["kind"] == "scenario") & rows["framing"].isin(framings)).to_numpy()


def _population(rows: pd.DataFrame, name: str, chosen: np.ndarray, label: str, pair: list[str] | None) -> Population:
    part = rows[chosen]
    labels = part[label].to_numpy(bool)
    contrast = np.full(len(part), -1)
    if pair is not None:
        numbers = part.groupby(pair, sort=False).ngroup().to_numpy()
        both = [len(of) == 2 and of.nunique() == 2 for _, of in pd.Series(labels).groupby(numbers)]
        contrast = np.where(np.array(both)[numbers], numbers, -1)
    return Population(name, np.flatnonzero(chosen), labels, contrast)
