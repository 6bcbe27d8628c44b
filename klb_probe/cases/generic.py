"""Texts for a domain that has none of its own: questions, tools, notes and personas, filled with the domain's words."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from klb_probe.cases.yaml_source import load_yaml
from klb_probe.paths import data_dir


def with_generic_texts(policy: Any) -> Any:
    """A policy's raw mapping, with each text it leaves out rendered from ``scenarios/generic.yaml``.

    Words that are missing leave gaps in the texts; validation then names the words, and not every text that needs them.
    Anything else than a mapping is handed back as it is.
    """
    if not isinstance(policy, dict):
        return policy
    words = {"customer_word": "customer", "record_word": "record", **policy}
    return {**_rendered(_templates(), words), **words}


@cache
def _templates() -> dict[str, Any]:
    return load_yaml(data_dir("scenarios") / "generic.yaml").data


def _rendered(value: Any, words: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _rendered(item, words) for key, item in value.items()}
    if isinstance(value, list):
        return [_rendered(item, words) for item in value]
    return jinja2.Template(value, undefined=jinja2.ChainableUndefined).render(words)
