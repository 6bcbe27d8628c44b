"""The sidecar of a trajectory file: token ids of every gate reply and agent turn, as they happened.

``turns_<label>_<domain>_<delta_set>.jsonl``, one line a turn: trajectory, round, case, part (gate or agent), turn, ``shared``
and ``prompt_ids`` (the prompt is the first ``shared`` ids of the line before it in the same round, then these), ``ids``
(generated), ``text``, and for the agent ``tool``, ``message`` and ``message_span``: the half-open range of generated ids that
hold the message's words, or null with ``span_missing`` saying why. Nothing is ever rendered again from text.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from klb_probe.errors import KlbError
from klb_probe.files import replacing

log = logging.getLogger(__name__)


def sidecar_path(trajectories: Path) -> Path:
    """The sidecar's place beside its trajectory file."""
    return trajectories.with_name(trajectories.name.replace("trajectories_", "turns_", 1))


def packed(turns: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turns of one round with each prompt cut to what the one before did not hold."""
    before: Sequence[int] = ()
    for turn in turns:
        ids = list(turn["prompt_ids"])
        pairs = enumerate(zip(before, ids, strict=False))
        shared = next((n for n, (old, new) in pairs if old != new), min(len(before), len(ids)))
        yield {**turn, "shared": shared, "prompt_ids": ids[shared:], "ids": list(turn["ids"])}
        before = ids


def read_turns(path: Path) -> Iterator[dict[str, Any]]:
    """Turns with whole prompts. A line that was cut off when a run died is reported and ignored."""
    before: list[int] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)
        except ValueError:
            if number == len(lines):
                log.warning("%s:%d: cut off in the middle of a line; that turn is ignored", path, number)
                return
            raise KlbError(f"{path}:{number}: not JSON") from None
        before = [*before[: turn.pop("shared")], *turn["prompt_ids"]]
        yield {**turn, "prompt_ids": list(before)}


def drop_turns_without_rounds(path: Path, rounds: set[tuple[str, int]]) -> None:
    """Cut a sidecar to the rounds on file: a run that died wrote turns, perhaps half a line, of one to be played again."""
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")[:-1]
    kept = [line for line in lines if line and (turn := json.loads(line)) and (turn["trajectory"], turn["round"]) in rounds]
    if len(kept) < len(lines) or not path.read_bytes().endswith(b"\n"):
        with replacing(path) as partial:
            partial.write_bytes(b"".join(line + b"\n" for line in kept))


def message_span(text: str, message: str, ends: Sequence[int]) -> tuple[tuple[int, int] | None, str]:
    """The generated ids that hold a message's words, and why there are none.

    Args:
        text: The whole reply.
        message: The words sent, as parsed out of it.
        ends: Characters of the text after each generated id.
    """
    if not ends:
        return None, "the player gives no offsets"
    for written in (json.dumps(message, ensure_ascii=False)[1:-1], json.dumps(message)[1:-1], message):
        # After its own key, where there is one: a thought may hold the same words.
        keyed = re.search(rf'"(?:text|message|content|reply|response)"\s*:\s*"{re.escape(written)}', text)
        start = keyed.end() - len(written) if keyed else text.rfind(written)
        if written and start >= 0:
            stop = start + len(written)
            first = next((n for n, end in enumerate(ends) if end > start), len(ends))
            last = next((n for n, end in enumerate(ends) if end >= stop), len(ends) - 1)
            return (first, last + 1), ""
    return None, "the message is not in the reply as it was written (mended JSON)"
