"""Graders that ask a model: ``score_model`` and ``label_model``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gradwire.errors import GradwireError
from gradwire.rl.rewards.graders.grader import Grader, GraderError, Sample, SampleError, template_of, text_of

MAX_MESSAGES = 32
MAX_LABELS = 64
MAX_TOKENS = 1024
ROLES = ("user", "assistant", "system", "developer")


@dataclass(frozen=True)
class Question:
    """A request to a judge.

    Attributes:
        model: Its name.
        messages: The conversation, as dicts of role and content.
        json_schema: The form that the answer is held to.
        temperature, top_p, seed, max_tokens: How it is sampled.
    """

    model: str
    messages: Sequence[Mapping[str, str]]
    json_schema: Mapping[str, Any]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = MAX_TOKENS


class Judge(Protocol):
    """Answers questions."""

    async def answer(self, question: Question) -> str:
        """The text of the answer.

        Raises:
            SampleError: There is none.
        """
        ...


class ServiceJudge:
    """Asks models of a server: a base model, ``RUN_ID``, or ``RUN_ID/CHECKPOINT``.

    Args:
        service: The service returned by ``gradwire.connect``.
    """

    def __init__(self, service: Any) -> None:
        self._service = service
        self._bases: dict[str, str] = {}

    async def answer(self, question: Question) -> str:
        try:
            base = await self.base(question.model)
            rendered = await self._service.render(
                list(question.messages), train_on=None, add_generation_prompt=True, model=base
            )
            sampled = await self._service.sampling_client(question.model).sample(
                [rendered["input_ids"]], max_tokens=question.max_tokens, temperature=question.temperature,
                top_p=question.top_p, seed=question.seed, json_schema=dict(question.json_schema),
            )  # fmt: skip
        except GradwireError as error:
            raise SampleError("model_grader_server_error", f"{question.model}: {error}") from error
        return sampled.samples[0][0].text or ""

    async def base(self, model: str) -> str:
        """The base model of one of these."""
        run_id = model.partition("/")[0]
        if not run_id.startswith("run-"):
            return model
        if run_id not in self._bases:
            self._bases[run_id] = (await self._service.get_training_client(run_id, takeover=False).info()).base_model
        return self._bases[run_id]


class ModelGrader(Grader):
    """The base of both model graders: builds the question and parses the judge's answer."""

    def __init__(self, spec: Mapping[str, Any], where: str, judge: Judge | None, result: Mapping[str, Any]) -> None:
        self.name = text_of(spec, "name", where)
        self.model = text_of(spec, "model", where)
        self._judge = judge
        value = spec.get("input")
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
            raise GraderError(f"{where}input must be a list of messages, {MAX_MESSAGES} at most")
        self._messages = [_message(each, f"{where}input[{number}].") for number, each in enumerate(value)]
        self._sampling = _sampling(spec.get("sampling_params"), f"{where}sampling_params.")
        self._schema = {
            "type": "object", "properties": {"result": dict(result)}, "required": ["result"],
            "additionalProperties": False,
        }  # fmt: skip

    async def _result(self, sample: Sample) -> Any:
        """Return the ``result`` of the judge's answer.

        Raises:
            SampleError: It says nothing that can be read.
        """
        if self._judge is None:
            raise SampleError("model_grader_server_error", "there is no server whose models could be asked")
        messages = [{"role": role, "content": sample.filled(content)} for role, content in self._messages]
        text = await self._judge.answer(Question(self.model, messages, self._schema, **self._sampling))
        try:
            return json.loads(text)["result"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SampleError(
                "model_grader_parse_error", f"{self.model} said {text[:200]!r}, which has no result"
            ) from None


class ScoreModel(ModelGrader):
    """The number that a model gives: the ``result`` of the JSON object that its answer is held to, within ``range``.

    It has a hundredth of the range as its finest step, so that no answer is digits without end. Without a
    ``temperature`` the model's likeliest answer counts.
    """

    def __init__(self, spec: Mapping[str, Any], where: str, judge: Judge | None = None) -> None:
        value = spec.get("range") or [0.0, 1.0]
        numbers = (
            isinstance(value, list)
            and len(value) == 2
            and all(
                isinstance(each, int | float) and not isinstance(each, bool) and math.isfinite(each) for each in value
            )
        )
        if not numbers or value[0] >= value[1]:
            raise GraderError(f"{where}range must be two numbers, the lower one first")
        self._range = (float(value[0]), float(value[1]))
        step = 10.0 ** (math.floor(math.log10(value[1] - value[0])) - 2)
        super().__init__(
            spec, where, judge, {"type": "number", "minimum": value[0], "maximum": value[1], "multipleOf": step}
        )

    async def grade(self, sample: Sample) -> float:
        score = await self._result(sample)
        if (
            isinstance(score, bool)
            or not isinstance(score, int | float)
            or not self._range[0] <= score <= self._range[1]
        ):
            raise SampleError("model_grader_parse_error", f"{self.model} gave {str(score)[:50]}, out of its range")
        return float(score)


class LabelModel(ModelGrader):
    """1 if the label that a model gives is one of ``passing_labels``, else 0."""

    def __init__(self, spec: Mapping[str, Any], where: str, judge: Judge | None = None) -> None:
        labels, passing = _labels(spec, "labels", where), _labels(spec, "passing_labels", where)
        unknown = [each for each in passing if each not in labels]
        if unknown:
            raise GraderError(f"{where}passing_labels has {unknown[0][:50]!r}, which is none of the labels")
        self._passing = frozenset(passing)
        super().__init__(spec, where, judge, {"enum": labels})

    async def grade(self, sample: Sample) -> float:
        return float(str(await self._result(sample)) in self._passing)


def _labels(spec: Mapping[str, Any], field: str, where: str) -> list[str]:
    labels = spec.get(field)
    texts = isinstance(labels, list) and all(isinstance(each, str) and each for each in labels)
    if not texts or not 1 <= len(labels) <= MAX_LABELS:  # type: ignore[arg-type]
        raise GraderError(f"{where}{field} must be a list of texts, {MAX_LABELS} at most")
    return list(labels)  # type: ignore[arg-type]


def _message(message: Any, where: str) -> tuple[str, str]:
    """Role and template of a message."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise GraderError(f"{where}role must be one of {', '.join(ROLES)}")
    content = message.get("content")
    if isinstance(content, Mapping) and content.get("type") in ("input_text", "output_text"):
        return _role(message), template_of(content, "text", f"{where}content.")
    if not isinstance(content, str):
        raise GraderError(f"{where}content must be a text")
    return _role(message), template_of(message, "content", where)


def _role(given: Mapping[str, Any]) -> str:
    return "system" if given["role"] == "developer" else str(given["role"])


def _sampling(sampling: Any, where: str) -> dict[str, Any]:
    if sampling is None:
        return {}
    if not isinstance(sampling, Mapping):
        raise GraderError(f"{where.rstrip('.')} must be an object")
    bounds = {"temperature": (0, 100), "top_p": (0, 1), "seed": (0, 2**63), "max_completions_tokens": (1, 1 << 20)}
    settings: dict[str, Any] = {}
    for name, value in sampling.items():
        if value is None:
            continue
        if name not in bounds:
            raise GraderError(f"{where}{str(name)[:50]} is not served; there are {', '.join(bounds)}")
        least, most = bounds[name]
        whole = name in ("seed", "max_completions_tokens")
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else (int, float))
            or not least <= value <= most
        ):
            raise GraderError(f"{where}{name} must be a {'whole ' if whole else ''}number from {least} to {most}")
        settings["max_tokens" if name == "max_completions_tokens" else name] = value
    return settings
