"""Tokens that keep a sample's text within a JSON schema, a regular expression or a grammar.

The work is llguidance's; ``gradwire[guided]`` installs it.
"""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError, panics_as_errors
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.grammar_forms import NAMES, written
from gradwire_server.helper_processes import MEMORY_BYTES, Helpers

TRIAL_S = 10.0
"""Seconds that a grammar may take to compile; ordinary ones take milliseconds."""
_TRIALS = Helpers("gradwire_server.grammar_trial", 1)


class Grammar:
    """A grammar, compiled for a model's tokens.

    Args:
        form: ``"json_schema"``, ``"regex"`` or ``"grammar"``, the argument of sampling that has the text.
        text: A JSON schema as JSON; an expression in Rust's syntax; a grammar in Lark's form or as GBNF.
        vocab_size: Number of the model's logits.
        end_tokens: The model's end tokens, allowed once the text is complete.

    Raises:
        OperationError: INVALID_ARGUMENT for a text that is invalid or unknown to llguidance; LIMIT_EXCEEDED for one
            that takes too long or too much memory to compile; UNSUPPORTED without llguidance, or for a tokenizer that
            it cannot read.
    """

    def __init__(
        self, form: str, text: str, tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]
    ) -> None:
        guidance = _llguidance(form)
        if not end_tokens:
            raise _unsupported(form, "the model has no end token, which ends a text of a given form")
        _try(form, text)
        matcher = guidance.LLMatcher
        grammar = written(matcher, form, text)
        self._first = matcher(_tokens(form, tokenizer, vocab_size, end_tokens), grammar, log_level=0)
        if self._first.is_error():
            raise _invalid(form, self._first.get_error())
        self._form, self._vocab_size = form, vocab_size

    def begin(self) -> GuidedText:
        """Begin a text."""
        return GuidedText(self._form, self._first.deep_copy(), self._vocab_size)


class GuidedText:
    """One text within a grammar."""

    def __init__(self, form: str, matcher: Any, vocab_size: int) -> None:
        self._form, self._matcher, self._vocab_size = form, matcher, vocab_size

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
                f"the {NAMES[self._form]} cannot be followed further: {_one_line(self._matcher.get_error())}",
                field=self._form,
            )
        return allowed

    def add(self, token: int) -> None:
        """Add one of the tokens that were allowed."""
        with panics_as_errors():
            self._matcher.consume_token(token)


def _try(form: str, text: str) -> None:
    """Compile a grammar in a process that can be ended, before it keeps this one busy."""
    try:
        told, _ = _TRIALS.ask(json.dumps({"form": form, "text": text}).encode(), TRIAL_S)
    except TimeoutError:
        raise _too_complex(form, f"takes more than {TRIAL_S:g} s to compile") from None
    except EOFError:
        what = f"takes more than {MEMORY_BYTES >> 30} GiB to compile, or llguidance fails on it"
        raise _too_complex(form, what) from None
    if "refused" in told:
        raise _invalid(form, told["refused"])


@lru_cache(maxsize=8)
def _vocabulary(tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    """The vocabulary as llguidance wants it; a second for a large one, so it is kept."""
    guidance = importlib.import_module("llguidance")
    return guidance.LLTokenizer(tokenizer.tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(end_tokens))


def _tokens(form: str, tokenizer: TextTokenizer, vocab_size: int, end_tokens: tuple[int, ...]) -> Any:
    try:
        return _vocabulary(tokenizer, vocab_size, end_tokens)
    except ValueError as error:
        raise _unsupported(form, f"llguidance cannot read the model's tokenizer ({_one_line(error)})") from None


def _llguidance(form: str) -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise _unsupported(form, "this server lacks llguidance: pip install gradwire[guided]") from None


def _unsupported(form: str, reason: str) -> OperationError:
    return OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, f"{form} cannot be followed: {reason}", field=form)


def _too_complex(form: str, what: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
        f"the {NAMES[form]} {what}; give it fewer patterns (above all in allOf) and fewer alternatives",
        field=form,
    )


def _invalid(form: str, reason: object) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
        f"{form} is not a {NAMES[form]} that can be followed: {_one_line(reason)}",
        field=form,
        rule=f"a {NAMES[form]}",
    )


def _one_line(reason: object) -> str:
    return " ".join(str(reason).split())[:300]
