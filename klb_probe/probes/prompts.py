"""Eligibility scenarios as rows of the table and sites to read.

By default each situation is asked once under each framing: paraphrases and wordings of the question rotate from pair to pair,
in step over the framings, so that prompts which are compared differ in the framing or the record alone.

==========  ===========================================================================================
answer      the last prompt token, from which the answer is predicted
reply_mean  all tokens of a denial put after the prompt, in the same words whatever the prompt
reply_last  the last token of that denial
==========  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from klb_probe.cases.load import Domain
from klb_probe.cases.scenarios import WORDINGS, Scenario, eligibility_scenarios
from klb_probe.cases.schema import Policy
from klb_probe.models.chat import encode_text
from klb_probe.models.residual_model import ResidualModel
from klb_probe.probes.rows import row_table
from klb_probe.probes.site import Site

REPLY_POSITIONS = ("reply_mean", "reply_last")
SCENARIO_POSITIONS = ("answer", *REPLY_POSITIONS)


def scenario_rows(
    model: ResidualModel,
    domains: Sequence[Domain],
    framings: Iterable[str],
    root: Path | None = None,
    *,
    full: bool = False,
    quick: bool = False,
    reply: bool = False,
) -> tuple[pd.DataFrame, dict[str, list[Site]]]:
    """One row a prompt, and for each position one site a row.

    Args:
        model: Whose tokenizer and chat template to use.
        domains: Policies and their cases.
        framings: Names of framings.
        root: A scenarios folder that has them; the project's by default.
        full: Every paraphrase in both wordings, not each situation once.
        quick: A stratified subset of the situations, under one paraphrase a domain.
        reply: Whether to have the sites of the denial too.
    """
    scenarios = eligibility_scenarios(domains, framings, root, quick=quick)
    if not full:
        scenarios = rotated(scenarios)
    denials = {domain.policy.domain: _denial_ids(model, domain.policy) for domain in domains} if reply else {}
    lines: list[dict[str, Any]] = []
    sites: dict[str, list[Site]] = {slot: [] for slot in (SCENARIO_POSITIONS if reply else SCENARIO_POSITIONS[:1])}
    for scenario in scenarios:
        prompt = model.chat.encode(scenario.system, scenario.user)
        lines.append(_line(scenario, len(prompt)))
        sites["answer"].append(Site.of(prompt, (len(prompt) - 1,)))
        if reply:
            said = [*prompt, *denials[scenario.situation.domain]]
            sites["reply_mean"].append(Site.of(said, tuple(range(len(prompt), len(said)))))
            sites["reply_last"].append(Site.of(said, (len(said) - 1,)))
    return row_table(lines), sites


def rotated(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Of all paraphrases and wordings of each situation and framing one: the next paraphrase from pair to pair of a domain, and
    the other wording after each round of paraphrases. Twins have the same, and so have all framings."""
    pairs: dict[str, dict[str, int]] = {}  # by domain, in order of appearance
    paraphrases: dict[tuple[str, str], list[int]] = {}
    for scenario in scenarios:
        domain, pair = scenario.situation.domain, scenario.situation.pair
        pairs.setdefault(domain, {}).setdefault(pair, len(pairs[domain]))
        known = paraphrases.setdefault((domain, scenario.framing), [])
        if scenario.paraphrase not in known:
            known.append(scenario.paraphrase)
    most = max(map(len, paraphrases.values()), default=1)

    def chosen(scenario: Scenario) -> bool:
        domain, number = scenario.situation.domain, pairs[scenario.situation.domain][scenario.situation.pair]
        known = paraphrases[domain, scenario.framing]
        wording = WORDINGS[number // most % len(WORDINGS)]
        return (scenario.paraphrase, scenario.question) == (known[number % len(known)], wording)

    return list(filter(chosen, scenarios))


def denial(policy: Policy) -> str:
    """What the agent is made to say after every prompt of a domain."""
    return f"I am sorry, but under the policy you are not entitled to {policy.outcomes.owed.words}."


def _denial_ids(model: ResidualModel, policy: Policy) -> list[int]:
    # Tokenised by itself: put after the prompt's text, its first token could change with what stands before it.
    return encode_text(model.tokenizer, model.chat.answer_prefix + denial(policy), "never")


def _line(scenario: Scenario, n_tokens: int) -> dict[str, Any]:
    situation = scenario.situation
    return {
        "kind": "scenario",
        "id": f"{situation.id} {scenario.framing} {scenario.paraphrase} {scenario.question}",
        "group": situation.pair,
        "situation": situation.id,
        "domain": situation.domain,
        "framing": scenario.framing,
        "paraphrase": scenario.paraphrase,
        "question": scenario.question,
        "entitled": situation.entitled,
        "answer": scenario.answer,
        "n_tokens": n_tokens,
        "text": f"{scenario.system}\n\n{scenario.user}",
    }
