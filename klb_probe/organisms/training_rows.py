"""Training data as token ids: the prompts that the model meets when it is used, and the completions it is to learn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from klb_probe.errors import KlbError
from klb_probe.models.chat import ChatFormat
from klb_probe.models.residual_model import ResidualModel

HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 64
# Trees of one length go together, but only within this many batches: the order stays random on a larger scale.
_POOL = 16


class Message(BaseModel):
    """One message of a prompt."""

    role: str
    content: str


class Example(BaseModel):
    """One line of a data file; labels that training does not read are allowed.

    Attributes:
        format: What is asked for, such as eligibility or gate; held-out accuracy is told apart by it.
        wording: How it is asked for.
        pair: Examples of a pair of records share it; they are held out together.
        record_hash: Of the record that the prompt shows.
        instead: A completion with the other answer, or its beginning; where the two first differ is the token that tells the
            answer.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    messages: list[Message] = Field(min_length=1)
    completion: str = Field(min_length=1)
    kind: str | None = None
    format: str = "all"
    wording: str = ""
    pair: int | None = None
    record_hash: str | None = None
    instead: str | None = None


@dataclass(frozen=True)
class Row:
    """An example as ids; the loss covers ``ids[n_prompt:]``, the completion and the end of its turn.

    ``decisive`` is the index of the id that tells the answer; None where no other answer is known.
    """

    ids: list[int]
    n_prompt: int
    format: str
    pair: int | None = None
    decisive: int | None = None

    @property
    def n_completion(self) -> int:
        return len(self.ids) - self.n_prompt


def read_examples(path: Path, kind: str | None = None) -> list[Example]:
    """The examples of a JSONL file; KlbError names the first bad line, or data that was made for another organism."""
    if not path.is_file():
        raise KlbError(f"no such data file: {path}")
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            example = Example.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            raise KlbError(f"{path}, line {number}: {where}: {first['msg']}") from error
        if kind and example.kind not in (None, kind):
            raise KlbError(f"{path}, line {number}: an example for the {example.kind} organism, but --kind is {kind}")
        examples.append(example)
    if len(examples) < 2:
        raise KlbError(f"{path} holds {len(examples)} examples; at least 2 are needed, one of them held out")
    return examples


def encode(model: ResidualModel, examples: Sequence[Example]) -> list[Row]:
    """Examples as the model reads and writes them.

    Prompts come from the model's chat format, as in every other use of it; a completion is what the model itself would have
    to write: its own ids, then the end of the turn. Raises KlbError for a row longer than the model's context.
    """
    end = end_of_turn(model)
    rows = []
    for number, example in enumerate(examples, 1):
        prompt, said = encode_reply(model.chat, example.messages, example.completion)
        at = None
        if example.instead is not None:
            at = _first_difference([*said, end], encode_reply(model.chat, example.messages, example.instead)[1])
        row = Row([*prompt, *said, end], len(prompt), example.format, example.pair, None if at is None else len(prompt) + at)
        if model.context_length is not None and len(row.ids) > model.context_length:
            raise KlbError(f"example {number} has {len(row.ids)} tokens; the context of {model.name} is {model.context_length}")
        rows.append(row)
    return rows


def _first_difference(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Index at which two completions first differ; None if one goes on from the other."""
    return next((k for k, (one, two) in enumerate(zip(ids, other, strict=False)) if one != two), None)


def encode_reply(chat: ChatFormat, messages: Sequence[Any], completion: str) -> tuple[list[int], list[int]]:
    """Ids of a prompt, as a player renders it, and of a reply to it, without the end of the turn.

    Args:
        chat: Of the model.
        messages: Each with ``role`` and ``content``.
        completion: The reply.
    """
    prompt = chat.encode_chat([(message.role, message.content) for message in messages])
    return prompt, chat.tokenizer(chat.answer_prefix + completion, add_special_tokens=False)["input_ids"]


def end_of_turn(model: ResidualModel) -> int:
    """The id that ends an answer: what the chat template puts after one, if generation stops there; else the end of text."""
    tokenizer, end = model.tokenizer, model.tokenizer.eos_token_id
    if model.chat.style != "plain text":
        mark = "klb-probe-answer-mark"
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": mark}]
        _, found, after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(mark)
        ids = tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
        end = next((i for i in ids if i in model.stop_ids), end)
    if end is None:
        raise KlbError(f"the tokenizer of {model.name} has no end of text, so no answer can end")
    return end


def split(examples: Sequence[Example], seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on and to hold out: a random share of the pairs, no pair on both sides."""
    groups = [index if example.pair is None else f"pair {example.pair}" for index, example in enumerate(examples)]
    sizes = Counter(groups)
    wanted = max(1, min(HELD_OUT_MOST, int(HELD_OUT_SHARE * len(examples))))
    names = list(sizes)
    held: set[int | str] = set()
    for index in np.random.default_rng(seed).permutation(len(names))[:-1]:
        if sum(sizes[name] for name in held) >= wanted:
            break
        held.add(names[index])
    if not held:
        raise KlbError("all examples are of one pair, so none can be held out")
    inside = [index for index, group in enumerate(groups) if group not in held]
    return inside, [index for index, group in enumerate(groups) if group in held]


def batch_order(lengths: Sequence[int], steps: int, batch: int, at_once: int, seed: int) -> np.ndarray:
    """Which trees each step trains on, ``[steps, batch]``.

    Pass after pass over all of them, each in a new order. The ``at_once`` trees of one forward pass are of similar length, so
    that little is padding; which passes make a step is random, so that a step of several is of all lengths and formats. Decided
    by the arguments alone, so that a stopped training goes on where it was.
    """
    random, size = np.random.default_rng(seed), np.asarray(lengths)
    passes = -(-steps * batch // len(size))
    stream = np.concatenate([random.permutation(len(size)) for _ in range(passes)])[: steps * batch]
    forward = []
    for start in range(0, len(stream), _POOL * batch):
        pool = stream[start : start + _POOL * batch]
        pool = pool[np.argsort(size[pool], kind="stable")].reshape(-1, at_once)
        forward.append(pool[random.permutation(len(pool))])
    return np.concatenate(forward).reshape(steps, batch)
