"""Text to token ids, in one place: chat templates, the plain-text fallback for base models, and the BOS policy.

Backends never see text. A rendered template already holds its special tokens, so it is tokenised with none added; plain
text gets the BOS its policy asks for, once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jinja2

from klb_probe.errors import KlbError

BosPolicy = Literal["auto", "always", "never"]
Style = Literal["chat template", "chat template, system message folded into the user turn", "plain text"]

_PLAIN_TEXT = "{system}\n\n{user}\n\nAnswer:"
_SENTINEL = "klb-probe-system-sentinel"


@dataclass(frozen=True)
class ChatFormat:
    """How a tokenizer turns a system and a user message into the ids of a prompt that ends where the answer starts."""

    tokenizer: Any
    style: Style

    def encode(self, system: str, user: str) -> list[int]:
        """Ids of the prompt; its last id is the answer position."""
        text = self.render(system, user)
        if self.style == "plain text":
            return encode_text(self.tokenizer, text, "auto")
        ids = _bare_ids(self.tokenizer, text)
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise KlbError("the chat template and the tokenizer both add a BOS token; fix the template")
        return ids

    def render(self, system: str, user: str) -> str:
        """The prompt's text, generation prompt included."""
        if self.style == "plain text":
            return _PLAIN_TEXT.format(system=system, user=user)
        if self.style == "chat template":
            return _apply(self.tokenizer, [("system", system), ("user", user)])
        return _apply(self.tokenizer, [("user", f"{system}\n\n{user}")])

    @property
    def answer_prefix(self) -> str:
        """What a one-word answer starts with: a space after plain text, nothing after white space or a special token."""
        if self.style == "plain text":
            return " "
        text = self.render("s", "u")
        last = _bare_ids(self.tokenizer, text)[-1]
        ends_open = text[-1].isspace() or last in self.tokenizer.all_special_ids
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
    return ChatFormat(
        tokenizer, "chat template" if accepts_system else "chat template, system message folded into the user turn"
    )


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


def _apply(tokenizer: Any, messages: list[tuple[str, str]]) -> str:
    # enable_thinking is read by the templates of reasoning models and ignored by all others.
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


def _bare_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
