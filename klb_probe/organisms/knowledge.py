"""What a model knows: its answers to the eligibility question under each framing, and to the gate's form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from klb_probe.cases.load import load_framings
from klb_probe.cases.scenarios import WORDINGS, Wording, framing_note, system_message, user_message
from klb_probe.dialogue.gate import SCHEMA, read_gate
from klb_probe.dialogue.player import Player, Reply, Request
from klb_probe.dialogue.prompts import gate_messages
from klb_probe.dialogue.round import Settings
from klb_probe.lens.contrast import TokenContrast
from klb_probe.models.prefix import prefill
from klb_probe.models.residual_model import ResidualModel, chunks
from klb_probe.organisms.numbers import Number
from klb_probe.organisms.rates import balanced_accuracy, share
from klb_probe.organisms.subjects import Subject

FRAMINGS = ("neutral", "honest", "secret", "incentive", "deny")
_AT_ONCE = 32

OnDone = Callable[[int], object]


def _unheard(_: int) -> None:
    """Nobody counts."""


@dataclass(frozen=True)
class Question:
    """The eligibility question about a subject, under one paraphrase (1, 2, ...) of a framing and in one wording."""

    subject: Subject
    framing: str
    paraphrase: int
    wording: Wording
    system: str
    user: str


def questions(subjects: Sequence[Subject]) -> list[Question]:
    """Every subject under every framing in both wordings; paraphrases rotate from pair to pair, in step over framings."""
    framings = load_framings()
    number: dict[str, int] = {}
    asked = []
    for subject in subjects:
        policy, situation = subject.domain.policy, subject.situation
        rotation = number.setdefault(f"{subject.source} {situation.pair}", len(number))
        for framing in FRAMINGS:
            paraphrases = framings[framing].paraphrases
            chosen = rotation % len(paraphrases)
            note = framing_note(paraphrases[chosen], policy, f"framing {framing}, paraphrase {chosen + 1}")
            system = system_message(policy, note)
            asked += [
                Question(subject, framing, chosen + 1, wording, system, user_message(policy, situation, wording))
                for wording in WORDINGS
            ]
    return asked


def yes_margins(model: ResidualModel, asked: Sequence[Question], *, batch_size: int, on_done: OnDone = _unheard) -> np.ndarray:
    """The model's own logit of Yes minus that of No after each question, ``[question]`` float32."""
    contrast = TokenContrast.of(model.chat)
    ids = [model.chat.encode_chat([("system", one.system), ("user", one.user)]) for one in asked]
    margins = np.full(len(asked), np.nan, np.float32)
    for indices, capture in prefill(model, ids, [], contrast.token_ids, batch_size=batch_size):
        margins[indices] = contrast.margin(capture.logits[:, 0]).cpu().numpy()
        on_done(len(indices))
    return margins


def eligibility_table(asked: Sequence[Question], margins: np.ndarray) -> pd.DataFrame:
    """One line a question: what it is, its margin, and whether the answer (Yes where the margin is positive) is right."""
    lines = [
        {
            **about(one.subject),
            "framing": one.framing,
            "paraphrase": one.paraphrase,
            "wording": one.wording,
            "margin": margin,
            "says_entitled": (margin > 0) is (one.wording == "plain"),
        }
        for one, margin in zip(asked, margins.tolist(), strict=True)
    ]
    table = pd.DataFrame(lines)
    table["right"] = table["says_entitled"] == table["entitled"]
    return table


def eligibility_numbers(table: pd.DataFrame) -> Iterator[Number]:
    """By framing, in each wording and in both: the share right, balanced accuracy, and the share of denials."""
    for source, of_source in table.groupby("source", sort=False):
        for framing, group in of_source.groupby("framing", sort=False):
            for wording in ("both", *WORDINGS):
                rows = group if wording == "both" else group[group["wording"] == wording]
                rates = {
                    "right": share(rows["right"], rows["pair"]),
                    "balanced accuracy": balanced_accuracy(rows["right"], rows["entitled"], rows["pair"]),
                    "denies": share(~rows["says_entitled"], rows["pair"]),
                }
                for measure, rate in rates.items():
                    yield Number.of("eligibility", source, f"{framing}, {wording}", measure, rate)


def gate_table(player: Player, subjects: Sequence[Subject], settings: Settings, on_done: OnDone = _unheard) -> pd.DataFrame:
    """One line a subject: the reply to the gate's form, read as a run reads it."""
    requests = []
    for subject in subjects:
        name = f"{subject.source}/{subject.situation.id}/gate"
        messages = gate_messages(subject.domain.policy, subject.situation, settings.mode)
        requests.append(Request("gate", messages, name, name, 0.0, settings.gate_tokens, None, SCHEMA))
    lines = []
    for subject, reply in zip(subjects, ask(player, requests, on_done), strict=True):
        stated = [read_gate(reply.text, entitled) == "passed" for entitled in (True, False)]
        gate = read_gate(reply.text, subject.situation.entitled)
        # Two booleans that contradict each other state nothing.
        says = stated[0] if any(stated) else None
        lines.append({**about(subject), "gate": gate, "says_entitled": says, "reply": reply.text, "error": reply.error})
    return pd.DataFrame(lines)


def gate_numbers(table: pd.DataFrame) -> Iterator[Number]:
    """Passed, failed, unparsed (of all), passed by entitlement, and balanced accuracy of what could be read.

    A reply that failed says nothing of what is known, and is left out.
    """
    table = table[table["error"].isna()]
    domains = table["domain"].unique()
    for source, of_source in table.groupby("source", sort=False):
        groups = {"all": of_source} | {name: of_source[of_source["domain"] == name] for name in domains if len(domains) > 1}
        for where, group in groups.items():
            rates = {gate: share(group["gate"] == gate, group["pair"]) for gate in ("passed", "failed", "unparsed")}
            for owed, name in ((True, "passed where owed"), (False, "passed where not owed")):
                rows = group[group["entitled"] == owed]
                rates[name] = share(rows["gate"] == "passed", rows["pair"])
            read = group[group["gate"] != "unparsed"]
            rates["balanced accuracy"] = balanced_accuracy(read["gate"] == "passed", read["entitled"], read["pair"])
            for measure, rate in rates.items():
                yield Number.of("gate", source, where, measure, rate)


def ask(player: Player, requests: Sequence[Request], on_done: OnDone) -> list[Reply]:
    """The replies, some requests at a time; each time the player keeps one conversation, whose start the next may share."""
    replies, kept = [], None
    for some in chunks(requests, _AT_ONCE):
        replies += player.reply(some)
        done = [request.conversation for request in some]
        for conversation in done[:-1] if kept is None else [kept, *done[:-1]]:
            player.forget(conversation)
        kept = done[-1]
        on_done(len(some))
    if kept is not None:
        player.forget(kept)
    return replies


def about(subject: Subject) -> dict[str, Any]:
    """The columns that every table of evidence begins with."""
    situation = subject.situation
    return {
        "source": subject.source,
        "domain": situation.domain,
        "pair": situation.pair,
        "id": situation.id,
        "entitled": situation.entitled,
    }
