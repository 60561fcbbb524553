"""Trial of grammars, as a process: ``python -m gradwire_server.grammar_trial`` (see :mod:`.helper_processes`).

A schema of a few hundred bytes may keep llguidance busy for hours: it decides whether a text can match several patterns
at once (``allOf``) in time that doubles with each pattern. So a schema, an expression or a grammar is compiled here
first, for a vocabulary of bytes; what compiles here compiles for a model's tokens too.
"""

from __future__ import annotations

import json

import llguidance

from gradwire_server.grammar_forms import written
from gradwire_server.helper_processes import Told, serve


def tried(request: bytes) -> tuple[Told, bytes]:
    """Compile a text of a form; why it is refused, if it is."""
    asked = json.loads(request)
    try:
        grammar = written(llguidance.LLMatcher, asked["form"], asked["text"])
    except (ValueError, RecursionError) as error:
        return {"refused": str(error)}, b""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return ({"refused": matcher.get_error()} if matcher.is_error() else {}), b""


if __name__ == "__main__":
    serve(tried)
