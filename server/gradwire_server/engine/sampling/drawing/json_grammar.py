"""Tokens that keep a sample's text within a JSON schema, by llguidance; needs ``gradwire[guided]``."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError, panics_as_errors
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.helper_processes import MEMORY_BYTES, Helpers

TRIAL_S = 10.0
"""Seconds that a schema may take to compile; ordinary ones take milliseconds."""
_TRIALS = Helpers("gradwire_server.schema_trial", 1)


class JsonGrammar:
    """The grammar of a JSON schema, compiled for a model's tokens.

    Args:
        schema: JSON schema as JSON.
        tokenizer: The model's tokenizer.
        vocab_size: Number of the model's logits.
        end_tokens: The model's end tokens, allowed once the text is complete.

    Raises:
        OperationError: INVALID_ARGUMENT for a schema that is none, or uses what llguidance does not know;
            LIMIT_EXCEEDED for one that takes too long or too much memory to compile; UNSUPPORTED without llguidance, or
            for a tokenizer that it cannot read.
    """

    def __init__(self, schema: str, tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> None:
        guidance = _llguidance()
        if not end_tokens:
            raise _unsupported("the model has no end token, which ends a JSON document")
        _try(schema)
        matcher = guidance.LLMatcher
        try:
            grammar = matcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        except ValueError as error:
            raise _invalid(error) from None
        self._first = matcher(_tokens(tokenizer, vocab_size, end_tokens), grammar, log_level=0)
        if self._first.is_error():
            raise _invalid(self._first.get_error())
        self._vocab_size = vocab_size

    def begin(self) -> JsonText:
        """Begin a text."""
        return JsonText(self._first.deep_copy(), self._vocab_size)


class JsonText:
    """One text within a grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """``[V]`` which tokens may come next; at least one.

        Raises:
            OperationError: LIMIT_EXCEEDED if the text became too complex for llguidance.
        """
        with panics_as_errors():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little").astype(np.bool_)
        if self._matcher.is_error() or not allowed.any():
            raise OperationError(
                training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
                f"the JSON schema cannot be followed further: {_one_line(self._matcher.get_error())}",
                field="json_schema",
            )
        return allowed

    def add(self, token: int) -> None:
        """Add one of the tokens that were allowed."""
        with panics_as_errors():
            self._matcher.consume_token(token)


def _try(schema: str) -> None:
    """Compile a schema in a process that can be ended, before it keeps this one busy."""
    try:
        told, _ = _TRIALS.ask(schema.encode(), TRIAL_S)
    except TimeoutError:
        raise _too_complex(f"takes more than {TRIAL_S:g} s to compile") from None
    except EOFError:
        raise _too_complex(f"takes more than {MEMORY_BYTES >> 30} GiB to compile, or llguidance fails on it") from None
    if "refused" in told:
        raise _invalid(told["refused"])


@lru_cache(maxsize=8)
def _tokens(tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    """The vocabulary as llguidance wants it; a second for a large one, so it is kept."""
    try:
        return _llguidance().LLTokenizer(tokenizer.tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(end_tokens))
    except ValueError as error:
        raise _unsupported(f"llguidance cannot read the model's tokenizer ({_one_line(error)})") from None


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise _unsupported("this server lacks llguidance: pip install gradwire[guided]") from None


def _unsupported(reason: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_UNSUPPORTED, f"json_schema cannot be followed: {reason}", field="json_schema"
    )


def _too_complex(what: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
        f"the JSON schema {what}; give it fewer patterns (above all in allOf) and fewer alternatives",
        field="json_schema",
    )


def _invalid(reason: object) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
        f"json_schema is not a JSON schema that can be followed: {_one_line(reason)}",
        field="json_schema",
        rule="a JSON schema",
    )


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
