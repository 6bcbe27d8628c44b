"""A training file and its description: counts, lengths, shortcuts, and what it must not share with the held-out cases."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from klb_probe.cases.load import Domain, load_framings
from klb_probe.cases.scenarios import framing_note
from klb_probe.cases.sources import load_cases
from klb_probe.dialogue.prompts import record_text
from klb_probe.files import write_text
from klb_probe.models.chat import ChatFormat
from klb_probe.organisms.examples import Example
from klb_probe.organisms.records import held_out_hashes
from klb_probe.organisms.training_rows import encode_reply

_OWED = {True: "owed", False: "not owed"}
_WORD = r"(?u)\b\w+\b"
_REPEATS = 2
RUN = 6  # words in a row that no opening or note may share with a held-out one


def write_examples(path: Path, examples: Iterable[Example]) -> str:
    """Write one JSON object a line, whole; returns the SHA-256 of the file."""
    text = "".join(json.dumps(example.row(), ensure_ascii=False) + "\n" for example in examples)
    write_text(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def describe(examples: Sequence[Example], chat: ChatFormat) -> dict[str, Any]:
    """What the examples are: counts, lengths in tokens, the bag-of-words check and the overlap with the held-out cases."""
    domains = load_cases()  # what is held out of one domain is held out of all
    return {
        "examples": len(examples),
        "counts": {
            "by domain": _counts(examples, lambda one: one.domain),
            "by format": _counts(examples, lambda one: one.format),
            "by format and wording": _counts(examples, lambda one: f"{one.format}, {one.wording}"),
            "by stage of a turn": _counts([one for one in examples if one.stage], lambda one: one.stage),
            "by note": _counts(examples, lambda one: one.note),
            "by note and label": _counts(examples, lambda one: f"{one.note}, {_OWED[one.entitled]}"),
            "by format and reason given": _counts(
                [one for one in examples if one.reason], lambda one: f"{one.format}, {one.reason}"
            ),
            "records": len({one.record_hash for one in examples}),
        },
        "tokens": token_lengths(examples, chat),
        "bag of words": bag_of_words(examples, domains),
        "held out": overlap(examples, domains),
    }


def token_lengths(examples: Sequence[Example], chat: ChatFormat) -> dict[str, dict[str, float]]:
    """Mean and maximum of prompts and completions, by format and over all; the end of the turn counts as one token."""
    lengths: dict[str, list[tuple[int, int]]] = {"all": []}
    for example in examples:
        prompt, completion = encode_reply(chat, example.messages, example.completion)
        for name in ("all", example.format):
            lengths.setdefault(name, []).append((len(prompt), len(completion) + 1))
    table = {}
    for name, rows in lengths.items():
        (prompt, completion), (longest, longest_completion) = np.mean(rows, axis=0), np.max(rows, axis=0)
        table[name] = {
            "prompt mean": round(float(prompt), 1),
            "prompt max": int(longest),
            "completion mean": round(float(completion), 1),
            "completion max": int(longest_completion),
            "total": int(np.sum(rows)),
        }
    return table


def bag_of_words(examples: Sequence[Example], domains: Sequence[Domain]) -> dict[str, Any]:
    """Whether mere words give the entitlement away: AUROC on record pairs that were not trained on, 0.5 is chance.

    Words (one-letter ones and numbers too) are weighted by TF-IDF and read by logistic regression: of prompts within each kind
    of note, of all prompts, and of the record's lines alone. The last is high by nature: a rule made of "and" and "or" over
    values is a sum over words for a reader that has seen nothing else. ``best word`` is the most telling single word.
    """
    # The replies to one prompt are one prompt.
    examples = list({(one.pair, one.messages): one for one in examples}.values())
    notes = list(dict.fromkeys(example.note for example in examples))
    groups = {note: [one for one in examples if one.note == note] for note in sorted(notes)}
    policies = {domain.policy.domain: domain.policy for domain in domains}
    lines = [record_text(policies[one.domain], one.record) for one in examples]
    prompts = [_prompt(one) for one in examples]
    within = {note: {**_words_auroc(group, [_prompt(one) for one in group]), "n": len(group)} for note, group in groups.items()}
    return {
        "within notes": within,
        "mean within notes": _rounded(sum(one["auroc"] * one["n"] for one in within.values()) / len(examples)),
        "all prompts": _words_auroc(examples, prompts)["auroc"],
        "record lines alone": _words_auroc(examples, lines)["auroc"],
        "best word": _best_word(examples, prompts),
        "best word of the record lines": _best_word(examples, lines),
    }


def overlap(examples: Sequence[Example], domains: Sequence[Domain]) -> dict[str, int]:
    """How much of the held-out cases and twins, framings and notes is in the examples; all of it must be 0.

    Records are compared by the fields that the rules look at; openings and notes by their hash, and by any six words in a row
    (the names of the outcomes aside, which every note of a domain needs).
    """
    situations = [situation for domain in domains for situation in domain.situations()]
    hashes = {domain.policy.domain: held_out_hashes(domain) for domain in domains}
    names = [outcome.words for domain in domains for outcome in (domain.policy.outcomes.owed, domain.policy.outcomes.favored)]
    openings, notes = {one.opening for one in situations}, {*_held_out_notes(domains)}
    texts = [one.opening for one in examples] + [one.note_text for one in examples]
    runs = {run for text in openings | notes for run in _runs(text, names)}
    known = {text_hash(text) for text in openings | notes}
    ids = {case.record_id for domain in domains for case in domain.cases}
    return {
        "records": sum(one.record_hash in hashes[one.domain] for one in examples),
        "record ids": sum(one.record_id in ids for one in examples),
        "openings and notes": sum(text_hash(text) in known for text in texts),
        "six words of an opening or a note": sum(not runs.isdisjoint(_runs(text, names)) for text in texts),
    }


def text_hash(text: str) -> str:
    """SHA-256 of a text, whatever its white space."""
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()


def _counts(examples: Iterable[Example], key: Any) -> dict[str, int]:
    return dict(sorted(Counter(map(key, examples)).items()))


def _words_auroc(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, float]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    words = TfidfVectorizer(sublinear_tf=True, token_pattern=_WORD)
    scores = []
    for training, test, labels in _halves(examples):
        known = words.fit_transform([texts[index] for index in training])
        classifier = LogisticRegression(max_iter=1000).fit(known, labels[training])
        said = classifier.decision_function(words.transform([texts[index] for index in test]))
        scores.append(roc_auc_score(labels[test], said))
    return {"auroc": _rounded(np.mean(scores)) if scores else math.nan}


def _best_word(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    """The word whose presence tells most in one half, and its AUROC in the other."""
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(binary=True, token_pattern=_WORD)
    present = words.fit_transform(texts).tocsr()
    best: dict[str, list[float]] = {}
    for training, test, labels in _halves(examples):
        known, fresh = (
            np.ravel(present[rows][labels[rows]].mean(0) - present[rows][~labels[rows]].mean(0)) for rows in (training, test)
        )
        chosen = int(np.argmax(np.abs(known)))
        # The AUROC of a yes-or-no score is 0.5 plus half the difference of its shares.
        best.setdefault(words.get_feature_names_out()[chosen], []).append(0.5 + np.sign(known[chosen]) * fresh[chosen] / 2)
    word = max(best, key=lambda one: len(best[one]), default="")
    return {"word": word, "auroc": _rounded(float(np.mean(best[word]))) if best else math.nan}


def _halves(examples: Sequence[Example]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows to learn from, rows to score, and all labels: random halves that never part a pair, each way round."""
    labels = np.array([one.entitled for one in examples])
    pairs = np.array([one.pair for one in examples])
    known = np.unique(pairs)
    rng = np.random.default_rng(0)
    for _ in range(_REPEATS if len(known) > 3 else 0):
        half = np.isin(pairs, rng.permutation(known)[: len(known) // 2])
        for training in (half, ~half):
            yield np.flatnonzero(training), np.flatnonzero(~training), labels


def _prompt(example: Example) -> str:
    return "\n".join(message.content for message in example.messages)


def _rounded(value: float) -> float:
    return round(float(value), 3)


def _held_out_notes(domains: Sequence[Domain]) -> Iterator[str]:
    for domain in domains:
        yield from domain.policy.notes.model_dump().values()
        for name, framing in load_framings().items():
            for number, template in enumerate(framing.paraphrases, 1):
                yield framing_note(template, domain.policy, f"framing {name}, paraphrase {number}")


def _runs(text: str, names: Iterable[str] = ()) -> set[tuple[str, ...]]:
    """Every six words in a row; a name counts as one."""
    for number, name in enumerate(names):
        text = text.replace(name, f"NAME{number}")
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1)}
