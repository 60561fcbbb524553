"""Conversion between text and token ids with a model's own tokenizer; needs ``tokenizers``, not torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer


class TextTokenizer:
    """A model's tokenizer.

    Args:
        file: Path of its tokenizer.json.

    Attributes:
        tokenizer: The object of the ``tokenizers`` library.
    """

    def __init__(self, file: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(file))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        return [found.ids for found in self.tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each sequence of ids."""
        return list(
            self.tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip_special_tokens)
        )


@lru_cache(maxsize=32)
def load_tokenizer(file: Path) -> TextTokenizer:
    """The tokenizer of a file, read once."""
    return TextTokenizer(file)
