"""Bodies that nobody thought of: each is drawn from a number alone, so that one that was dear stays as a test."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import zstandard
from gradwire_proto.v1 import tinker_pb2

from support.costly_bodies import (
    BATCHES,
    ENTRIES,
    JSON_BYTES,
    MESSAGE_BYTES,
    PROTOBUF_BYTES,
    Costly,
    paths_of,
    services,
    varint,
)

Routes = Mapping[str, Mapping[str, Any]]
_LEAVES: tuple[Callable[[random.Random], str], ...] = (
    lambda rng: str(rng.randrange(-(2 ** rng.choice([4, 8, 31, 63, 200])), 1 << 20)),
    lambda rng: repr(rng.uniform(-1e9, 1e9)),
    lambda rng: rng.choice(["1e308", "-0.0", "1e-400", "1E400", "true", "null", '""', '"\\u0000"', '"\\ud800"']),
    lambda rng: json.dumps(
        "".join(chr(rng.choice([34, 92, 10, 97, 0x4E00, 0x1F600])) for _ in range(rng.randrange(40)))
    ),
    lambda rng: json.dumps(rng.choice(["word ", "a", "{{", "\n", "<s>", "\u202e", "e\u0301"]) * 10 ** rng.randrange(7)),
    lambda rng: json.dumps(f"data:image/{rng.choice(['png', 'gif'])};base64,{'A' * 4 ** rng.randrange(10)}"),
    lambda rng: rng.choice(list(ENTRIES.values())),
)


def drawn_body(number: int, routes: Routes, known: Mapping[str, Any]) -> Costly:
    """The body of a number.

    Args:
        routes: For each route that takes JSON its fields, as of :func:`.costly_bodies.json_fields`.
        known: Valid values of fields by name.
    """
    rng = random.Random(number)
    kind = rng.random()
    if kind < 0.7:
        return _json(f"draw {number}", rng, routes, known)
    if kind < 0.9:
        rpc = rng.choice([method for service in services() for method in service.methods])
        route, size = f"/{rpc.containing_service.full_name}/{rpc.name}", MESSAGE_BYTES
        return Costly(f"draw {number}: {route}", route, partial(_message, rng.random(), rpc.input_type, size, b""), {})
    request = tinker_pb2.ForwardBackwardRequest
    start = request(model_id=known["model_id"], seq_id=1, loss_fn="cross_entropy").SerializeToString()
    content = partial(_message, rng.random(), request.DESCRIPTOR, PROTOBUF_BYTES, start)
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    return Costly(f"draw {number}: batch", BATCHES, lambda: gzip.compress(content(), 1), headers, BATCHES.split()[1])


def _json(name: str, rng: random.Random, routes: Routes, known: Mapping[str, Any]) -> Costly:
    route = rng.choice(sorted(routes))
    fields = sorted(routes[route]) or ["a"]
    filled = rng.sample(fields, min(len(fields), rng.choice([1, 1, 2, 4])))
    parts = {key: json.dumps(known[key]) for key in fields if key in known and rng.random() < 0.95}
    seeds = {key: (rng.random(), int(JSON_BYTES * 2 ** -rng.uniform(0, 8)) // len(filled)) for key in filled}
    coding = rng.choice(["gzip", "zstd", "identity"])

    def content() -> bytes:
        values = parts | {key: _value(random.Random(seed), size, 0) for key, (seed, size) in seeds.items()}
        text = ",".join(f"{json.dumps(key)}:{value}" for key, value in values.items())
        body = f"{{{text}}}"[:JSON_BYTES].encode(errors="replace")
        return {"gzip": lambda: gzip.compress(body, 1), "zstd": lambda: zstandard.compress(body)}.get(
            coding, lambda: body
        )()

    target = route.partition(" ")[2].replace("{", "").replace("}", "")
    headers = {"Content-Type": "application/json", "Content-Encoding": coding}
    return Costly(f"{name}: {route} {', '.join(filled)}", route, content, headers, target)


def _value(rng: random.Random, size: int, depth: int) -> str:
    """A value of about so many characters: a part drawn once and repeated, as compression likes it."""
    kind = rng.random()
    if size < 64 or depth > 5 or kind < 0.1:
        return rng.choice(_LEAVES)(rng)
    entry = _value(rng, int(size ** rng.uniform(0.1, 0.6)), depth + 1)
    count = max(1, size // (len(entry) + 8))
    if kind < 0.6:
        return f"[{','.join([entry] * count)}]"
    if kind < 0.9:
        return "{" + ",".join(f'"{number}":{entry}' for number in range(count)) + "}"
    levels = min(count, rng.choice([10, 60, 400]))
    return '{"a":[' * levels + entry + "]}" * levels


def _message(seed: float, descriptor: Any, size: int, start: bytes) -> bytes:
    """Fields with a length, at random depths, with random content, until the message has its size."""
    rng, ways = random.Random(seed), list(paths_of(descriptor, ()))
    found, size = bytearray(start), int(size * 2 ** -rng.uniform(0, 8))
    if not ways:
        return rng.randbytes(size)
    while len(found) < size:
        way, part = rng.choice(ways), rng.randbytes(rng.choice([0, 0, 0, 1, 4, 100, 10_000]))
        entry = varint(way[-1].number << 3 | 2) + varint(len(part)) + part
        entry *= max(1, min(10 ** rng.randrange(7), (size - len(found)) // len(entry)))
        for field in reversed(way[:-1]):
            entry = varint(field.number << 3 | 2) + varint(len(entry)) + entry
        found += entry
    return bytes(found[: 2 * size])
