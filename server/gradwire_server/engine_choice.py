"""What one engine of several is to serve, where they are not alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class EngineChoice(BaseModel):
    """The settings of one engine that differ from those of the server.

    Attributes:
        models: Names of the models that it serves; empty for all that the server names.
        ranks, device, dtype, quantize: As the server's settings of these names; None for the server's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = ()
    ranks: int | None = Field(None, ge=1, le=64)
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "mixed", "float64"] | None = None
    quantize: Literal["nf4", "int8"] | None = None

    def settings(self, server: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's settings, given the server's."""
        own = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        own["models"] = {name: server["models"][name] for name in self.models or server["models"]}
        return {**server, **own}


def parse_engine(text: str) -> dict[str, Any]:
    """The choice ``model=A,ranks=2``; ``model`` may stand several times.

    Raises:
        ValueError: It is none.
    """
    settings: dict[str, Any] = {"models": []}
    for part in text.split(","):
        name, separator, value = (each.strip() for each in part.partition("="))
        if not (separator and value) or name not in ("model", *EngineChoice.model_fields.keys() - {"models"}):
            rule = "model=NAME, ranks=N, device=D, dtype=T, quantize=Q"
            raise ValueError(f"--engine {text[:100]}: {part.strip()[:50]!r} is none of {rule}")
        if name == "model":
            settings["models"].append(value)
        elif name in settings:
            raise ValueError(f"--engine {text[:100]}: {name} stands there twice")
        else:
            settings[name] = value
    return settings
