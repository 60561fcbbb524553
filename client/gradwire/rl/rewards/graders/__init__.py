"""Graders of OpenAI's form.

``string_check`` and ``text_similarity`` compare texts, ``python`` runs code, ``score_model`` and ``label_model`` ask a
model, and ``multi`` combines others. A grader compares an answer, the *sample*, with the row that it belongs to, the
*item*. Its texts may name both, as ``{{ sample.output_text }}``, ``{{ sample.output_json.FIELD }}`` and
``{{ item.FIELD }}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, SampleError
from gradwire.rl.rewards.graders.judged import Judge, LabelModel, Question, ScoreModel, ServiceJudge
from gradwire.rl.rewards.graders.multi import Multi
from gradwire.rl.rewards.graders.source import Python
from gradwire.rl.rewards.graders.texts import StringCheck, TextSimilarity

__all__ = [
    "Grader",
    "GraderError",
    "Judge",
    "Multi",
    "Question",
    "Sample",
    "SampleError",
    "ServiceJudge",
    "grader_of",
]

ALONE: Mapping[str, Callable[[Mapping[str, Any], str], Grader]] = {
    "string_check": StringCheck,
    "text_similarity": TextSimilarity,
    "python": Python,
}
JUDGED: Mapping[str, Callable[[Mapping[str, Any], str, Judge | None], Grader]] = {
    "score_model": ScoreModel,
    "label_model": LabelModel,
}
KINDS = (*ALONE, *JUDGED, "multi")


def grader_of(spec: Any, where: str = "", judge: Judge | None = None) -> Grader:
    """Build a grader from its description.

    Args:
        where: Path of the description in a larger one, for errors.
        judge: The model for graders that need one; without it their samples cannot be graded.

    Raises:
        GraderError: It describes none.
    """
    if not isinstance(spec, Mapping):
        raise GraderError(f"{where.rstrip('.') or 'the grader'} must be an object with a type")
    kind = spec.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise GraderError(f"{where}type is {str(kind)[:50]!r}; it must be one of {', '.join(KINDS)}")
    if kind == "multi":
        return Multi(spec, where, partial(grader_of, judge=judge))
    if kind == "label_model" and not where:
        raise GraderError("type label_model gives a label and no reward: put it within a multi grader")
    return JUDGED[kind](spec, where, judge) if kind in JUDGED else ALONE[kind](spec, where)
