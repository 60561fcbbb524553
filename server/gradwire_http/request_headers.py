"""A message's headers, read in one way wherever one decides something: whole values, compared exactly."""

from __future__ import annotations

from collections.abc import Iterable

PROTOBUF = "application/x-protobuf"


def headers_of(raw: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers by their names in lower case.

    One that is given several times is the list of its values. So two readers, of which one would take the first and
    the other the last, find neither.
    """
    headers: dict[str, str] = {}
    for name, value in raw:
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    return headers


def media_type(content_type: str) -> str:
    """Type and subtype of a Content-Type in lower case, without its parameters."""
    return content_type.partition(";")[0].strip().lower()
