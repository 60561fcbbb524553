"""The server's settings: what `gradwire serve` was asked for, checked."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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
    max_runs: int = Field(default=1000, ge=1, description="runs that the server keeps")
    max_encode_texts: int = Field(default=4096, ge=1, description="texts of one Encode or sequences of one Decode")
    max_name_chars: int = Field(default=200, ge=1, description="characters of a run's name, a tag or a writer")


class ServerConfig(BaseModel):
    """Everything that `gradwire serve` needs to know."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = "127.0.0.1:50051"
    state_dir: Path
    models: dict[str, str] = Field(description="model name -> path or Hugging Face name")
    losses: tuple[Path, ...] = ()
    durability: Literal["journal", "checkpoint"] = "journal"
    device: str = ""
    dtype: str = ""
    microbatch_tokens: int | None = Field(default=None, ge=1)
    activation_budget_gib: float | None = Field(default=None, gt=0)
    reference_cache_gib: float | None = Field(default=None, gt=0)
    threads: int | None = Field(default=None, ge=1)
    grace_s: float = Field(default=20.0, ge=0, description="how long a shutdown waits for the operation that runs")
    payload_memory_bytes: int = Field(
        default=256 << 20, ge=0, description="queued payloads kept in memory, too, not only on disk"
    )
    insecure_bind: bool = False
    keys_file: Path | None = Field(default=None, description="lines of `owner:sha256 of the key in hex`")
    limits: Limits = Limits()

    @field_validator("address")
    @classmethod
    def _host_and_port(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"address must be HOST:PORT, not {address!r}")
        return address

    @field_validator("models")
    @classmethod
    def _some_model(cls, models: dict[str, str]) -> dict[str, str]:
        if not models:
            raise ValueError("name at least one model: --model NAME_OR_PATH")
        return models

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
