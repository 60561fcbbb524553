"""Messages that are well-formed by their descriptors and ill-meant in their values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

EDGES = (0, 1, 2, 3, 7, 100, 255, 2**16, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, -1, -(2**31))
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "", "tiny", "base", "ema", "c", "step-1", "auto-1", "fork-origin", "..", "../../etc/passwd", "/etc/passwd",
    ".hidden", "a/b/c", "run-", "run-/",
    "run-aaaaaaaaaaaaaaaa", "run-aaaaaaaaaaaaaaaa/c", "\x00", "\u202e\U0001f512", "%s%n", "'; DROP TABLE runs; --",
    "{{ 7 * 7 }}", "(a+)+$", "causal_lm", "{}", "[]", '{"reference_model": "tiny"}', "[" * 2000, "x" * 300, "y" * 5000,
    "logprobs", "value", "reward", "classification", "ada", "bob", "input_ids", "prompt_ids", "loss_mask",
)  # fmt: skip
RANGES = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzzer:
    """Fills messages.

    Args:
        rng: what it draws from.
        words: strings that mean something to the server, beside those that mean trouble.
    """

    def __init__(self, rng: random.Random, words: Sequence[str] = ()) -> None:
        self.rng, self.words = rng, list(words)

    def fill(self, message: Any, density: float = 0.6, depth: int = 0) -> Any:
        """Sets some fields of a message, at random, and gives it."""
        taken = set[str]()
        for field in message.DESCRIPTOR.fields:
            choice = field.containing_oneof
            if self.rng.random() > density or depth > 4 or (choice and choice.name in taken):
                continue
            if choice is not None:
                field = self.rng.choice(list(choice.fields))
                taken.add(choice.name)
            self._set(message, field, density, depth)
        return message

    def _set(self, message: Any, field: Any, density: float, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(self.rng.randrange(3)):
                key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
                getattr(message, field.name)[self._value(key)] = self._value(value)
        elif field.is_repeated:
            count = self.rng.choice((0, 1, 1, 2, 3, 5, 70))
            for _ in range(count if depth < 3 else min(count, 2)):
                if field.message_type is not None:
                    self.fill(getattr(message, field.name).add(), density, depth + 1)
                else:
                    getattr(message, field.name).append(self._value(field))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            self.fill(getattr(message, field.name), density, depth + 1)
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: Any) -> Any:
        kind = field.cpp_type
        if kind in RANGES:
            low, high = RANGES[kind]
            value = self.rng.choice(EDGES) if self.rng.random() < 0.7 else self.rng.randrange(low, high)
            return min(max(value, low), high)
        if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
            return self.rng.choice(FLOATS)
        if kind == Field.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == Field.CPPTYPE_ENUM:
            return self.rng.choice([*field.enum_type.values_by_number, 77])
        if field.type == Field.TYPE_BYTES:
            return self.rng.randbytes(self.rng.choice((0, 1, 16, 1000)))
        return self.text()

    def text(self) -> str:
        return self.rng.choice(self.words if self.words and self.rng.random() < 0.5 else TEXTS)

    def damage(self, data: bytes) -> bytes:
        """The bytes with some changed, cut off or put in."""
        raw = bytearray(data)
        for _ in range(self.rng.randrange(1, 5)):
            place = self.rng.randrange(len(raw) + 1)
            how = self.rng.randrange(3)
            if how == 0 and place < len(raw):
                raw[place] = self.rng.randrange(256)
            elif how == 1:
                del raw[place : place + self.rng.randrange(20)]
            else:
                raw[place:place] = self.rng.randbytes(self.rng.randrange(20))
        return bytes(raw)
