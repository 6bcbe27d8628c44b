"""Text to fit a lens on: a text file, or text that the model samples itself."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from klb_probe.errors import KlbError
from klb_probe.models.chat import BosPolicy, automatic_prefix, encode_text
from klb_probe.models.residual_model import ResidualModel, chunks

# First words of sampled prompts, so that they spread over kinds of text instead of one most likely beginning.
_OPENERS = (
    "The", "In", "A", "When", "After", "How to", "According to", "She", "He", "It was", "There are", "This article",
    "Once upon", "Many people", "Researchers", "My", "We", "If you", "For years", "On Monday", "The company", "As the",
    "Although", "Dear", "Chapter", "The history of", "First", "During", "To make", "Children", "Water", "Music",
    "The city of", "Most", "One of the", "Farmers", "Your", "What is", "Some", "At the end of",
)  # fmt: skip
_SAMPLE_BATCH = 16
_LONGEST_OPENER = 8


@dataclass(frozen=True)
class Corpus:
    """Prompts as token ids.

    Attributes:
        prompts: Token ids of each prompt, at most ``max_tokens`` long.
        source: Where the text is from, in words.
        bos: The BOS policy the ids were made under.
        max_tokens: The longest a prompt may be.
    """

    prompts: tuple[tuple[int, ...], ...]
    source: str
    bos: BosPolicy
    max_tokens: int

    @property
    def sha256(self) -> str:
        """Hash of the ids."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()


def file_corpus(model: ResidualModel, path: Path, *, n: int, max_tokens: int, bos: BosPolicy = "auto") -> Corpus:
    """The first ``n`` prompts of a text file: its paragraphs (blank-line separated), each cut to ``max_tokens``.

    Paragraphs shorter than ``max_tokens`` are joined with the next ones, so that a prompt is about ``max_tokens`` long.
    """
    try:
        paragraphs = [p.strip() for p in path.read_text(encoding="utf-8").split("\n\n") if p.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise KlbError(f"cannot read corpus {path}: {getattr(error, 'strerror', None) or error}") from None
    prompts: list[tuple[int, ...]] = []
    text = ""
    for paragraph in paragraphs:
        text = f"{text}\n\n{paragraph}" if text else paragraph
        ids = encode_text(model.tokenizer, text, bos)
        if len(ids) >= max_tokens:
            prompts.append(tuple(ids[:max_tokens]))
            text = ""
        if len(prompts) == n:
            break
    if text and len(prompts) < n:
        prompts.append(tuple(encode_text(model.tokenizer, text, bos)))
    if not prompts:
        raise KlbError(f"corpus {path} is empty")
    return Corpus(tuple(prompts), f"file {path.name}", bos, max_tokens)


def sampled_corpus(
    model: ResidualModel,
    *,
    n: int,
    max_tokens: int,
    seed: int = 0,
    bos: BosPolicy = "auto",
    progress: Callable[[int], None] = lambda _: None,
) -> Corpus:
    """``n`` prompts of ``max_tokens`` tokens sampled from the model at temperature 1, each from a few opening words.

    Args:
        progress: Called with the number of prompts just sampled.
    """
    if max_tokens < _LONGEST_OPENER:
        raise KlbError(f"sampled prompts need at least {_LONGEST_OPENER} tokens, not {max_tokens}")
    openers = [_OPENERS[i % len(_OPENERS)] for i in range(n)]
    random.Random(seed).shuffle(openers)
    starts = [encode_text(model.tokenizer, opener, bos) or automatic_prefix(model.tokenizer) for opener in openers]
    by_length: dict[int, list[list[int]]] = {}
    for start in starts:
        by_length.setdefault(len(start), []).append(start)
    prompts: list[tuple[int, ...]] = []
    for length, group in sorted(by_length.items()):
        for batch in chunks(group, _SAMPLE_BATCH):
            new = model.generate(batch, max_tokens - length, temperature=1.0, seed=seed + len(prompts), stop=False)
            prompts += [(*start, *rest) for start, rest in zip(batch, new, strict=True)]
            progress(len(batch))
    source = f"sampled from {model.name} at temperature 1, seed {seed}"
    return Corpus(tuple(prompts), source, bos, max_tokens)
