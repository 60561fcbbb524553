"""Bodies of requests for fine-tuning jobs."""

from __future__ import annotations

from typing import Any, Literal

from gradwire_http.models import BoundedModel
from pydantic import ConfigDict, Field, field_validator

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


class MethodSettings(BoundedModel):
    """Settings of one method."""

    model_config = ConfigDict(extra="forbid")

    hyperparameters: dict[str, Any] | None = None
    grader: dict[str, Any] | None = None


class Method(BoundedModel):
    """How to train."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["supervised", "dpo", "reinforcement"]
    supervised: MethodSettings | None = None
    dpo: MethodSettings | None = None
    reinforcement: MethodSettings | None = None

    def settings(self) -> MethodSettings:
        """The settings of the chosen method."""
        found: MethodSettings | None = getattr(self, self.type)
        return found or MethodSettings()


class Wandb(BoundedModel):
    """Where a job's metrics go in Weights & Biases."""

    model_config = ConfigDict(extra="forbid")

    project: str = Field(min_length=1, max_length=128)
    name: str | None = Field(default=None, max_length=128)
    entity: str | None = Field(default=None, max_length=128)
    tags: list[str] | None = Field(default=None, max_length=64)


class Integration(BoundedModel):
    """Where a job's metrics go besides its events."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["wandb"]
    wandb: Wandb


class CreateJob(BoundedModel):
    """``POST /v1/fine_tuning/jobs``.

    Attributes:
        gradwire: Settings of our recipe, such as ``{"lora_rank": 8}``; 0 trains all weights. ``extra_body`` of the
            ``openai`` package.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    training_file: str
    validation_file: str | None = None
    suffix: str | None = Field(default=None, min_length=1, max_length=64)
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    metadata: dict[str, Any] | None = None
    integrations: list[Integration] | None = Field(default=None, max_length=1)
    method: Method | None = None
    hyperparameters: dict[str, Any] | None = None
    gradwire: dict[str, Any] | None = None

    @field_validator("metadata")
    @classmethod
    def _short(cls, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
        if metadata is None:
            return None
        if len(metadata) > MAX_PAIRS:
            raise ValueError(f"there are {len(metadata)} pairs; {MAX_PAIRS} at most")
        for key, value in metadata.items():
            if len(key) > MAX_KEY_CHARS:
                raise ValueError(f"a key has {len(key)} characters; {MAX_KEY_CHARS} at most")
            if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS:
                raise ValueError(f"the value of {key} is no text of at most {MAX_VALUE_CHARS} characters")
        return metadata


class CreatePermissions(BoundedModel):
    """``POST /v1/fine_tuning/checkpoints/{checkpoint}/permissions``; a project is a key of this server, by its name."""

    model_config = ConfigDict(extra="forbid")

    project_ids: list[str] = Field(min_length=1, max_length=100)


class ValidateGrader(BoundedModel):
    """``POST /v1/fine_tuning/alpha/graders/validate``."""

    model_config = ConfigDict(extra="forbid")

    grader: dict[str, Any]


class RunGrader(ValidateGrader):
    """``POST /v1/fine_tuning/alpha/graders/run``."""

    model_sample: str
    item: dict[str, Any] | None = None
