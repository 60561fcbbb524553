"""Bodies of the requests of training."""

from __future__ import annotations

from typing import Any, Literal

from gradwire_http.models import BoundedModel
from pydantic import Field

from gradwire_server.doors.http.tinker.store import MAX_TTL_S, Metadata, Name

MAX_NUMBER = 2**31
"""Numbers of models, samplers and operations are below this."""


class LoraConfig(BoundedModel):
    """The adapter of a new model."""

    rank: int = Field(ge=1, le=65_536)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(BoundedModel):
    """The optimizer of a new model."""

    type: str = "adamw"


class CreateModelRequest(BoundedModel):
    """A new model."""

    session_id: Name
    model_seq_id: int = Field(ge=0, lt=MAX_NUMBER)
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


class LoadWeightsRequest(BoundedModel):
    """A checkpoint to load, into a new model of a session or into one that is there."""

    path: Name
    optimizer: bool
    session_id: Name | None = None
    model_seq_id: int | None = Field(default=None, ge=0, lt=MAX_NUMBER)
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: Name | None = None
    model_id: Name | None = None
    seq_id: int | None = Field(default=None, ge=1, lt=MAX_NUMBER)


class AdamParams(BoundedModel):
    """The settings of a step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    type: str = "adamw"


class OperationRequest(BoundedModel):
    """A request about a model, in order of its numbers."""

    model_id: Name
    seq_id: int = Field(ge=1, lt=MAX_NUMBER)


class OptimStepRequest(OperationRequest):
    """A step of the optimizer."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsRequest(OperationRequest):
    """A checkpoint to save, with the optimizer's state."""

    path: Name
    overwrite: bool = False
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)
    user_metadata: Metadata | None = None


class SaveForSamplerRequest(OperationRequest):
    """A checkpoint to sample from: named, or for one sampler."""

    path: Name | None = None
    sampling_session_seq_id: int | None = Field(default=None, ge=0, lt=MAX_NUMBER)
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: int | None = Field(default=None, ge=1, le=MAX_TTL_S)
    user_metadata: Metadata | None = None


class ModelIdRequest(BoundedModel):
    """A request about a model."""

    model_id: Name
