"""Trial of JSON schemas, as a process: ``python -m gradwire_server.schema_trial`` (see :mod:`.helper_processes`).

A schema of a few hundred bytes may keep llguidance busy for hours: it decides whether a text can match several patterns
at once (``allOf``) in time that doubles with each pattern. So a schema is compiled here first, for a vocabulary of
bytes; what compiles here compiles for a model's tokens too.
"""

from __future__ import annotations

import llguidance

from gradwire_server.helper_processes import Told, serve


def tried(schema: bytes) -> tuple[Told, bytes]:
    """Compile a schema; why it is refused, if it is."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema.decode())
    except ValueError as error:
        return {"refused": str(error)}, b""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return ({"refused": matcher.get_error()} if matcher.is_error() else {}), b""


if __name__ == "__main__":
    serve(tried)
