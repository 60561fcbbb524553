"""Conversion between text and token ids with a model's own tokenizer; needs ``tokenizers``, not torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from gradwire_proto.v1 import training_pb2
from tokenizers import Tokenizer

from gradwire_server.engine.errors import OperationError

CONTEXT_TOKENS = 16
"""Tokens of a prompt with which the tokens that follow it are decoded."""


class TextTokenizer:
    """A model's tokenizer.

    Attributes:
        special_texts: The text of each special token, by its id.

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
        added = self.tokenizer.get_added_tokens_decoder()
        self.special_texts = {token: each.content for token, each in added.items() if each.special}

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each text."""
        return [found.ids for found in self.tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

    def decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The text of each sequence of ids."""
        return list(
            self.tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip_special_tokens)
        )

    def decode_after(
        self, prompts: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """Decode the text that each sequence adds to that of its prompt.

        A decoder may drop the blank that a text begins with, or need the prompt's last bytes for a character.
        """
        before = self.context(prompts, skip_special_tokens=skip_special_tokens)
        rows = [[*tail, *ids] for (tail, _), ids in zip(before, sequences, strict=True)]
        texts = self.decode(rows, skip_special_tokens=skip_special_tokens)
        return [text[len(complete(known)) :] for text, (_, known) in zip(texts, before, strict=True)]

    def context(
        self, prompts: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[tuple[list[int], str]]:
        """The last tokens of each prompt and their text: enough that they have one, if the prompt has one."""
        found = []
        tails = [list(prompt[-CONTEXT_TOKENS:]) for prompt in prompts]
        texts = self.decode(tails, skip_special_tokens=skip_special_tokens)
        for prompt, tail, text in zip(prompts, tails, texts, strict=True):
            if not text and len(tail) < len(prompt):  # special tokens alone
                tail = list(prompt)
                (text,) = self.decode([tail], skip_special_tokens=skip_special_tokens)
            found.append((tail, text))
        return found


def complete(text: str) -> str:
    """A text without the character that its last bytes only begin."""
    return text.rstrip("\ufffd")


@lru_cache(maxsize=32)
def load_tokenizer(file: Path) -> TextTokenizer:
    """The tokenizer of a file, read once."""
    return TextTokenizer(file)
