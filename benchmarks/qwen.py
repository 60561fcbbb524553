"""Qwen3-shaped models from their public configurations, with random weights, and their numbers of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _support.small_model import small_model

COMMON = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
SIZES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28} | COMMON,
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28} | COMMON,
}
"""As in the ``config.json`` of Qwen/Qwen3-0.6B and Qwen/Qwen3-1.7B."""
LARGER: dict[str, dict[str, Any]] = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36} | COMMON,
    "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36} | COMMON,
}
"""As Qwen/Qwen3-4B and Qwen/Qwen3-8B; but all are made with tied embeddings, which 8B does not have."""
for each in LARGER.values():
    each["num_attention_heads"] = 32
SCALED: dict[str, dict[str, Any]] = {
    "1.7B": SIZES["1.7B"],
    "8B": LARGER["8B"],
}
"""Those that are trained on several ranks."""
SMOKE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SMOKE |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512}
LORA_RANK = 32


@dataclass(frozen=True)
class Shape:
    """The dimensions of a model that determine its number of operations."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """Return the numbers of inputs and outputs of a layer's matrices."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]

    def step_flops(self, lengths: Sequence[int], *, lora: bool) -> float:
        """Floating-point operations that one training step on rows of these lengths needs, padding and recomputing
        left out.

        A matrix costs 2 a weight and token forward, as much for the gradient of its inputs, and where it is trained
        again as much for its own. Causal attention multiplies each token with those before it, twice; its backward
        pass costs twice its forward. The output head counts, the embedding does not.
        """
        tokens = sum(lengths)
        layers = self.num_hidden_layers * sum(inputs * outputs for inputs, outputs in self.linear_layers)
        head = self.hidden_size * self.vocab_size
        passes = 2 if lora else 3
        adapters = self.num_hidden_layers * LORA_RANK * sum(map(sum, self.linear_layers)) if lora else 0
        pairs = sum(length * length / 2 for length in lengths)
        attention = 4.0 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * pairs
        return 2.0 * tokens * (passes * (layers + head) + 3 * adapters) + 3 * attention


def shape(size: str, *, smoke: bool) -> Shape:
    return Shape(**(SMOKE if smoke else (SIZES | LARGER)[size]))


def qwen(path: Path, shape: Shape, *, device: str, dtype: str = "bfloat16") -> Path:
    """Make a random model of this shape as a Hugging Face folder, drawn on the device; made once."""
    if (path / "done").exists():
        return path
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    small_model(path, hidden_size=8, num_layers=1)  # for its tokenizer: nothing here is text
    config = Qwen3Config(
        **vars(shape), tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-6, max_position_embeddings=40_960
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(path)
    (path / "done").touch()
    return path
