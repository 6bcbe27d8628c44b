"""Text to token ids, in one place: chat templates, the plain-text fallback for base models, and the BOS policy.

Backends never see text. A rendered template already holds its special tokens, so it is tokenised with none added; plain
text gets the BOS its policy asks for, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import jinja2

from klb_probe.errors import KlbError
from klb_probe.models.thinking import SWITCHES, Thinking, ends_in_thought, thinking_of

BosPolicy = Literal["auto", "always", "never"]
Style = Literal["chat template", "chat template, system message folded into the user turn", "plain text"]

# (role, content); roles are system, user and assistant.
Turn = tuple[str, str]

_PLAIN_ANSWER = "Answer:"
_SENTINEL = "klb-probe-system-sentinel"


@dataclass(frozen=True)
class ChatFormat:
    """How a tokenizer turns a conversation into the ids of a prompt that ends where the answer starts.

    Attributes:
        tokenizer: The tokenizer.
        style: What becomes of the messages.
        thinking: What keeps a reasoning model from thinking before it answers.
    """

    tokenizer: Any
    style: Style
    thinking: Thinking = Thinking()

    def encode(self, system: str, user: str) -> list[int]:
        """Ids of a system and a user message; the last id is the answer position."""
        return self.encode_chat([("system", system), ("user", user)])

    def encode_chat(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of a conversation that ends with a user turn; the last id is the answer position."""
        text = self.render_chat(turns)
        if self.style == "plain text":
            return encode_text(self.tokenizer, text, "auto")
        ids = _bare_ids(self.tokenizer, text)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise KlbError("the chat template and the tokenizer both add a BOS token; fix the template")
        return ids

    def render(self, system: str, user: str) -> str:
        """The text of a system and a user message, generation prompt included."""
        return self.render_chat([("system", system), ("user", user)])

    def render_chat(self, turns: Sequence[Turn]) -> str:
        """The conversation's text, generation prompt included; one system message at most, and it comes first.

        Turns of one role in a row become one, a blank line between them: some templates demand alternation.
        """
        roles = [role for role, _ in turns]
        if not roles or roles[-1] != "user" or "system" in roles[1:] or not {*roles} <= {"system", "user", "assistant"}:
            raise KlbError(f"a conversation is one system turn at most, then user and assistant turns, user last; not {roles}")
        if self.style == "plain text":
            spoken = [f"{_PLAIN_ANSWER} {content}" if role == "assistant" else content for role, content in turns]
            return "\n\n".join([*spoken, _PLAIN_ANSWER])
        if self.style != "chat template":  # the system message is the first words of the user
            turns = [("user" if role == "system" else role, content) for role, content in turns]
        try:
            return _apply(self.tokenizer, _alternating(turns)) + self.thinking.suffix
        except jinja2.TemplateError as error:
            raise KlbError(f"the chat template refuses turns of {', '.join(roles)}: {error}") from error

    @property
    def answer_prefix(self) -> str:
        """What a one-word answer starts with: a space after plain text, nothing after white space or a special token."""
        if self.style == "plain text":
            return " "
        text = self.render("s", "u")
        last = _bare_ids(self.tokenizer, text)[-1]
        ends_open = text[-1].isspace() or last in self.tokenizer.all_special_ids or ends_in_thought(text)
        return "" if ends_open else " "

    def next_id(self, word: str, prefix: str | None = None) -> int | None:
        """The id of ``word`` where an answer starts, or None if it is not a single token there.

        ``prefix`` stands before the word: :attr:`answer_prefix` by default.
        """
        prefix = self.answer_prefix if prefix is None else prefix
        before = self.render("s", "u")
        prompt = _bare_ids(self.tokenizer, before)
        answered = _bare_ids(self.tokenizer, before + prefix + word)
        if answered[: len(prompt)] == prompt and len(answered) == len(prompt) + 1:
            return answered[-1]
        return None


def probe_chat_format(tokenizer: Any) -> ChatFormat:
    """Find out, once, what a tokenizer's template accepts: a system message, none, or no chat at all."""
    if not getattr(tokenizer, "chat_template", None):
        return ChatFormat(tokenizer, "plain text")
    try:
        accepts_system = _SENTINEL in _apply(tokenizer, [("system", _SENTINEL), ("user", "u")])
    except (jinja2.TemplateError, ValueError):
        accepts_system = False
    try:
        turns = [*([("system", "s")] if accepts_system else []), ("user", "u")]
        thinking = thinking_of(tokenizer.get_chat_template(), lambda on: _apply(tokenizer, turns, thinking=on))
    except (jinja2.TemplateError, ValueError):  # said when a conversation is rendered
        thinking = Thinking()
    style: Style = "chat template" if accepts_system else "chat template, system message folded into the user turn"
    return ChatFormat(tokenizer, style, thinking)


def encode_text(tokenizer: Any, text: str, bos: BosPolicy) -> list[int]:
    """Ids of plain text. ``auto`` prepends what the tokenizer itself would; ``always`` and ``never`` force one BOS or none."""
    ids = _bare_ids(tokenizer, text)
    if bos == "never":
        return ids
    if bos == "always":
        if tokenizer.bos_token_id is None:
            raise KlbError("BOS policy 'always', but this tokenizer has no BOS token")
        return [tokenizer.bos_token_id, *ids]
    return [*automatic_prefix(tokenizer), *ids]


def automatic_prefix(tokenizer: Any) -> list[int]:
    """The ids a tokenizer puts before plain text by itself (BOS on Llama and Gemma, nothing on Qwen and SmolLM2)."""
    ids, bare = list(tokenizer("a")["input_ids"]), _bare_ids(tokenizer, "a")
    start = next(i for i in range(len(ids) - len(bare) + 1) if ids[i : i + len(bare)] == bare)
    return ids[:start]


def _alternating(turns: Sequence[Turn]) -> list[Turn]:
    grouped = groupby(turns, key=lambda turn: turn[0])
    return [(role, "\n\n".join(content for _, content in members)) for role, members in grouped]


def _apply(tokenizer: Any, messages: list[Turn], thinking: bool = False) -> str:
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
        **dict.fromkeys(SWITCHES, thinking),
    )


def _bare_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
