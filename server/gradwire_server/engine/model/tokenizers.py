"""Conversion between text and token ids with a model's own tokenizer; needs ``tokenizers``, not torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gradwire_proto.v1 import training_pb2
from tokenizers import Tokenizer

from gradwire_server.engine.errors import OperationError


class TextTokenizer:
    """A model's tokenizer.

    Args:
        file: Path of its tokenizer.json.

    Attributes:
        tokenizer: The object of the ``tokenizers`` library.

    Raises:
        OperationError: UNSUPPORTED for a file that cannot be read.
    """

    def __init__(self, file: Path) -> None:
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no other class for a damaged file
            message = f"the tokenizer {file} cannot be read: {error}"
            raise OperationError(training_pb2.ERROR_CODE_UNSUPPORTED, message, field="model") from error
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
