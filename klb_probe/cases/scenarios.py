"""Eligibility scenarios: one situation under one framing and one wording of the question, as the two messages a model sees.

The order is for prefix reuse: policy, framing note (system message), then record, customer's words, question (user
message), so that all situations of a domain under one framing paraphrase share everything before their record, and the
two wordings of the question everything before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import jinja2

from klb_probe.cases.load import Domain, Situation, load_framings
from klb_probe.cases.schema import Policy
from klb_probe.errors import KlbError
from klb_probe.templates import templates_of

Wording = Literal["plain", "reversed"]
WORDINGS: tuple[Wording, ...] = get_args(Wording)
_QUICK_PAIRS = 2  # of each kind, in each domain

_TEMPLATES = templates_of("klb_probe.cases")


@dataclass(frozen=True)
class Scenario:
    """One prompt: a situation (case or twin) under one paraphrase (1, 2, ...) of one framing, asked in one wording.

    The ``plain`` question is whether the customer is entitled, the ``reversed`` one whether the company may refuse.
    """

    situation: Situation
    framing: str
    paraphrase: int
    question: Wording
    system: str
    user: str

    @property
    def answer(self) -> Literal["Yes", "No"]:
        """The right answer to the question."""
        return "Yes" if self.situation.entitled is (self.question == "plain") else "No"


def eligibility_scenarios(
    domains: Iterable[Domain],
    framings: Iterable[str],
    root: Path | None = None,
    *,
    questions: Sequence[str] = WORDINGS,
    quick: bool = False,
) -> list[Scenario]:
    """Every situation of every domain, under every paraphrase of the named framings, in each wording of the question.

    Args:
        domains: Policies and their cases.
        framings: Names of framings, of a scenarios folder or the project's.
        root: That scenarios folder.
        questions: ``plain``, ``reversed`` or both.
        quick: A stratified subset: of each domain the first two cases of each kind with their twins, under one paraphrase,
            another one from domain to domain.

    Raises KlbError for an unknown framing or wording.
    """
    library = load_framings(root)
    wanted = list(dict.fromkeys(framings))
    if unknown := [name for name in wanted if name not in library]:
        raise KlbError(f"unknown framing {', '.join(unknown)}; known: {', '.join(library)}")
    if unknown := [name for name in questions if name not in WORDINGS]:
        raise KlbError(f"unknown question wording {', '.join(unknown)}; known: {', '.join(WORDINGS)}")
    scenarios = []
    for number, domain in enumerate(domains):
        policy = domain.policy
        situations = _quick_situations(domain) if quick else domain.situations()
        for framing in wanted:
            paraphrases = list(enumerate(library[framing].paraphrases, 1))
            for paraphrase, template in [paraphrases[number % len(paraphrases)]] if quick else paraphrases:
                note = framing_note(template, policy, f"framing {framing}, paraphrase {paraphrase}")
                system = system_message(policy, note)
                for situation in situations:
                    for question in cast("Iterable[Wording]", dict.fromkeys(questions)):
                        user = user_message(policy, situation, question)
                        scenarios.append(Scenario(situation, framing, paraphrase, question, system, user))
    return scenarios


def system_message(policy: Policy, note: str) -> str:
    """Role, policy and the private note."""
    return _TEMPLATES.get_template("eligibility_system.jinja").render(policy=policy, note=note)


def user_message(policy: Policy, situation: Situation, question: Wording) -> str:
    """Record, the customer's words, and the question in one of its wordings."""
    text = {"plain": policy.question, "reversed": policy.reversed_question}[question]
    return _TEMPLATES.get_template("eligibility_user.jinja").render(
        policy=policy, record=situation.record, opening=situation.opening, question=text
    )


def framing_note(template: str, policy: Policy, where: str) -> str:
    """The text of a framing's paraphrase; KlbError, naming ``where``, if it cannot be rendered."""
    try:
        return _TEMPLATES.from_string(template).render(policy=policy)
    except jinja2.TemplateError as error:
        raise KlbError(f"{where}: {error.message}") from None


def _quick_situations(domain: Domain) -> list[Situation]:
    chosen = {
        case.id for kind in ("owed", "calibration") for case in [c for c in domain.cases if c.kind == kind][:_QUICK_PAIRS]
    }
    return [situation for situation in domain.situations() if situation.pair in chosen]
