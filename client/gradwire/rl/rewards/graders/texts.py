"""Graders that compare two texts: ``string_check`` and ``text_similarity``."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, template_of, text_of

NEEDS = "pip install 'gradwire[graders]'"
MAX_CHARS = 100_000
MODULES = {"fuzzy_match": "rapidfuzz", "bleu": "sacrebleu", "gleu": "nltk", "meteor": "nltk"}


class StringCheck(Grader):
    """1 if a comparison of two texts holds, else 0."""

    OPERATIONS: Mapping[str, Callable[[str, str], bool]] = {
        "eq": operator.eq,
        "ne": operator.ne,
        "like": lambda text, part: part in text,
        "ilike": lambda text, part: part.lower() in text.lower(),
    }

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = text_of(spec, "name", where)
        self._input, self._reference = template_of(spec, "input", where), template_of(spec, "reference", where)
        operation = text_of(spec, "operation", where)
        if operation not in self.OPERATIONS:
            raise GraderError(f"{where}operation must be one of {', '.join(self.OPERATIONS)}, not {operation[:50]!r}")
        self._holds = self.OPERATIONS[operation]

    async def grade(self, sample: Sample) -> float:
        return float(self._holds(sample.filled(self._input), sample.filled(self._reference)))


class TextSimilarity(Grader):
    """How alike two texts are, from 0 to 1.

    By ``evaluation_metric``: ``fuzzy_match``, the normalised edit similarity of rapidfuzz's ``fuzz.ratio``; ``bleu``,
    of sacrebleu's sentences; ``gleu`` and ``meteor`` of NLTK, whose METEOR here matches words and stems, no synonyms;
    ``rouge_1`` to ``rouge_5`` and ``rouge_l``, the F measures of rouge-score with its stemmer. For gleu and meteor,
    words are what is between spaces, in lower case. ``cosine`` compares embeddings, and OpenAI has it for evaluations
    only.
    """

    METRICS = ("fuzzy_match", "bleu", "gleu", "meteor", *(f"rouge_{n}" for n in (1, 2, 3, 4, 5, "l")))

    def __init__(self, spec: Mapping[str, Any], where: str) -> None:
        self.name = text_of(spec, "name", where)
        self._input, self._reference = template_of(spec, "input", where), template_of(spec, "reference", where)
        metric = text_of(spec, "evaluation_metric", where)
        if metric == "cosine":
            raise GraderError(f"{where}evaluation_metric cosine is for evaluations; take fuzzy_match or a rouge")
        if metric not in self.METRICS:
            raise GraderError(f"{where}evaluation_metric must be one of {', '.join(self.METRICS)}, not {metric[:50]!r}")
        needed = MODULES.get(metric, "rouge_score")
        if find_spec(needed) is None:
            raise GraderError(f"{where}evaluation_metric {metric} needs {needed}: {NEEDS}")
        self._metric = metric

    async def grade(self, sample: Sample) -> float:
        text, reference = sample.filled(self._input)[:MAX_CHARS], sample.filled(self._reference)[:MAX_CHARS]
        return await asyncio.to_thread(lambda: _similarity(self._metric)(text, reference))


@cache
def _similarity(metric: str) -> Callable[[str, str], float]:
    """The function of a text and its reference. It takes half a second to import some of their modules."""
    if metric == "fuzzy_match":
        from rapidfuzz import fuzz

        return lambda text, reference: fuzz.ratio(text, reference) / 100
    if metric == "bleu":
        import sacrebleu

        return lambda text, reference: sacrebleu.sentence_bleu(text, [reference]).score / 100
    if metric == "gleu":
        from nltk.translate.gleu_score import sentence_gleu

        return lambda text, reference: float(sentence_gleu([_words(reference)], _words(text))) if text.split() else 0.0
    if metric == "meteor":
        from nltk.translate.meteor_score import single_meteor_score

        return lambda text, reference: float(
            single_meteor_score(_words(reference), _words(text), wordnet=_NoSynonyms())
        )
    from rouge_score.rouge_scorer import RougeScorer

    name = "rougeL" if metric == "rouge_l" else metric.replace("_", "")
    scorer = RougeScorer([name], use_stemmer=True)
    return lambda text, reference: float(scorer.score(reference, text)[name].fmeasure)


def _words(text: str) -> list[str]:
    return text.lower().split()


class _NoSynonyms:
    """In place of WordNet, which NLTK would download."""

    def synsets(self, word: str) -> list[Any]:
        return []
