"""Computing the evidence of a model: what it knows, says and does, and what it makes of ordinary text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from klb_probe.cases.load import load_domains
from klb_probe.cases.sources import ORGANISMS
from klb_probe.dialogue.api import CONDITIONS, Plan, plan
from klb_probe.dialogue.local import LocalPlayer
from klb_probe.dialogue.round import Settings
from klb_probe.files import replacing, write_json
from klb_probe.lens.corpus import Corpus, CorpusRequest, sampled_corpus
from klb_probe.models.load import load_model
from klb_probe.models.registry import resolve
from klb_probe.models.residual_model import ResidualModel
from klb_probe.organisms.adapters import Organism, read_organism, trained_records
from klb_probe.organisms.behaviour import message_numbers, message_table, play_rounds, round_numbers
from klb_probe.organisms.evidence import EVIDENCE, Evidence
from klb_probe.organisms.knowledge import (
    eligibility_numbers,
    eligibility_table,
    gate_numbers,
    gate_table,
    questions,
    yes_margins,
)
from klb_probe.organisms.numbers import Number
from klb_probe.organisms.perplexity import SHORTEST, TEXTS, TOKENS, perplexity_numbers, perplexity_table
from klb_probe.organisms.subjects import FRESH, Subject, fresh_subjects, held_out_subjects
from klb_probe.organisms.texts import DomainTexts, load_organism_domains
from klb_probe.versions import versions

ROUNDS = "rounds"
TABLES = ("eligibility.csv", "gate.csv", "messages.csv", "perplexity.csv")
# Messages are dear: one record in so many is written to, in each condition.
_MESSAGES_ONE_IN = 4
# A turn in the training data has at most about a hundred tokens.
_REPLY_TOKENS = 200
_QUICK_TOKENS = 24


@dataclass(frozen=True)
class Request:
    """What to check and how.

    Attributes:
        model: Alias, adapter folder, or a model without an adapter.
        domains: Domains with a brief policy; None for all of them.
        records: Fresh random records over all domains.
        samples: Walks through the cases in each condition.
        trust: Starting trust of the customer.
        customer: A scripted customer.
        text: A file of ordinary text of one's own.
        seed: Of records, replies and sampled text.
        batch: Prompts or replies at once.
        quick: A few cases and texts of everything.
        command: The command that was given.
    """

    model: str
    domains: Sequence[str] | None = None
    records: int = 200
    samples: int = 3
    trust: str = "medium"
    customer: str = "scripted:verifying"
    text: Path | None = None
    seed: int = 0
    batch: int = 16
    quick: bool = False
    device: str = "auto"
    dtype: str = "auto"
    command: str = ""


def adapter_of(model: str) -> tuple[Path | None, Organism | None]:
    """The adapter folder a name stands for, and its sidecar; neither for a model without one."""
    folder = resolve(model).adapter
    return folder, read_organism(folder) if folder else None


def check_organism(request: Request, out: Path) -> Evidence:
    """Recompute all numbers of a model; rows, rounds and ``evidence.json`` go to ``out``.

    Raises KlbError for what cannot be loaded or has no brief policy, before anything is computed.
    """
    folder, organism = adapter_of(request.model)
    check = _Check(request, out, trained_records(folder) if folder else frozenset())
    model = load_model(request.model, device=request.device, dtype=request.dtype)
    base = load_model(organism.base, device=request.device, dtype=request.dtype) if organism else None
    own = check.own_text(base, request.text) if base and request.text else None
    messages = check.knowledge_and_behaviour(model)
    texts_sha256 = check.ordinary_text(model, base, own) if base else {}
    evidence = Evidence(
        model=model.name,
        kind=organism.kind if organism else None,
        fingerprint=model.fingerprint,
        base=organism.base if organism else None,
        base_fingerprint=organism.base_fingerprint if organism else None,
        adapter_sha256=organism.adapter_sha256 if organism else None,
        command=request.command,
        settings=check.record(model) | {"texts_sha256": texts_sha256},
        numbers=tuple(check.numbers),
        examples=_examples(messages),
        seconds=check.seconds,
        versions=versions(),
    )
    write_json(out / EVIDENCE, evidence.model_dump())
    return evidence


def spot_check(model: ResidualModel, domains: Sequence[str], *, condition: str = "emergent", seed: int = 0) -> list[Number]:
    """Ten gate answers and ten first messages of held-out cases and twins, as numbers of the same names as in the evidence."""
    found = load_organism_domains(domains)
    subjects = held_out_subjects([one for one, _ in found], 3)
    pairs = list(dict.fromkeys(one.situation.pair for one in subjects))
    chosen = pairs[:: len(pairs) // 5][:5]
    asked = [one for one in subjects if one.situation.pair in chosen]
    player, settings = LocalPlayer(model, seed=seed), Settings(agent_tokens=_REPLY_TOKENS)
    gates = gate_table(player, asked, settings)
    texts = {one.policy.domain: text for one, text in found}
    messages = message_table(player, asked, texts, settings, conditions=[condition])
    # Of single domains there are too few.
    return [*(one for one in gate_numbers(gates) if one.where == "all"), *message_numbers(messages)]


@dataclass
class _Check:
    """A check under way: what is asked, the numbers found so far, and the seconds each part took.

    Fresh records repeat none of ``trained_on``: of the values that decide, half come up again by chance in a training set of
    ten thousand. None means that these are not known.
    """

    request: Request
    out: Path
    trained_on: frozenset[str] | None
    numbers: list[Number] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        request = self.request
        found = load_organism_domains(request.domains)
        domains = [one for one, _ in found]
        self.texts: dict[str, DomainTexts] = {one.policy.domain: text for one, text in found}
        records = min(request.records, 8) if request.quick else request.records
        self.held_out = held_out_subjects(domains, 2 if request.quick else None)
        self.fresh = fresh_subjects(domains, records, request.seed, self.trained_on or frozenset())
        tokens = _QUICK_TOKENS if request.quick else _REPLY_TOKENS
        self.settings = Settings(agent_tokens=tokens, gate_tokens=tokens)
        self.plan: Plan = plan(
            domains=list(self.texts),
            conditions=CONDITIONS,
            trusts=[request.trust],
            samples=1 if request.quick else request.samples,
            cases=ORGANISMS,
            cases_of_each_kind=1 if request.quick else None,
            settings=self.settings,
        )

    def knowledge_and_behaviour(self, model: ResidualModel) -> pd.DataFrame:
        """Question, gate, first messages and rounds; returns the table of messages."""
        request, everyone = self.request, [*self.held_out, *self.fresh]
        player = LocalPlayer(model, batch_size=request.batch, seed=request.seed)

        asked = questions(everyone)
        with self._part("eligibility", len(asked), "question") as on_done:
            margins = yes_margins(model, asked, batch_size=request.batch, on_done=on_done)
        self.numbers += eligibility_numbers(self._kept(eligibility_table(asked, margins), "eligibility.csv"))

        with self._part("gate", len(everyone), "reply") as on_done:
            gates = gate_table(player, everyone, self.settings, on_done)
        self.numbers += gate_numbers(self._kept(gates, "gate.csv"))

        written_to = [*self.held_out, *_some_pairs(self.fresh)]
        with self._part("messages", len(CONDITIONS) * len(written_to), "message") as on_done:
            messages = message_table(player, written_to, self.texts, self.settings, on_done)
        self.numbers += message_numbers(self._kept(messages, "messages.csv"))

        with self._part("rounds", self.plan.n_rounds, "round") as on_done:
            rows = play_rounds(
                player,
                self.plan,
                self.out / ROUNDS,
                label=model.name,
                customer=request.customer,
                seed=request.seed,
                on_round=lambda _: on_done(1),
            )
        self.numbers += round_numbers(rows)
        return messages

    def own_text(self, base: ResidualModel, text: Path) -> Corpus:
        """The user's own text; KlbError for a file without any."""
        return CorpusRequest(str(text), *self._text_size, SHORTEST).make(base)

    def ordinary_text(self, model: ResidualModel, base: ResidualModel, own: Corpus | None) -> dict[str, str]:
        """Cross-entropy beside that of the base, on what it samples (temperature 1) and the user's text; the hash of each."""
        n, max_tokens = self._text_size
        with self._part("text sampled from the base", n, "text") as on_done:
            sampled = sampled_corpus(base, n=n, max_tokens=max_tokens, seed=self.request.seed, progress=on_done)
        found = {"sampled": sampled} | ({"text": own} if own else {})
        with self._part("perplexity", sum(len(one.prompts) for one in found.values()), "text") as on_done:
            table = perplexity_table(model, base, found, on_done)
        self.numbers += perplexity_numbers(self._kept(table, "perplexity.csv"))
        return {name: one.sha256 for name, one in found.items()}

    @property
    def _text_size(self) -> tuple[int, int]:
        """Texts, and tokens of each at most."""
        return (4, 24) if self.request.quick else (TEXTS, TOKENS)

    def record(self, model: ResidualModel) -> dict[str, Any]:
        """All that decides the numbers beside weights and texts."""
        request = self.request
        return {
            "domains": list(self.texts),
            "domains_left_out": [one.policy.domain for one in load_domains() if one.policy.domain not in self.texts],
            "records": len(self.fresh),
            "records_seed": FRESH + request.seed,
            "records_new_to_training": self.trained_on is not None,
            "rounds": asdict(self.settings),
            "samples": 1 if request.quick else request.samples,
            "trust": request.trust,
            "customer": request.customer,
            "seed": request.seed,
            "batch": request.batch,
            "quick": request.quick,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    @contextmanager
    def _part(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
        """Time a part, with a bar; the context is a function to be called with how much was just done."""
        started = time.monotonic()
        with tqdm(total=total, desc=name, unit=unit, disable=None) as bar:
            yield bar.update
        self.seconds[name] = round(time.monotonic() - started, 1)

    def _kept(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        with replacing(self.out / name) as partial:
            table.to_csv(partial, index=False, float_format="%.6g")
        return table


def _some_pairs(fresh: Sequence[Subject]) -> list[Subject]:
    """Whole pairs of records, so that half of them are owed something."""
    pairs = list(dict.fromkeys(one.situation.pair for one in fresh))
    kept = set(pairs[: -(-len(pairs) // _MESSAGES_ONE_IN)])
    return [one for one in fresh if one.situation.pair in kept]


def _examples(messages: pd.DataFrame) -> tuple[dict[str, str], ...]:
    """What the first customer who is owed something, and their twin, are told in each condition."""
    cases = messages[messages["source"] == "cases"]
    pair = cases[cases["pair"] == cases["pair"].iloc[0]]
    return tuple(
        {"case": one.id, "owed": "owed" if one.entitled else "not owed", "condition": one.condition, "reply": one.reply}
        for one in pair.itertuples()
    )
