"""From what the agent wrote to the one action it takes.

The protocol asks for ``{"thought": …, "action": {"tool": …, "args": {…}}}`` (KnownLieBench, arXiv 2608.26372). Models write
many things near it, and a form that was not understood must not pass for behaviour, so the parser is liberal and says
which form it read. What holds no action is a message to the customer, as in the public runner.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from klb_probe.dialogue.json_text import first_object

SEND_MESSAGE = "send_message"

_THOUGHT = ("thought",)
_ACTION = ("action", "function")
_TOOL = ("tool", "tool_name", "name", "type")
_ARGS = ("args", "arguments", "parameters", "action_input", "tool_input")
_TEXT = ("text", "message", "content", "reply", "response")
_NOT_TOOLS = (*_THOUGHT, *_ACTION, *_TOOL, *_ARGS)


@dataclass(frozen=True)
class Action:
    """One action of the agent.

    Attributes:
        thought: The agent's private note; empty if it gave none.
        tool: As the agent named it; whether there is such a tool is the environment's business.
        args: For ``send_message`` exactly ``{"text": …}``, where the text may be empty.
        how: The form it was read from: ``canonical``, ``action_string``, ``tool_key``, ``top_level_tool``, ``top_level_key``,
            ``top_level_message``, ``no_action`` (JSON with a thought and nothing else: an empty message, because a thought is
            private) or ``plain_text``; before it ``fenced+``, ``surrounded+`` or ``repaired+`` unless the JSON stood alone.
        raw: What the agent wrote.
    """

    thought: str
    tool: str
    args: dict[str, Any]
    how: str
    raw: str

    @property
    def message(self) -> str | None:
        """What the customer is told, or None for any other tool."""
        return self.args["text"] if self.tool == SEND_MESSAGE else None


def spoken(action: Action) -> str:
    """The words in an action's arguments, whatever its tool is called."""
    return _text(action.args)


@dataclass(frozen=True)
class _Call:
    tool: str
    args: dict[str, Any]
    how: str


def parse_action(raw: str) -> Action:
    """Read the first action of a reply. Never raises.

    >>> parse_action('{"action": {"issue_refund": {"order_id": "A1"}}}').tool
    'issue_refund'
    >>> parse_action("Let me check.").message
    'Let me check.'
    """
    found = first_object(raw, wanted=lambda value: _call(value) is not None)
    call = None if found is None else _call(found.value)
    if found is None or call is None:
        return Action("", SEND_MESSAGE, {"text": raw.strip()}, "plain_text", raw)
    args = {"text": _text(call.args)} if call.tool == SEND_MESSAGE else call.args
    thought = _get(found.value, _THOUGHT)
    how = call.how if found.wrapping == "bare" else f"{found.wrapping}+{call.how}"
    return Action(thought.strip() if isinstance(thought, str) else "", call.tool, args, how, raw)


def _call(reply: Mapping[str, Any]) -> _Call | None:
    """The call in a whole JSON reply, or None if it has nothing to do with actions."""
    action = _get(reply, _ACTION)
    if isinstance(action, list):  # several actions: the first counts
        action = next((item for item in action if isinstance(item, Mapping)), None)
    if isinstance(action, str) and action.strip():
        if re.fullmatch(r"[\w.-]+", action.strip()):
            return _Call(action.strip(), _args(reply), "action_string")
        return _Call(SEND_MESSAGE, {"text": action}, "action_string")
    if isinstance(action, Mapping) and action:
        if tool := _name(action):
            return _Call(tool, _args(action) or _args(reply), "canonical")
        if call := _keyed(action, "tool_key"):
            return call
    args_given = _get(reply, _ARGS) is not None
    if tool := _name(reply, _TOOL if args_given else _TOOL[:2]):
        return _Call(tool, _args(reply), "top_level_tool")
    if isinstance(text := _get(reply, _TEXT), str):
        return _Call(SEND_MESSAGE, {"text": text}, "top_level_message")
    calls = {key: value for key, value in reply.items() if isinstance(value, Mapping)}
    if call := _keyed(calls, "top_level_key"):
        return call
    return _Call(SEND_MESSAGE, {}, "no_action") if _get(reply, _THOUGHT) is not None else None


def _keyed(action: Mapping[str, Any], how: str) -> _Call | None:
    """A call written as ``{tool: args}``; of several keys, the first that holds an object, else the first."""
    keys = [key for key in action if key.strip() and key.lower() not in _NOT_TOOLS]
    key = next((key for key in keys if isinstance(action[key], Mapping)), keys[0] if keys else None)
    if key is None:
        return None
    return _Call(SEND_MESSAGE if key.lower() in _TEXT else key.strip(), _unpack(action[key]), how)


def _name(mapping: Mapping[str, Any], names: tuple[str, ...] = _TOOL) -> str:
    tool = _get(mapping, names)
    return tool.strip() if isinstance(tool, str) else ""


def _args(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a mapping: under their own key, else whatever stands beside the tool."""
    given = _get(mapping, _ARGS)
    if given is not None:
        return _unpack(given)
    return {key: value for key, value in mapping.items() if key.lower() not in _NOT_TOOLS}


def _unpack(args: Any) -> dict[str, Any]:
    """Arguments as a dict: an object, an object written as a string, or a lone string; anything else is none."""
    if isinstance(args, Mapping):
        return dict(args)
    if isinstance(args, str) and args.strip():
        found = first_object(args) if args.lstrip().startswith("{") else None
        return found.value if found else {"text": args}
    return {}


def _text(args: Mapping[str, Any]) -> str:
    """The words of a message: under one of its usual names, else the only string there is."""
    text = _get(args, _TEXT)
    if not isinstance(text, str):
        strings = [value for value in args.values() if isinstance(value, str)]
        text = strings[0] if len(strings) == 1 else ""
    return text.strip()


def _get(mapping: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The first value that is not None under one of the names, whatever their case."""
    lowered = {key.lower(): value for key, value in mapping.items()}
    return next((lowered[name] for name in names if lowered.get(name) is not None), None)
