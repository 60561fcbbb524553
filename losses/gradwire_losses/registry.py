"""The registry of losses and their declarations.

A :class:`LossSpec` is the only source of the wire's ``ListLosses``, the client's checks, the engine's work and the
reference page. A third party adds a loss with :func:`register_loss` in a file passed to ``gradwire serve
--losses`` or through the entry-point group ``gradwire.losses``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.monitoring import Range
from gradwire_losses.outputs import LossOutput

Layout = Literal["rows", "pairs", "groups"]
ScoreName = Literal[
    "logprobs",
    "entropy",
    "values",
    "rewards",
    "ref_logprobs",
    "correct",
    "candidate_logprobs",
    "mean_logprobs",
    "collision",
    "divergence",
    "token_rewards",
    "class_logits",
    "token_class_logits",
]
HeadName = Literal["", "value", "reward", "classification"]


@dataclass(frozen=True)
class FieldSpec:
    """One batch field.

    Attributes:
        name: The key in a batch.
        dtype: ``"int"``, ``"float"`` or ``"bool"`` (0 or 1).
        shapes: The accepted shapes, e.g. ``("[rows]", "[rows, tokens]")``. Dimensions: rows, samples, tokens,
            candidates.
        description: One sentence.
        required: Whether a batch must have it.
        aligned_with: For a field with a tokens dimension that is not itself ids: the ids field it follows.
        padding_mask: For an ids field: the mask field by which a client drops the padding. Pure padding masks are
            never sent.
        ids: Whether entries are token ids of the model's vocabulary.
    """

    name: str
    dtype: Literal["int", "float", "bool"]
    shapes: tuple[str, ...]
    description: str
    required: bool = False
    aligned_with: str = ""
    padding_mask: str = ""
    ids: bool = False

    @property
    def holds_log_probs(self) -> bool:
        """Whether entries are log-probabilities (by the name), which cannot be above 0."""
        return self.dtype == "float" and self.name.endswith(("log_probs", "logprobs"))


LARGEST = 3.4028234663852886e38
"""The largest float32: losses are computed with their arguments in the precision of the scores."""


class LossConfig(BaseModel):
    """Base class of the losses' arguments: unknown names, invalid values and what no float32 can hold are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @field_validator("*")
    @classmethod
    def _fits_float32(cls, value: Any) -> Any:
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(number, float) and abs(number) > LARGEST:
                raise ValueError(f"must be a number that float32 can hold, at most {LARGEST:.3g} in size")
        return value


class HeldReference(LossConfig):
    """A reference model, and how its weights are held: in 4 or 8 bits, or in host memory while they do not compute."""

    name: str = Field(description='"base", a checkpoint of an adapter, or a model name')
    quantize: Literal["nf4", "int8"] | None = None
    offload: bool = False

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.quantize and self.offload:
            raise ValueError("a reference is held in few bits or offloaded: leave out quantize or offload")
        return self


class ReferenceConfig(LossConfig):
    """Arguments of a loss that compares the policy with a frozen reference."""

    reference_model: str | HeldReference | None = Field(
        None,
        description='"base" (the run\'s base weights, adapter off), "ema", a checkpoint "RUN_ID/NAME", or a model '
        'name; {"name": NAME, "quantize": "nf4"} or "int8" holds it in few bits, in a copy of the whole model; '
        '{"name": NAME, "offload": true} holds its layers in host memory',
    )
    reference_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None,
        description="dtype of the reference's weights; None: the server's. Another dtype needs a copy of the whole "
        "model, adapter or not",
    )


class TemperatureConfig(LossConfig):
    """Arguments of a loss of log-probabilities at a temperature."""

    temperature: float = Field(
        1.0,
        gt=0,
        description="divides the logits of every log-probability in this call, including the reference's; must equal "
        "the temperature of the batch's own log-probabilities",
    )


class PolicyConfig(ReferenceConfig, TemperatureConfig):
    """Arguments of a loss that compares log-probabilities of two policies."""


class DivergenceConfig(PolicyConfig):
    """Arguments of a loss that compares whole distributions with those of ``reference_model``: score divergence."""

    beta: float = Field(
        0.5,
        ge=0,
        le=1,
        description="divergence of teacher T and student S: 0 is KL(T || S), 1 is KL(S || T), between them "
        "beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S",
    )


LossFunction = Callable[[Batch, Scores, Any], LossOutput]


@dataclass(frozen=True)
class LossSpec:
    """A loss and its declaration.

    Attributes:
        name: The wire name.
        function: ``(batch, scores, config) -> LossOutput``, pure.
        config: Pydantic model of ``loss_kwargs``.
        layout: Conversion of the batch's fields to sequences: see ``gradwire_losses.layouts``.
        fields: The batch fields.
        scores: ``(config, names of the fields present, as in Batch.fields) -> names of the scores needed``. The engine
            refuses a loss that needs ``ref_logprobs`` or ``divergence`` without a ``reference_model``.
        hints: Target ranges of its metrics: see ``gradwire_losses.monitoring``.
        optional_scores: Scores that the function uses if the run has the head for them.
        metrics: Name -> one sentence.
        reference: The paper or source of the formula.
        formula: Plain text or TeX, one line, or one line per variant.
        streams: ``(config, names of the fields present) -> bool``: whether merging the outputs over any partition of
            the examples gives the output of the whole (terms add up in sum and count, metrics merge). A loss that
            needs the whole batch at once (whitening, a penalty on the batch's KL) returns False.
        whole_batch: Which statistic of its batch the loss takes, and when: the cases in which ``streams`` is False, in
            words; empty if there are none.
        head: The head a run must have: ``""``, ``"value"``, ``"reward"`` or ``"classification"``; ``""`` if the
            loss works without a head.
    """

    name: str
    function: LossFunction
    config: type[LossConfig]
    layout: Layout
    fields: tuple[FieldSpec, ...]
    scores: Callable[[Any, frozenset[str]], frozenset[ScoreName]]
    metrics: Mapping[str, str]
    reference: str
    formula: str
    streams: Callable[[Any, frozenset[str]], bool]
    whole_batch: str = ""
    head: HeadName = ""
    optional_scores: frozenset[ScoreName] = frozenset()
    hints: Mapping[str, Range] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.function.__doc__ or "").strip().split("\n\n")[0].split())


_REGISTRY: dict[str, LossSpec] = {}


def register_loss(
    name: str,
    *,
    config: type[LossConfig] = LossConfig,
    layout: Layout = "rows",
    fields: Sequence[FieldSpec],
    scores: Sequence[ScoreName] | Callable[[Any, frozenset[str]], frozenset[ScoreName]] = ("logprobs",),
    metrics: Mapping[str, str],
    reference: str,
    formula: str,
    streams: bool | Callable[[Any, frozenset[str]], bool] = False,
    whole_batch: str = "",
    head: HeadName = "",
    optional_scores: Sequence[ScoreName] = (),
    hints: Mapping[str, Range] | None = None,
) -> Callable[[LossFunction], LossFunction]:
    """Register the decorated function as a loss. Arguments: the attributes of :class:`LossSpec`.

    Raises:
        ValueError: Another loss has the name.
    """

    def decorate(function: LossFunction) -> LossFunction:
        if name in _REGISTRY:
            raise ValueError(f"a loss named {name!r} is already registered by {_REGISTRY[name].function.__module__}")
        _REGISTRY[name] = LossSpec(
            name=name,
            function=function,
            config=config,
            layout=layout,
            fields=tuple(fields),
            scores=scores if callable(scores) else lambda config, present: frozenset(scores),
            metrics=dict(metrics),
            reference=reference,
            formula=formula,
            streams=streams if callable(streams) else lambda config, present: streams,
            whole_batch=whole_batch or ("" if streams else "whatever its function takes from all rows"),
            head=head,
            optional_scores=frozenset(optional_scores),
            hints=dict(hints or {}),
        )
        return function

    return decorate


def get_loss(name: str) -> LossSpec:
    """Return the loss of this name.

    Raises:
        KeyError: No such loss; the message lists the available ones.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise KeyError(f"there is no loss named {name!r}; there are: {', '.join(sorted(_REGISTRY))}") from None


def all_losses() -> list[LossSpec]:
    """Return every registered loss by name."""
    return [_REGISTRY[name] for name in sorted(_REGISTRY)]


def load_builtin_losses() -> None:
    """Import every module of this package, which registers its losses."""
    package = importlib.import_module("gradwire_losses")
    for module in pkgutil.iter_modules(package.__path__, "gradwire_losses."):
        importlib.import_module(module.name)


def load_plugin_losses() -> None:
    """Load the losses that installed packages provide in the entry-point group ``gradwire.losses``."""
    for entry_point in importlib.metadata.entry_points(group="gradwire.losses"):
        entry_point.load()


def load_loss_file(path: Path) -> None:
    """Run a Python file that registers losses."""
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # two files may have one name
    spec = importlib.util.spec_from_file_location(f"gradwire_user_losses_{path.stem}_{place}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where pydantic looks up the names of annotations
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
