"""The tests' model: small enough that a step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _support.small_model import small_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EMOJI = [f"<0x{byte:02X}>" for byte in "\U0001f600".encode()]
WORDS = (
    "<pad>",
    "<s>",
    "</s>",
    "<unk>",
    "▁the",
    "▁cat",
    "▁sat",
    "s",
    "▁",
    "<0xC3>",
    "<0xA9>",
    *EMOJI,
    "<|end|>",
    "▁on",
)
"""Vocabulary of :func:`llama_2_tokenizer`; a word's place is its id."""


def tiny_model(path: Path, **settings: Any) -> Path:
    """Create a Llama of about thirty thousand parameters as a Hugging Face folder; ``settings`` as for ``small_model``.

    Without settings: one token per character of printable ASCII (100 tokens), 2 layers of 32, rows up to 256 tokens.
    """
    return small_model(path, **({"hidden_size": 32, "num_layers": 2} | settings))


def llama_2_tokenizer() -> Tokenizer:
    """A tokenizer of :data:`WORDS` that drops the blank with which a decoded text begins, as Llama 2's does."""
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("<s>", "</s>", "<|end|>")])
    return tokenizer
