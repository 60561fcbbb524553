"""The text of a growing sample: decoded token by token, and searched for stop strings across token borders."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from gradwire_server.engine.model.tokenizers import TextTokenizer, complete


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
        stops: Stop strings; they may have special tokens.
        prompt: The tokens before the sample.
        min_tokens: Tokens before which no stop string counts.
        keep_special_tokens: Whether special tokens are text.

    Attributes:
        text: The text so far, without the bytes of characters that are not complete.
        end: Where the first stop string found begins; None while there is none.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: Sequence[StopString],
        prompt: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        keep_special_tokens: bool = False,
    ) -> None:
        self.text = ""
        self.end: int | None = None
        self._tokenizer, self._stops = tokenizer, stops
        self._early, self._skip = min_tokens, not keep_special_tokens
        ((before, known),) = tokenizer.context([prompt], skip_special_tokens=self._skip)
        self._stream = DecodeStream(ids=before, skip_special_tokens=self._skip)
        # Where a character is not complete yet, the stream's first piece has the text before it as well.
        self._repeated = len(complete(known)) if complete(known) != known else 0
        self._lengths = [0] * len(stops)
        self._searched = 0
        self._left_out: list[tuple[int, int]] = []

    @property
    def shown(self) -> str:
        """The text that no stop string can still take away."""
        if self.end is not None:
            return self.text[: self.end]
        return self.text[: self._place(self._searched - max(self._lengths, default=0))]

    def add(self, token: int) -> None:
        """Add a token; sets :attr:`end` if its text completes a stop string."""
        piece, early = self._piece(token) or "", self._early > 1
        self._early -= 1
        self.text += piece
        if self._skip and token in self._tokenizer.special_texts:  # no text, and yet a stop string may have it
            hidden = self._tokenizer.special_texts[token]
            self._left_out.append((self._searched + len(piece), len(hidden)))
            piece += hidden
        before, self._searched = self._searched, self._searched + len(piece)
        if not piece or early:
            return
        begins = []
        for number, stop in enumerate(self._stops):
            length = self._lengths[number]
            for place, char in enumerate(piece, before):
                length = stop.grown(length, char)
                if length == len(stop.text):
                    begins.append(place + 1 - length)
                    break
            self._lengths[number] = length
        if begins:
            self.end = self._place(min(begins))

    def _place(self, searched: int) -> int:
        """Place in the text of a place in what is searched, which has the special tokens as well."""
        return searched - sum(min(length, max(0, searched - begin)) for begin, length in self._left_out)

    def _piece(self, token: int) -> str | None:
        try:
            piece = self._stream.step(self._tokenizer.tokenizer, token)
        except Exception:  # tokens that decode to less than those before them; the library has no class for it
            self._stream, self._repeated = DecodeStream(skip_special_tokens=self._skip), 0
            piece = self._stream.step(self._tokenizer.tokenizer, token)
        if piece and self._repeated:
            piece, self._repeated = piece[self._repeated :], 0
        return piece
