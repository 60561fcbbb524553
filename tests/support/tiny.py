"""The tests' model: small enough that a step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _support.small_model import small_model


def tiny_model(path: Path, **settings: Any) -> Path:
    """Create a Llama of about thirty thousand parameters as a Hugging Face folder; ``settings`` as for ``small_model``.

    Without settings: one token per character of printable ASCII (100 tokens), 2 layers of 32, rows up to 256 tokens.
    """
    return small_model(path, **({"hidden_size": 32, "num_layers": 2} | settings))
