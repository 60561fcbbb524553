"""The text of a growing sample: decoded token by token, and searched for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopString:
    """A stop string, and for each length of its beginnings the longest shorter one that also ends it (Knuth et al.).

    Args:
        text: The string, not empty.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._shorter = [0]
        for end in range(1, len(text)):
            self._shorter.append(self.grown(self._shorter[-1], text[end]))

    def grown(self, length: int, char: str) -> int:
        """Length of the longest beginning that ends the text, given that before ``char`` was added."""
        while length and (length == len(self.text) or self.text[length] != char):
            length = self._shorter[length - 1]
        return length + (self.text[length] == char)


class GrowingText:
    """The text of one sample.

    Args:
        tokenizer: Decodes tokens.
        stops: Stop strings.
        min_tokens: Tokens before which no stop string counts.
        keep_special_tokens: Whether special tokens are text.

    Attributes:
        text: The text so far, without the bytes of characters that are not complete.
        end: Where the first stop string found begins; None while there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[StopString],
        *,
        min_tokens: int = 0,
        keep_special_tokens: bool = False,
    ) -> None:
        self.text = ""
        self.end: int | None = None
        self._tokenizer, self._stops = tokenizer, stops
        self._early, self._skip = min_tokens, not keep_special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._lengths = [0] * len(stops)

    @property
    def shown(self) -> str:
        """The text that no stop string can still take away."""
        if self.end is not None:
            return self.text[: self.end]
        return self.text[: len(self.text) - max(self._lengths, default=0)]

    def add(self, token: int) -> None:
        """Add a token; sets :attr:`end` if its text completes a stop string."""
        piece, early = self._piece(token), self._early > 1
        self._early -= 1
        if not piece:
            return
        if early:
            self.text += piece
            return
        begins = []
        for number, stop in enumerate(self._stops):
            length = self._lengths[number]
            for place, char in enumerate(piece, len(self.text)):
                length = stop.grown(length, char)
                if length == len(stop.text):
                    begins.append(place + 1 - length)
                    break
            self._lengths[number] = length
        self.text += piece
        if begins:
            self.end = min(begins)

    def _piece(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception:  # tokens that decode to less than those before them; the library has no class for it
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._tokenizer, token)
