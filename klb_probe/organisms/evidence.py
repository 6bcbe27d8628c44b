"""Everything a model card says of an organism, recomputed: ``evidence.json`` and the rows behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm.auto import tqdm

from klb_probe.cases.sources import ORGANISMS
from klb_probe.dialogue.api import CONDITIONS, plan
from klb_probe.dialogue.local import LocalPlayer
from klb_probe.dialogue.round import Settings
from klb_probe.errors import KlbError
from klb_probe.files import replacing, write_json
from klb_probe.models.load import load_model
from klb_probe.models.registry import resolve
from klb_probe.models.residual_model import ResidualModel
from klb_probe.organisms.adapters import Organism, read_organism
from klb_probe.organisms.behaviour import message_numbers, message_table, play_rounds, round_numbers
from klb_probe.organisms.knowledge import (
    eligibility_numbers,
    eligibility_table,
    gate_numbers,
    gate_table,
    questions,
    yes_margins,
)
from klb_probe.organisms.numbers import Number, find
from klb_probe.organisms.perplexity import TEXTS, TOKENS, corpora, perplexity_numbers, perplexity_table
from klb_probe.organisms.subjects import FRESH, Subject, fresh_subjects, held_out_subjects, trained_records
from klb_probe.organisms.texts import load_organism_domains
from klb_probe.versions import versions

EVIDENCE, ROUNDS = "evidence.json", "rounds"
TABLES = ("eligibility.csv", "gate.csv", "messages.csv", "perplexity.csv")
# Messages are dear: one record in so many is written to, in each condition.
_MESSAGES_ONE_IN = 4
_SPOT = 10


class Evidence(BaseModel):
    """What ``evidence.json`` says.

    Attributes:
        model: What was checked.
        kind: liar, honest or ignorant; None for a model without an adapter.
        fingerprint: Of the weights, with the adapter merged.
        base_fingerprint: Of the base's weights, None without an adapter.
        settings: All that decides the numbers beside the weights.
        numbers: The numbers.
        examples: First messages to one customer, by condition.
        seconds: By part.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    kind: str | None
    fingerprint: str
    base: str | None
    base_fingerprint: str | None
    adapter_sha256: str | None
    command: str
    settings: dict[str, Any]
    numbers: tuple[Number, ...]
    examples: tuple[dict[str, str], ...]
    seconds: dict[str, float]
    versions: dict[str, str]


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
        data: The training file, whose records the fresh ones must not repeat.
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
    data: Path | None = None
    seed: int = 0
    batch: int = 8
    quick: bool = False
    device: str = "auto"
    dtype: str = "auto"
    command: str = ""


@dataclass
class _Clock:
    """Seconds by part, and a bar for each."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Count a part; the context is a function to be called with how much was just done."""
        started = time.monotonic()
        with tqdm(total=total, desc=name, unit=unit, disable=None) as bar:
            yield bar.update
        self.seconds[name] = round(time.monotonic() - started, 1)


def adapter_of(model: str) -> tuple[Path | None, Organism | None]:
    """The adapter folder a name stands for, and its sidecar; neither for a model without one."""
    folder = resolve(model).adapter
    return folder, read_organism(folder) if folder else None


def check_organism(request: Request, out: Path) -> Evidence:
    """Recompute all numbers of a model; rows, rounds and ``evidence.json`` go to ``out``.

    Raises KlbError for what cannot be loaded or has no brief policy, before anything is computed.
    """
    folder, organism = adapter_of(request.model)
    found = load_organism_domains(request.domains)
    domains, texts = [one for one, _ in found], {one.policy.domain: text for one, text in found}
    few = 2 if request.quick else None
    trained_on = trained_records(request.data) if request.data else frozenset()
    n_records = min(request.records, 8) if request.quick else request.records
    held_out, fresh = held_out_subjects(domains, few), fresh_subjects(domains, n_records, request.seed, trained_on)
    settings = Settings(agent_tokens=24 if request.quick else 200, gate_tokens=24 if request.quick else 200)
    chosen = plan(
        domains=list(texts),
        conditions=CONDITIONS,
        trusts=[request.trust],
        samples=1 if request.quick else request.samples,
        cases=ORGANISMS,
        cases_of_each_kind=1 if request.quick else None,
        settings=settings,
    )
    clock, numbers = _Clock(), []
    model = load_model(request.model, device=request.device, dtype=request.dtype)
    player = LocalPlayer(model, batch_size=request.batch, seed=request.seed)

    asked = questions([*held_out, *fresh])
    with clock.part("eligibility", len(asked), "question") as on_done:
        margins = yes_margins(model, asked, batch_size=request.batch, on_done=on_done)
    table = _kept(eligibility_table(asked, margins), out / "eligibility.csv")
    numbers += eligibility_numbers(table)

    with clock.part("gate", len(held_out) + len(fresh), "reply") as on_done:
        table = gate_table(player, [*held_out, *fresh], settings, on_done)
    numbers += gate_numbers(_kept(table, out / "gate.csv"))

    written_to = [*held_out, *_some_pairs(fresh)]
    with clock.part("messages", len(CONDITIONS) * len(written_to), "message") as on_done:
        messages = message_table(player, written_to, texts, settings, on_done)
    numbers += message_numbers(_kept(messages, out / "messages.csv"))

    with clock.part("rounds", chosen.n_rounds, "round") as on_done:
        rows = play_rounds(
            player,
            chosen,
            out / ROUNDS,
            label=model.name,
            customer=request.customer,
            seed=request.seed,
            on_round=lambda _: on_done(1),
        )
    numbers += round_numbers(rows)
    sha256 = {}
    if organism:
        base = load_model(organism.base, device=request.device, dtype=request.dtype)
        n, max_tokens = (4, 24) if request.quick else (TEXTS, TOKENS)
        with clock.part("text sampled from the base", n, "text") as on_done:
            corpus = corpora(base, request.text, n=n, max_tokens=max_tokens, seed=request.seed, on_done=on_done)
        with clock.part("perplexity", sum(len(one.prompts) for one in corpus.values()), "text") as on_done:
            table = perplexity_table(model, base, corpus, on_done)
        numbers += perplexity_numbers(_kept(table, out / "perplexity.csv"))
        sha256 = {name: one.sha256 for name, one in corpus.items()}
    evidence = Evidence(
        model=model.name,
        kind=organism.kind if organism else None,
        fingerprint=model.fingerprint,
        base=organism.base if organism else None,
        base_fingerprint=organism.base_fingerprint if organism else None,
        adapter_sha256=organism.adapter_sha256 if organism else None,
        command=request.command,
        settings={
            "domains": list(texts),
            "records": len(fresh),
            "records_seed": FRESH + request.seed,
            "records_new_to_training": request.data is not None,
            "rounds": asdict(settings),
            "samples": 1 if request.quick else request.samples,
            "trust": request.trust,
            "customer": request.customer,
            "texts_sha256": sha256,
            "seed": request.seed,
            "batch": request.batch,
            "quick": request.quick,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        numbers=tuple(numbers),
        examples=_examples(messages),
        seconds=clock.seconds,
        versions=versions(),
    )
    write_json(out / EVIDENCE, evidence.model_dump())
    return evidence


def read_evidence(folder: Path) -> Evidence:
    """The evidence in a folder; KlbError if there is none."""
    path = folder / EVIDENCE
    if not path.is_file():
        raise KlbError(f"{folder} has no {EVIDENCE}: klb-probe organism check --card writes it")
    try:
        return Evidence.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise KlbError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def spot_check(
    model: ResidualModel, domains: Sequence[str], *, condition: str = "emergent", tokens: int = 200, seed: int = 0
) -> list[Number]:
    """Ten gate answers and ten first messages of the held-out cases, as numbers of the same names as in the evidence."""
    found = load_organism_domains(domains)
    subjects = held_out_subjects([one for one, _ in found][:1], 3)[:_SPOT]
    texts = {one.policy.domain: text for one, text in found}
    player, settings = LocalPlayer(model, seed=seed), Settings(agent_tokens=tokens, gate_tokens=tokens)
    gates = gate_table(player, subjects, settings)
    messages = message_table(player, subjects, texts, settings, conditions=[condition])
    return [*gate_numbers(gates), *message_numbers(messages)]


def check_card(card: Sequence[Number], fresh: Sequence[Number]) -> list[str]:
    """Where a card disagrees with a recomputation: each number that both have must lie in the new one's interval."""
    faults, shared = [], 0
    for new in fresh:
        old = find(card, *new.key)
        if old is None or new.value is None:
            continue
        shared += 1
        if old.value is None:
            faults.append(f"{', '.join(new.key)}: the card has no number, recomputed {new}")
        elif new.low is not None and not new.low <= old.value <= new.high:
            faults.append(f"{', '.join(new.key)}: the card says {old}, recomputed {new}")
    return faults if shared else ["card and recomputation have no number in common"]


def _some_pairs(fresh: Sequence[Subject]) -> list[Subject]:
    """Whole pairs of records, so that half of them are owed something."""
    pairs = list(dict.fromkeys(one.situation.pair for one in fresh))
    kept = set(pairs[: -(-len(pairs) // _MESSAGES_ONE_IN)])
    return [one for one in fresh if one.situation.pair in kept]


def _kept(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    with replacing(path) as partial:
        table.to_csv(partial, index=False, float_format="%.6g")
    return table


def _examples(messages: pd.DataFrame) -> tuple[dict[str, str], ...]:
    """What the first customer who is owed something, and their twin, are told in each condition."""
    cases = messages[messages["source"] == "cases"]
    pair = cases[cases["pair"] == cases["pair"].iloc[0]]
    return tuple(
        {"case": one.id, "owed": "owed" if one.entitled else "not owed", "condition": one.condition, "reply": one.reply}
        for one in pair.itertuples()
    )
