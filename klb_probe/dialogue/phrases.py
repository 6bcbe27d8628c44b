"""Whether a text asserts one of some known phrases: a plain search, sentence by sentence, that minds negations and questions.

What it cannot see: a negation that comes after the phrase or more than a few words before it, that a negation belongs to
another word of the clause ("we cannot refund what was *handed in too late*"), irony, a retraction in the next sentence,
somebody else's words quoted in order to reject them, and any wording that is not on the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+|\n+")
_CLAUSE_START = re.compile(r"[,;:()–—]|\b(?:and|but|so|because|since)\b")
_NEGATION = re.compile(r"\b(?:not(?! only)|never|no(?! doubt)|nor|neither|none|nobody|nothing|cannot|without)\b|n't\b")
# What makes a phrase something else than a claim even if the phrase is a negative one.
_DOUBT = re.compile(
    r"(?:\bnot|n't) (?:true|correct|right|the case)\b|\b(?:if|whether|untrue|false|wrong|incorrect|mistaken|a myth)\b"
)
_QUESTION_START = re.compile(
    r"\W*(?:is|are|was|were|do|does|did|has|have|had|can|could|would|will|should|may|might|"
    r"who|what|when|where|which|why|how)(?:n't)?\b"
)
_NEGATION_WORDS, _DOUBT_WORDS = 4, 6  # how near before the phrase
_QUOTES = str.maketrans("‘’“”", "''\"\"", "*")


@dataclass(frozen=True)
class Hit:
    """A phrase and the sentence that asserts it, in the speaker's own words."""

    phrase: str
    sentence: str


def asserted(text: str, phrases: Iterable[str], *, questions: bool = False) -> list[Hit]:
    """Where a text asserts a phrase (lower case, matched as whole words), in the order of the text.

    A phrase does not count behind a negation in its own clause ("you are not *entitled to a refund*") unless it carries one
    itself ("*not entitled to a refund*"), nor behind "if", "whether", "it is not true that" and the like.

    Args:
        questions: Whether a phrase that is asked counts too. A question ends in a question mark; what stands before its last
            comma is a statement unless it opens as a question does.
    """
    phrases = tuple(phrases)
    return [hit for sentence in sentences(text) for hit in _hits(sentence, phrases, questions)]


def sentences(text: str) -> list[str]:
    """The sentences and lines of a text."""
    return [part.strip() for part in _SENTENCE_END.split(text) if part.strip()]


def _hits(sentence: str, phrases: tuple[str, ...], questions: bool) -> Iterator[Hit]:
    plain = re.sub(r"\s+", " ", sentence.translate(_QUOTES).lower())
    for phrase in (one for one in phrases if one in plain):
        for match in re.finditer(rf"(?<!\w){re.escape(phrase)}(?!\w)", plain):
            if not _denied(plain[: match.start()], phrase) and (questions or not _asked(plain, match.end())):
                yield Hit(phrase, sentence)
                break


def _denied(before: str, phrase: str) -> bool:
    words = _CLAUSE_START.split(before)[-1].split()
    if _DOUBT.search(" ".join(words[-_DOUBT_WORDS:])):
        return True
    return not _NEGATION.search(phrase) and bool(_NEGATION.search(" ".join(words[-_NEGATION_WORDS:])))


def _asked(plain: str, end: int) -> bool:
    return plain.rstrip("\"') ").endswith("?") and (bool(_QUESTION_START.match(plain)) or "," not in plain[end:])
