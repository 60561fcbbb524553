"""Requests that make no sense: bodies next to valid ones, odd encodings, and bytes that are no HTTP request."""

from __future__ import annotations

import errno
import gzip
import json
import random
import socket
from typing import Any

import zstandard

JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1, 1.5, 2**31, 2**63, -(2**70), 10**400, 1e308, float("nan"), float("inf"), "", "x" * 3000,
    "\u0000", "\ud800", "\ud83d\ude00", "tinker://a/weights/b", "tinker://a/b/../c", "00000000-0000:train:0",
    "00000000:train:0:1:loss", [], [[]], [None], {}, {"a": 1}, {"a": float("nan")}, {"\ud800": "\udfff"},
)  # fmt: skip
"""Values that a field may get instead of its own."""
BOMB_BYTES = 64 << 20
_BOMBS = {
    "gzip": gzip.compress(bytes(BOMB_BYTES), compresslevel=1),
    "zstd": zstandard.compress(bytes(BOMB_BYTES)),
}


def mutated(rng: random.Random, value: Any) -> Any:
    """The value with parts replaced, removed or repeated."""
    if rng.random() < 0.2:
        return rng.choice(JUNK)
    if isinstance(value, dict):
        found = {key: mutated(rng, part) if rng.random() < 0.4 else part for key, part in value.items()}
        if rng.random() < 0.2 and found:
            del found[rng.choice(list(found))]
        return found
    if isinstance(value, list):
        return [mutated(rng, part) for part in value] * rng.choice([1, 1, 1, 40])
    return value


def as_json(rng: random.Random, value: Any) -> bytes:
    """A body of JSON, now and then cut off, deep, in another encoding, or with numbers that JSON does not have."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.9)
    kind = rng.random()
    if kind < 0.04:
        return text[: rng.randrange(len(text) + 1)].encode(errors="surrogatepass")
    if kind < 0.06:
        return rng.choice((b"[", b'{"a":', b"[{" * 3)) * rng.choice((500, 50_000))
    if kind < 0.08:
        return text.encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")), errors="surrogatepass")
    if kind < 0.09:
        return rng.randbytes(rng.randrange(200))
    if kind < 0.10:
        return text.replace('"', "'").encode(errors="surrogatepass")
    return text.encode(errors="surrogatepass")


def encoded(rng: random.Random, body: bytes, content_type: str) -> tuple[bytes, dict[str, str]]:
    """The body as it is sent, and its headers: now and then compressed, a bomb, or not what the headers say."""
    headers = {"Content-Type": content_type}
    kind = rng.random()
    if kind < 0.03:
        headers["Content-Type"] = rng.choice(("text/plain", "multipart/form-data; boundary=x", "application/json;"))
    elif kind < 0.06:
        encoding = rng.choice(("gzip", "zstd", "br", "zstd, gzip"))
        headers["Content-Encoding"] = encoding
        compressed = gzip.compress(body, 1) if encoding == "gzip" else zstandard.compress(body)
        body = compressed if rng.random() < 0.7 else compressed[: rng.randrange(len(compressed))]
    elif kind < 0.07:
        headers["Content-Encoding"] = encoding = rng.choice(tuple(_BOMBS))
        body = _BOMBS[encoding]
    return body, headers


def raw_requests(host: str, path: str) -> dict[str, bytes]:
    """What a socket sends, by what is wrong with it."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n".encode()
    return {
        "a shorter body than announced": head + b"Content-Length: 1000\r\n\r\n{}",
        "a longer body than announced": head + b"Content-Length: 1\r\n\r\n{}{}{}",
        "a negative length": head + b"Content-Length: -5\r\n\r\n{}",
        "a length in words": head + b"Content-Length: two\r\n\r\n{}",
        "a length beyond all memory": head + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        "two lengths": head + b"Content-Length: 2\r\nContent-Length: 900\r\n\r\n{}",
        "a length and chunks": head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        "chunks without a number": head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        "a chunk beyond all memory": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}\r\n",
        "a header without an end": head + b"X-Long: " + b"a" * 200_000,
        "a thousand headers": head + b"".join(b"X-%d: 1\r\n" % n for n in range(1000)) + b"Content-Length: 2\r\n\r\n{}",
        "bytes in place of a request": bytes(range(256)) * 4,
        "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "a path that is none": f"POST ../../etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n".encode(),
        "nothing": b"",
    }


def answer_to(address: tuple[str, int], sent: bytes) -> bytes:
    """What the server answers to these bytes, after which the client sends nothing more; empty if it only closes."""
    with socket.create_connection(address, timeout=60) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1 << 16)
        except OSError as error:
            if isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN:  # it closed before we did
                return b""
            raise
