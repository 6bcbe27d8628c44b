"""Following a reply while it is written: its private thought, and the end of its JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from klb_probe.dialogue.json_text import first_object

THINK, THOUGHT = "<think>", "</think>"


def without_thought(text: str) -> str:
    """The text after a leading ``<think>…</think>`` block; nothing at all of a thought that never ended."""
    if not text.lstrip().startswith(THINK):
        return text
    return text.partition(THOUGHT)[2].lstrip()


def text_ends(tokenizer: Any, ids: Sequence[int], text: str) -> tuple[int, ...]:
    """Characters of ``text`` after each id, where ``text`` ends what the ids decode to (a thought before it is left out)."""
    lengths = [len(tokenizer.decode(list(ids[:n]), skip_special_tokens=True)) for n in range(1, len(ids) + 1)]
    cut = lengths[-1] - len(text) if lengths else 0
    return tuple(accumulate((max(0, length - cut) for length in lengths), max))


class ObjectEnd:
    """Finds where the first JSON object outside the leading thought closes, one piece of text at a time."""

    def __init__(self) -> None:
        self._text = ""
        self._read = 0
        self._start = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def closes_in(self, piece: str) -> bool:
        """Whether the object closes in this next piece of the text."""
        self._text += piece
        if self._text.lstrip().startswith(THINK):
            end = self._text.find(THOUGHT)
            if end < 0:
                return False
            self._read = max(self._read, end + len(THOUGHT))
        unread, self._read = range(self._read, len(self._text)), len(self._text)
        return any(self._closes(index) for index in unread)

    def _closes(self, index: int) -> bool:
        character = self._text[index]
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = self._depth > 0
        elif character == "{":
            self._start = self._start if self._depth else index
            self._depth += 1
        elif character == "}" and self._depth:
            self._depth -= 1
            # A pair of braces in prose is no object.
            return self._depth == 0 and first_object(self._text[self._start : index + 1]) is not None
        return False


class Pieces:
    """The text of ids, one at a time, each character once it is whole.

    Args:
        tokenizer: Decodes ids; special tokens leave no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pending: list[int] = []

    def add(self, token: int) -> str:
        """The text this id completes."""
        self._pending.append(token)
        text = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        if text.endswith("\ufffd"):  # bytes of a character that more ids may complete
            return ""
        self._pending.clear()
        return text
