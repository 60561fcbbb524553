"""A sampler whose answers a test dictates: a file for ``gradwire serve --losses``, with ``GRADWIRE_SCRIPT=FILE``.

The file is JSON: of each agent ``marks``, texts that only the prompts of its main conversation have, the first of which
is in the task, and ``steps``, what the model says in each turn after it. What no marks fit is a side call. The tokens
are drawn from the model's distribution among those with which the rest of the text begins: they are rarely the ones
into which the tokenizer would split it, and their log-probabilities are the model's own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling import jobs
from gradwire_server.engine.sampling.drawing.grammar import Grammar
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams

ASIDE = "Two files"
"""The answer to side calls: titles, summaries, memories."""
TURN = "<|im_start|>assistant"
DICTATED = "dictated:"
MOST_CHARS = 16
BYTES = str.maketrans({" ": "Ġ", "\n": "Ċ"})
"""ASCII as the vocabularies of byte-level tokenizers write it."""


def answer_to(prompt: str, script: Mapping[str, Mapping[str, Any]]) -> str:
    """What the policy says to a prompt of Qwen's template."""
    for agent in script.values():
        if all(mark in prompt for mark in agent["marks"]):
            steps: Sequence[str] = agent["steps"]
            turns = prompt[prompt.index(agent["marks"][0]) :].count(TURN)
            return steps[min(turns, len(steps)) - 1]
    return ASIDE


class Dictated:
    """In the place of a grammar: one text."""

    def __init__(self, text: str, tokenizer: TextTokenizer, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._vocabulary: dict[str, int] = tokenizer.tokenizer.get_vocab()
        self._rest, self._vocab_size, self._end_tokens = text, vocab_size, list(end_tokens)

    def begin(self) -> Dictated:
        return self

    def _next(self) -> dict[int, str]:
        """The tokens with which the rest begins, and their texts."""
        parts = [self._rest[:size] for size in range(1, min(MOST_CHARS, len(self._rest)) + 1)]
        names = [(name, part) for part in parts for name in (part, part.translate(BYTES))]
        return {self._vocabulary[name]: part for name, part in names if name in self._vocabulary}

    def allowed(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[list(self._next()) if self._rest else self._end_tokens] = True
        return allowed

    def add(self, token: int) -> None:
        if self._rest:
            self._rest = self._rest[len(self._next()[token]) :]


def _grammar(form: str, text: str, *model: Any) -> Grammar | Dictated:
    return Dictated(text.removeprefix(DICTATED), *model) if text.startswith(DICTATED) else Grammar(form, text, *model)


_begin = LocalSampler.begin


def _begin_dictated(
    self: LocalSampler,
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    tokenizer: TextTokenizer | None = None,
    **options: Any,
) -> jobs.LocalJob:
    assert tokenizer is not None
    (prompt,) = tokenizer.decode(prompts[:1], skip_special_tokens=False)
    script = os.environ.get("GRADWIRE_SCRIPT")
    text = answer_to(prompt, json.loads(Path(script).read_text()) if script else {})
    if not params.forms:
        params = dataclasses.replace(params, grammar=DICTATED + text)
    return _begin(self, policy, prompts, params, tokenizer, **options)


LocalSampler.begin = _begin_dictated  # type: ignore[method-assign]
jobs.Grammar = _grammar  # type: ignore[misc,assignment]
