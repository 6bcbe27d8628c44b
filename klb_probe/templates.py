"""Prompt templates: Jinja files of a package, rendered as plain text."""

from __future__ import annotations

import jinja2


def templates_of(package: str) -> jinja2.Environment:
    """The templates in a package's ``templates`` folder; a word that is missing is an error, never a gap."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader(package, "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,  # prompts are plain text
    )
