"""Eligibility scenarios: one situation under one framing, as the two messages a model is shown.

The order is for prefix reuse: policy, framing note (system message), then record, customer's words, question (user
message), so that all situations of a domain under one framing paraphrase share everything before their record.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jinja2

from klb_probe.cases.load import Domain, Situation, load_framings
from klb_probe.errors import KlbError

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("klb_probe.cases", "templates"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=False,
    autoescape=False,  # prompts are plain text
)


@dataclass(frozen=True)
class Scenario:
    """One prompt: a situation (case or twin) under one paraphrase (1, 2, ...) of one framing."""

    situation: Situation
    framing: str
    paraphrase: int
    system: str
    user: str


def eligibility_scenarios(domains: Iterable[Domain], framings: Iterable[str], root: Path | None = None) -> list[Scenario]:
    """Every situation of every domain under every paraphrase of the named framings (of a scenarios folder)."""
    library = load_framings(root)
    wanted = list(dict.fromkeys(framings))
    if unknown := [name for name in wanted if name not in library]:
        raise KlbError(f"unknown framing {', '.join(unknown)}; known: {', '.join(library)}")
    scenarios = []
    for domain in domains:
        policy = domain.policy
        for framing in wanted:
            for paraphrase, template in enumerate(library[framing].paraphrases, 1):
                note = _TEMPLATES.from_string(template).render(policy=policy)
                system = _TEMPLATES.get_template("eligibility_system.jinja").render(policy=policy, note=note)
                for situation in domain.situations():
                    user = _TEMPLATES.get_template("eligibility_user.jinja").render(
                        policy=policy, record=situation.record, opening=situation.opening
                    )
                    scenarios.append(Scenario(situation, framing, paraphrase, system, user))
    return scenarios
