"""Encode values of builtin types as JSON, so that no object of the policy's own class crosses a pipe.

Subclasses of builtin types become the builtin; numpy arrays and scalars become lists and numbers. Any other value is
passed to ``reference``, which assigns it a number.
"""

from __future__ import annotations

import datetime
import decimal
import fractions
import json
from collections.abc import Callable
from typing import Any

AS_TEXT: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "fraction": (fractions.Fraction, str, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (datetime.timedelta, lambda v: _timedelta(v), lambda text: _timedelta_of(text)),
    "complex": (complex, lambda v: repr(complex(v)), complex),
    "bytes": (bytes, lambda v: bytes.hex(v), bytes.fromhex),
    "bytearray": (bytearray, lambda v: bytearray.hex(v), bytearray.fromhex),
}
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset, "range": range}


def _timedelta(value: datetime.timedelta) -> str:
    return f"{value.days} {value.seconds} {value.microseconds}"


def _timedelta_of(text: str) -> datetime.timedelta:
    days, seconds, microseconds = map(int, text.split())
    return datetime.timedelta(days, seconds, microseconds)


def encode(value: Any, reference: Callable[[Any], dict[str, Any]]) -> Any:
    """Convert a value to data for :func:`json.dumps`.

    Raises:
        RecursionError: The value contains itself.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        # Hexadecimal, because decimal conversion of long integers is slow and refused beyond 4,300 digits.
        number = int.__int__(value)
        return number if -(1 << 53) < number < 1 << 53 else {"int": hex(number)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [encode(each, reference) for each in list.__iter__(value)]
    if isinstance(value, dict):
        return {"dict": [[encode(k, reference), encode(v, reference)] for k, v in dict.items(value)]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name in ("tuple", "set", "frozenset"):
        kind: Any = SEQUENCES[name]
        if isinstance(value, kind):
            return {name: [encode(each, reference) for each in kind.__iter__(value)]}
    for name, (kind, text, _) in AS_TEXT.items():
        if isinstance(value, kind):
            return {name: text(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), reference)
    return reference(value)


def decode(content: Any, referent: Callable[[dict[str, Any]], Any]) -> Any:
    """Convert the output of :func:`encode` back to a value; references are passed to ``referent``.

    Raises:
        ValueError, TypeError, ArithmeticError, RecursionError: The content is not the output of :func:`encode`.
    """
    if content is None or isinstance(content, bool | int | float | str):
        return content
    if isinstance(content, list):
        return [decode(each, referent) for each in content]
    if not isinstance(content, dict):
        raise ValueError("not a value")
    if len(content) != 1:
        return referent(content)
    ((name, inner),) = content.items()
    if name == "int":
        return int(inner, 16)
    if name == "dict":
        return {decode(key, referent): decode(value, referent) for key, value in inner}
    if name == "range":
        return range(*inner)
    if name in SEQUENCES:
        return SEQUENCES[name](decode(each, referent) for each in inner)
    if name in AS_TEXT:
        return AS_TEXT[name][2](inner)
    return referent(content)


def dumps(message: Any) -> bytes:
    return json.dumps(message).encode()


def loads(content: bytes) -> Any:
    return json.loads(content)
