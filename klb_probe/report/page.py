"""The page: one HTML file with its style, its script and its data inside. Nothing is fetched, and no text becomes markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

# In the order in which they are read.
SCRIPTS = (
    *("dom.js", "chart.js", "tables.js", "overview.js", "margins.js", "pairs.js", "tokens.js", "rounds.js"),
    *("behaviour.js", "pairing.js", "probes.js", "main.js"),
)
_ASSETS = files("klb_probe.report") / "assets"
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# A lone surrogate, which a model's words may hold, has no UTF-8.
_ESCAPED = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def script_json(value: Any) -> Markup:
    """JSON that can stand in a script element: no character in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(_ESCAPED.sub(lambda found: _ESCAPES.get(found[0]) or f"\\u{ord(found[0]):04x}", text))


def render(title: str, data: Mapping[str, Any]) -> str:
    """The page.

    Args:
        title: Its title.
        data: What is parsed on demand, by the id of its element; ``index`` is read first.
    """
    style, script = _asset("page.css"), "\n".join(map(_asset, SCRIPTS))
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_asset("page.html"))
    return template.render(
        title=title,
        style=Markup(style),
        script=Markup(script),
        # Only this style and this script may run, whatever else might get into the page.
        style_hash=_hash(style),
        script_hash=_hash(script),
        data={name: script_json(value) for name, value in data.items()},
    )


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
