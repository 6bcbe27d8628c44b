"""Where the answer of a reasoning model starts: after a thought that is left empty.

Templates with a switch have it off. Others end their prompt in an open thought, leave it to the model to open one, or write
thoughts and answers to channels: the prompt is then carried on to where the answer would start.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# Read by the templates of reasoning models that have a switch, and ignored by all others.
SWITCHES = ("enable_thinking", "thinking")
_OPENED = re.compile(r"(<(?:\w+:)?(?:think|thinking|thought)>|\[THINK\])\s*$")
_CLOSES = re.compile(r"</((?:\w+:)?(?:think|thinking|thought))>")
_ENDED = re.compile(rf"(?:{_CLOSES.pattern}|<\|message\|>)$")
_CHANNEL, _TURN, _FINAL = "<|channel|>", "<|start|>assistant", "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Thinking:
    """What keeps a model from thinking before it answers.

    Attributes:
        how: In words.
        suffix: What follows a rendered prompt, so that it ends where the answer starts.
    """

    how: Literal[
        "none",
        "switched off in the template",
        "opened by the template, closed empty",
        "closed empty before the answer",
        "answer in the final channel",
    ] = "none"
    suffix: str = ""


def ends_in_thought(text: str) -> bool:
    """Whether a prompt ends in the mark that ends a thought: the answer follows without a space."""
    return bool(_ENDED.search(text))


def thinking_of(template: str, prompt: Callable[[bool], str]) -> Thinking:
    """How a chat template is kept from thinking.

    Args:
        template: Its source.
        prompt: What it makes of a conversation, generation prompt included, with thinking on or off.
    """
    off = prompt(False)
    if _CHANNEL in template and off.endswith(_TURN):
        return Thinking("answer in the final channel", _FINAL)
    if opened := _OPENED.search(off):
        tag = opened.group(1)
        blank = "" if off.endswith("\n") else "\n"
        return Thinking("opened by the template, closed empty", f"{blank}\n{tag[0]}/{tag[1:]}\n\n")
    if off != prompt(True):
        return Thinking("switched off in the template")
    # It only takes thoughts out of earlier answers, so the model opens one by itself. (Templates of models that do not think
    # may show earlier thoughts, and then hold the mark that opens one as well.)
    closes = _CLOSES.search(template)
    if closes and f"<{closes.group(1)}>" not in template and not off.rstrip().endswith(closes.group()):
        return Thinking("closed empty before the answer", f"<{closes.group(1)}>\n\n{closes.group()}\n\n")
    return Thinking()
