"""Text to fit a lens on: wikitext, a file or folder of one's own, or text that the model samples itself."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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


_SUFFIXES = (".txt", ".jsonl", ".parquet")
# The reference recipe: web-like text of the hub's wikitext, at most this many characters of each record.
_WIKITEXT = ("Salesforce/wikitext", "wikitext-103-raw-v1")
_WIKITEXT_CHARACTERS = 2000
# Template boilerplate that prompts share is fitted again and again; from this share on it is worth a warning.
_SHARED_PREFIX, _DISTINCT = 0.35, 0.9


SHUFFLED = ", tokens shuffled"


@dataclass(frozen=True)
class Corpus:
    """Prompts as token ids.

    Attributes:
        prompts: Token ids of each prompt, at most ``max_tokens`` long.
        source: Where the text is from, in words.
        bos: The BOS policy the ids were made under.
        max_tokens: The longest a prompt may be.
        n_short: Texts that were passed over because they were too short to fit on.
    """

    prompts: tuple[tuple[int, ...], ...]
    source: str
    bos: BosPolicy
    max_tokens: int
    n_short: int = 0

    @property
    def sha256(self) -> str:
        """Hash of the ids."""
        return hashlib.sha256(repr(self.prompts).encode()).hexdigest()

    @property
    def shared_prefix(self) -> float:
        """Share of a prompt that it has in common with another from its start on, mean over pairs (of the first 64)."""
        pairs = itertools.combinations(self.prompts[:64], 2)
        shares = [_common(a, b) / max(1, min(len(a), len(b))) for a, b in pairs]
        return sum(shares) / len(shares) if shares else 0.0

    def shuffled(self, seed: int) -> Corpus:
        """The same tokens of each prompt in random order, its first one kept in place (it may be a BOS): a control text."""
        chance = random.Random(seed)
        prompts = tuple((ids[0], *chance.sample(ids[1:], len(ids) - 1)) for ids in self.prompts)
        return replace(self, prompts=prompts, source=self.source + SHUFFLED)

    def warning(self) -> str | None:
        """One line about prompts that repeat each other, or None."""
        n, distinct = len(self.prompts), len(set(self.prompts))
        if distinct < _DISTINCT * n:
            return f"corpus {self.source}: only {distinct} of {n} prompts are distinct; the lens sees less text than it seems"
        if (share := self.shared_prefix) >= _SHARED_PREFIX:
            return f"corpus {self.source}: prompts share their first {share:.0%} on average; fit on text without a template"
        return None


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of a common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class CorpusRequest:
    """Which text a fit asks for.

    Attributes:
        what: ``sampled``, ``wikitext``, a file (.txt, .jsonl, .parquet) or a folder of such files.
        n: Prompts, at most.
        max_tokens: Tokens a prompt, at most.
        min_tokens: Texts of fewer are passed over and counted.
        bos: BOS policy.
        seed: Seed of sampled text and of shuffling.
        shuffle: Put the tokens of each prompt in random order.
    """

    what: str
    n: int
    max_tokens: int
    min_tokens: int = 1
    bos: BosPolicy = "auto"
    seed: int = 0
    shuffle: bool = False

    def make(self, model: ResidualModel, progress: Callable[[int], object] = lambda _: None) -> Corpus:
        """The corpus; ``progress`` is called with the number of prompts just sampled."""
        corpus = self._made(model, progress)
        return corpus.shuffled(self.seed) if self.shuffle else corpus

    def _made(self, model: ResidualModel, progress: Callable[[int], object]) -> Corpus:
        if self.what == "sampled":
            return sampled_corpus(model, n=self.n, max_tokens=self.max_tokens, seed=self.seed, bos=self.bos, progress=progress)
        if self.what == "wikitext":
            texts, source = _wikitext_texts(), f"{_WIKITEXT[0]} {_WIKITEXT[1]} train"
            return self._collect((self._ids(model, text) for text in texts), source)
        path = Path(self.what)
        source = f"{'folder' if path.is_dir() else 'file'} {path.name}"
        return self._collect(self._of_path(model, path), source)

    def _of_path(self, model: ResidualModel, path: Path) -> Iterator[tuple[int, ...]]:
        """Prompts of a file or folder, short ones included."""
        for file in _files(path):
            if file.suffix in (".jsonl", ".parquet"):
                texts = _jsonl_texts(file) if file.suffix == ".jsonl" else _parquet_texts(file)
                yield from (self._ids(model, text) for text in texts)
            else:
                yield from self._joined_paragraphs(model, file)

    def _joined_paragraphs(self, model: ResidualModel, file: Path) -> Iterator[tuple[int, ...]]:
        """Prompts of a text file: paragraphs (blank-line separated), joined until they fill a prompt."""
        text = ""
        for paragraph in _paragraphs(file):
            text = f"{text}\n\n{paragraph}" if text else paragraph
            ids = self._ids(model, text)
            if len(ids) == self.max_tokens:
                yield ids
                text = ""
        if text:
            yield self._ids(model, text)

    def _ids(self, model: ResidualModel, text: str) -> tuple[int, ...]:
        return tuple(encode_text(model.tokenizer, text, self.bos)[: self.max_tokens])

    def _collect(self, prompts: Iterable[tuple[int, ...]], source: str) -> Corpus:
        """The first ``n`` prompts that are long enough; the short ones before the last of them are counted."""
        kept: list[tuple[int, ...]] = []
        short = 0
        for ids in prompts:
            if len(ids) < self.min_tokens:
                short += 1
                continue
            kept.append(ids)
            if len(kept) == self.n:
                break
        if not kept:
            short_ones = f"; {short} texts are shorter than {self.min_tokens} tokens" if short else ""
            raise KlbError(f"corpus {self.what} has no text to fit on{short_ones}")
        return Corpus(tuple(kept), source, self.bos, self.max_tokens, short)


def _files(path: Path) -> list[Path]:
    """A file itself, or a folder's text files in order."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    if not files:
        raise KlbError(f"corpus folder {path} has no {', '.join(_SUFFIXES)} files")
    return files


def _paragraphs(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise KlbError(f"cannot read corpus {file}: {getattr(error, 'strerror', None) or error}") from None
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


def _jsonl_texts(file: Path) -> Iterator[str]:
    """Field ``text`` of each line."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    record = json.loads(line)
                    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                        raise KlbError(f"corpus {file}, line {number}: no field 'text' that holds a string")
                    yield record["text"]
    except json.JSONDecodeError as error:
        raise KlbError(f"corpus {file}, line {number}: not JSON ({error.msg})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KlbError(f"cannot read corpus {file}: {getattr(error, 'strerror', None) or error}") from None


def _parquet_texts(file: Path) -> Iterator[str]:
    """Column ``text``."""
    import pandas as pd

    try:
        texts = pd.read_parquet(file, columns=["text"])["text"]
    except ImportError as error:
        raise KlbError(f"corpus {file}: reading parquet needs pyarrow: pip install pyarrow ({error})") from None
    except Exception as error:  # pyarrow's own exception classes are many
        raise KlbError(f"corpus {file}: no readable column 'text' ({_first_line(error)})") from None
    yield from (text for text in texts if isinstance(text, str))


def _wikitext_texts() -> Iterator[str]:
    """Paragraphs of the hub's wikitext-103, without blank lines and headings."""
    try:
        import datasets
    except ImportError:
        raise KlbError("--corpus wikitext needs the datasets package: pip install datasets") from None
    try:
        rows: Iterable[dict[str, Any]] = datasets.load_dataset(*_WIKITEXT, split="train")
    except Exception as error:  # hub, network and cache each raise their own
        raise KlbError(
            f"{_WIKITEXT[0]} cannot be loaded from the hub or its cache ({_first_line(error)}); "
            "pass --corpus with a file, or --corpus sampled"
        ) from None
    for row in rows:
        text = row["text"].strip()
        if text and not text.startswith("= "):
            yield text[:_WIKITEXT_CHARACTERS]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def file_corpus(model: ResidualModel, path: Path, *, n: int, max_tokens: int, bos: BosPolicy = "auto") -> Corpus:
    """The first ``n`` prompts of a file or folder of text.

    A .txt file is cut into paragraphs (blank-line separated); those shorter than ``max_tokens`` are joined with the next
    ones, so that a prompt is about ``max_tokens`` long. In .jsonl and .parquet files each record's ``text`` is a prompt.
    """
    return CorpusRequest(str(path), n, max_tokens, bos=bos).make(model)


def sampled_corpus(
    model: ResidualModel,
    *,
    n: int,
    max_tokens: int,
    seed: int = 0,
    bos: BosPolicy = "auto",
    progress: Callable[[int], object] = lambda _: None,
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
    return Corpus(tuple(prompts), sampled_source(model, seed), bos, max_tokens)


def sampled_source(model: ResidualModel, seed: int) -> str:
    """How sampled text is named in a lens's metadata."""
    return f"sampled from {model.name} at temperature 1, seed {seed}"
