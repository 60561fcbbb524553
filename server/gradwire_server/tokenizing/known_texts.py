"""Token ids of texts whose parts were tokenized before: of a prompt that was appended to, only the new is tokenized.

A tokenizer divides a text at its added tokens before anything else, and then tokenizes each part for itself; only the
beginning of the whole text may be treated otherwise. So a text is cut before added tokens, and the ids of the parts,
each of which begins with such a token, are those of the text.
"""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer

LEAST_CHARS = 256
"""Minimum characters of a part, except the last: shorter ones cost more to look up than to tokenize."""
KEPT_BYTES = 16 << 20
"""Bytes kept of a model's parts: four a token."""


class KnownTexts:
    """The parts of texts that one model's tokenizer had last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        found = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.normalized]
        self._added = re.compile(_any_of(token.content for token in found)) if found else None
        # Some tokens look at what is before or behind them, whether it is a blank or of a word: a cut must be neither.
        alone = (token.content for token in found if not (token.lstrip or token.single_word))
        self._cuts = {text for text in alone if re.match(r"[^\w\s]", text)}
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def ids(self, owner: str, text: str) -> list[int]:
        """The ids of a text, without those that the tokenizer adds to a whole text.

        Args:
            owner: Name of the caller's key; what one key had tokenized is not looked up for another.
        """
        parts = self.parts(text)
        keys = [hashlib.blake2b(f"{owner}\0{part}".encode(), digest_size=16).digest() for part in parts]
        found = {key: ids for key in keys if (ids := self._get(key)) is not None}
        new = {key: part for key, part in zip(keys, parts, strict=True) if key not in found}
        if new:
            encodings = self._tokenizer.encode_batch([*new.values()], add_special_tokens=False)
            for key, encoding in zip(new, encodings, strict=True):
                found[key] = array("I", encoding.ids).tobytes()
                self._put(key, found[key])
        return array("I", b"".join(found[key] for key in keys)).tolist()

    def parts(self, text: str) -> list[str]:
        """The parts of a text that are tokenized for themselves."""
        if self._added is None or len(text) <= LEAST_CHARS:
            return [text]
        cuts = [0]
        for match in self._added.finditer(text):
            if match.start() - cuts[-1] >= LEAST_CHARS and match.group() in self._cuts:
                cuts.append(match.start())
        return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)])]

    def _get(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def _put(self, key: bytes, ids: bytes) -> None:
        with self._lock:
            self._size += len(ids) - len(self._known.pop(key, b""))
            self._known[key] = ids
            while self._size > KEPT_BYTES:
                self._size -= len(self._known.popitem(last=False)[1])


def _any_of(words: Iterable[str]) -> str:
    """Regular expression of the longest of the words at a place, as the tokenizer looks for its added tokens."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + written(rest) for character, rest in node.items() if character]
        if not branches:
            return ""
        return f"(?:{'|'.join(branches)})" + "?" * ("" in node)

    return written(tree)
