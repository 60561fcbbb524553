"""The server's settings: what `gradwire serve` was asked for, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gradwire_server.engine_link.vitals import STALE_S

CHUNK_BYTES = 1 << 20
"""The most that one frame of a stream carries."""


class Limits(BaseModel):
    """What one client can ask of the server. Sizes in bytes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_message_bytes: int = Field(default=8 << 20, ge=2 << 20, description="one gRPC message")
    max_payload_bytes: int = Field(default=1 << 30, ge=1, description="the tensors of one operation")
    max_tensors: int = Field(default=64, ge=1, description="tensors of one operation")
    max_rows: int = Field(default=65_536, ge=1, description="rows of one batch")
    max_queued_operations: int = Field(default=16_384, ge=1, description="operations of a run without a result")
    max_queued_bytes: int = Field(default=8 << 30, ge=1, description="payloads of a run's operations without a result")
    max_window: int = Field(default=1024, ge=1, description="how far a number may be ahead of the next expected one")
    max_window_bytes: int = Field(default=1 << 30, ge=1, description="payloads that wait in memory for such a number")
    max_runs: int = Field(default=1000, ge=1, description="runs that the server keeps")
    max_encode_texts: int = Field(default=4096, ge=1, description="texts of one Encode or sequences of one Decode")
    max_name_chars: int = Field(default=200, ge=1, description="characters of a run's name, a tag or a writer")
    max_tags: int = Field(default=64, ge=0, description="tags of a run, and modules that an adapter is put on")
    max_row_tokens: int = Field(default=1 << 20, ge=1, description="tokens of one row")
    max_batch_tokens: int = Field(default=1 << 26, ge=1, description="tokens of one batch")
    max_samples: int = Field(default=65_536, ge=1, description="prompts times n of one sampling")
    max_sample_tokens: int = Field(default=131_072, ge=1, description="max_tokens of one sampling")
    max_stops: int = Field(default=64, ge=0, description="stop strings of one sampling, and stop tokens")
    max_stop_chars: int = Field(default=1000, ge=1, description="characters of one stop string")
    max_text_chars: int = Field(default=1 << 20, ge=1, description="characters of one prompt or text to encode")
    max_kwargs_chars: int = Field(default=1 << 18, ge=2, description="characters of a loss's arguments as JSON")
    max_string_chars: int = Field(default=4096, ge=1, description="characters of any other string of an operation")
    max_checkpoints: int = Field(default=1000, ge=1, description="checkpoints that a run keeps")
    max_checkpoint_bytes: int = Field(default=1 << 40, ge=1, description="what the checkpoints of a run hold together")
    max_incoming_bytes: int = Field(default=4 << 30, ge=1, description="payloads of one key that are not on disk yet")
    key_runs: int = Field(default=1000, ge=0, description="runs of one key")
    key_queued_operations: int = Field(default=65_536, ge=1, description="operations of one key without a result")
    key_queued_bytes: int = Field(default=32 << 30, ge=1, description="payloads of a key's operations without a result")
    key_tokens_per_minute: int = Field(default=0, ge=0, description="tokens that one key submits a minute; 0: no limit")


class ServerConfig(BaseModel):
    """Everything that `gradwire serve` needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = "127.0.0.1:50051"
    state_dir: Path
    models: dict[str, str] = Field(description="model name -> path or Hugging Face name")
    allowed_models: dict[str, str] = Field(
        default={}, description="more of them, which are read when a client first names them and not at the start"
    )
    losses: tuple[Path, ...] = ()
    durability: Literal["journal", "checkpoint"] = "journal"
    device: str = ""
    dtype: Literal["", "float32", "bfloat16", "mixed", "float64"] = ""
    compile: bool = False
    sampler: Literal["local", "vllm"] = Field(
        default="local", description="what generates; vllm wants a GPU and gradwire[vllm], and takes LoRA runs"
    )
    group_runs: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="small batches of several LoRA runs on one base go through it at once; auto: on a GPU",
    )
    microbatch_tokens: int | None = Field(default=None, ge=1)
    activation_budget_gib: float | None = Field(default=None, gt=0)
    reference_cache_gib: float | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, ge=1)
    grace_s: float = Field(default=20.0, ge=0, description="how long a shutdown waits for the operation that runs")
    payload_memory_bytes: int = Field(
        default=256 << 20, ge=0, description="queued payloads kept in memory, too, not only on disk"
    )
    checkpoint_every_steps: int = Field(
        default=100, ge=0, description="the server saves a run by itself after so many optimizer steps; 0 for never"
    )
    checkpoint_every_bytes: int = Field(
        default=1 << 30, ge=0, description="and after payloads of this size, whichever comes first; 0 for never"
    )
    result_retention_s: float = Field(
        default=7 * 24 * 3600.0, gt=0, description="how long a result that nobody acknowledges is kept"
    )
    metrics_address: str = Field(default="", description="HOST:PORT of Prometheus metrics; loopback without HOST")
    metrics_runs: bool = Field(default=False, description="runs are labels of the metrics of training")
    traces: str = Field(default="", description="OTLP endpoint of OpenTelemetry traces")
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    log_format: Literal["text", "json"] = "text"
    heartbeat_stale_s: float = Field(default=STALE_S, gt=0, description="an engine silent for so long is not ready")
    insecure_bind: bool = False
    tls_cert: Path | None = Field(default=None, description="PEM file: the server's certificate and its chain")
    tls_key: Path | None = Field(default=None, description="PEM file: its key")
    tls_client_ca: Path | None = Field(default=None, description="PEM file: who signs the clients that may connect")
    limits: Limits = Limits()

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"address must be HOST:PORT, not {address!r}")
        return address

    @field_validator("metrics_address")
    @classmethod
    def _on_loopback_unless_stated(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not address:
            return ""
        if not port.isdigit() or int(port) > 65535:
            raise ValueError(f"metrics_address must be HOST:PORT or PORT, not {address!r}")
        return f"{host or '127.0.0.1'}:{port}"

    @field_validator("models")
    @classmethod
    def _some_model(cls, models: dict[str, str]) -> dict[str, str]:
        if not models:
            raise ValueError("name at least one model: --model NAME_OR_PATH")
        return models

    @model_validator(mode="after")
    def _whole_tls(self) -> ServerConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def all_models(self) -> dict[str, str]:
        """Whatever a client may name."""
        return self.allowed_models | self.models

    @property
    def loopback(self) -> bool:
        host = self.address.rpartition(":")[0].strip("[]")
        return host in ("localhost", "::1") or host.startswith("127.")


def parse_model(text: str) -> tuple[str, str]:
    """``NAME=PATH``, or a path (its last part names it), or a Hugging Face name as it is."""
    name, separator, path = text.partition("=")
    if separator:
        return name, path
    folder = Path(text).expanduser()
    return (folder.resolve().name, str(folder.resolve())) if folder.is_dir() else (text, text)
