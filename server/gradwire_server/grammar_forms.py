"""The forms in which a request says what a text is, as llguidance takes them."""

from __future__ import annotations

import importlib
from typing import Any

NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "grammar": "grammar"}
"""Arguments of sampling, and what they are."""


def written(matcher: Any, form: str, text: str) -> Any:
    """A grammar.

    Args:
        matcher: llguidance's class.
        form: A key of :data:`NAMES`.
        text: A JSON schema as JSON; an expression in Rust's syntax; a grammar in Lark's form or as GBNF.

    Raises:
        ValueError, RecursionError: The text is invalid.
    """
    if form == "json_schema":
        return matcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
    if form == "regex":
        return matcher.grammar_from_regex(text)
    if text.lstrip().startswith("{"):
        raise ValueError("it begins as JSON; write it in Lark's form or as GBNF")
    return matcher.grammar_from_lark(importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(text))
