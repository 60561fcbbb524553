"""Bodies that are cheap to send and dear to read: every field of every request, filled with what makes the most of it.

The fields come from the OpenAPI documents and the protos, so that a new route is tried without being named here.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import zstandard
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from gradwire_proto.v1 import engine_pb2, jobs_pb2, tinker_pb2, training_pb2

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
    """A body that nobody thought of, drawn from a number alone, so that one that was dear stays as a test.

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


JSON_BYTES, VALUES, CONTAINERS = 8 << 20, 135_000, 15_900
PROTOBUF_BYTES = (64 << 20) - 4096
MESSAGE_BYTES = (8 << 20) - 4096
LINE_BYTES = 60_000
"""Of a request's first line: a head has 64 KiB."""
BATCHES = "POST /api/v1/forward_backward"
_JSON, _FORM = {"Content-Type": "application/json"}, {"Content-Type": "multipart/form-data; boundary=b"}
ENTRIES: dict[str, str] = {
    "zeros": "0", "texts": '"a"', "ids": "17", "lists": "[]", "objects": "{}", "nulls": "null", "pairs": '{"a":0}',
    "rows": "[5]", "messages": '{"role":"user","content":"a"}', "chunks": '{"type":"encoded_text","tokens":[5]}',
}  # fmt: skip
"""Entries of a list that fills a body."""


@dataclass(frozen=True)
class Costly:
    """A request.

    Attributes:
        name: What it is, for messages.
        route: ``METHOD /path`` as the document has it, or the RPC's name with its service.
        content: Makes the body as it is sent; of an RPC, the message.
        target: Path and query of HTTP.
    """

    name: str
    route: str
    content: Callable[[], bytes]
    headers: Mapping[str, str]
    target: str = ""


def routes_of(prefix: str, document: Mapping[str, Any]) -> list[str]:
    """The routes of an OpenAPI document."""
    return [f"{method.upper()} {prefix}{path}" for path, methods in document["paths"].items() for method in methods]


def http_bodies(prefix: str, document: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Costly]:
    """Requests for every route of an OpenAPI document, whatever it takes.

    Args:
        known: As for :func:`json_bodies`.
    """
    yield from json_bodies(prefix, document, known)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            route = f"{method.upper()} {prefix}{path}"
            wide, target = path, prefix + path.replace("{", "").replace("}", "")
            names = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"] or ["u"]
            for each in operation.get("parameters", ()):
                wide = wide.replace(f"{{{each['name']}}}", "%2F%00a" * (LINE_BYTES // 7 // max(1, path.count("{"))))
            query = "&".join(f"{names[number % len(names)]}={number}" for number in range(LINE_BYTES // 12))
            yield Costly(f"{route}: long names", route, bytes, {}, prefix + wide)
            yield Costly(f"{route}: many parameters", route, bytes, {}, f"{target}?{query}"[:LINE_BYTES])
            yield Costly(f"{route}: a body that is none", route, partial(bytes, JSON_BYTES), _JSON, target)
            if "multipart/form-data" in operation.get("requestBody", {}).get("content", {}):
                for name, content in _forms():
                    yield Costly(f"{route}: {name}", route, content, _FORM, target)


def _forms() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Bodies of ``multipart/form-data``."""
    head = b'--b\r\nContent-Disposition: form-data; name="'
    rows = head + b'purpose"\r\n\r\nfine-tune\r\n' + head + b'file"; filename="a.jsonl"\r\n\r\n'
    yield "many fields", lambda: (head + b'a"\r\n\r\n\r\n') * 100_000
    yield "a long name", lambda: head + b"a" * JSON_BYTES + b'"\r\n\r\n\r\n--b--'
    yield "a long field", lambda: head + b'purpose"\r\n\r\n' + bytes(JSON_BYTES) + b"\r\n--b--"
    yield "many boundaries", lambda: rows + b"\r\n--a" * (JSON_BYTES // 5) + b"\r\n--b--"
    yield "deep rows", lambda: rows + (b"[" * 900 + b"]" * 900 + b"\n") * 500 + b"\r\n--b--"


def json_fields(prefix: str, document: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The fields of each route that takes JSON."""
    found = {}
    for path, methods in document["paths"].items():
        schema = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if "schema" in schema:
            found[f"POST {prefix}{path}"] = _resolved(schema["schema"], document).get("properties", {})
    return found


def json_bodies(prefix: str, document: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Costly]:
    """Bodies of JSON for every route of an OpenAPI document.

    Args:
        known: Valid values of fields by name, so that the wrong part is what costs.
    """
    for route, fields in json_fields(prefix, document).items():
        valid = {name: known[name] for name in fields if name in known}
        for name in fields:
            others = {key: value for key, value in valid.items() if key != name}
            for kind, fill in _fillings():
                yield _as_json(f"{route} {name}: {kind}", route, others, name, fill)
        for count in (JSON_BYTES // 14, CONTAINERS):
            yield _as_json(f"{route}: {count:,} unknown fields", route, valid, "", partial(_keys, count, "0"))


def _fillings() -> Iterator[tuple[str, Callable[[], str]]]:
    """Fillings of a field: as many entries as a body has room for, and just as many as are let through."""
    for kind, entry in ENTRIES.items():
        containers, values = sum(map(entry.count, "[{:")), entry.count(",") + 1
        allowed = min(VALUES // (values + containers), CONTAINERS // max(containers, 1))
        for count in (JSON_BYTES // (len(entry) + 2), allowed):
            yield f"{count:,} {kind}", partial(_list, entry, count)
    for count in (JSON_BYTES // 14, CONTAINERS):
        yield f"{count:,} keys", lambda count=count: f"{{{_keys(count, '1')}}}"
    yield "levels", lambda: "[" * 900 + "]" * 900
    yield "digits", lambda: "9" * (JSON_BYTES - 4096)
    yield "text", lambda: '"' + "a, " * (JSON_BYTES // 3 - 4096) + '"'
    yield "long texts", partial(_list, json.dumps("word " * 50_000), 30)


def _list(entry: str, count: int) -> str:
    return f"[{','.join([entry] * count)}]"


def _keys(count: int, value: str) -> str:
    return ",".join(f'"u{number}":{value}' for number in range(count))


def _as_json(name: str, route: str, valid: Mapping[str, Any], field: str, fill: Callable[[], str]) -> Costly:
    def content() -> bytes:
        parts = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in valid.items()]
        parts.append(f"{json.dumps(field)}:{fill()}" if field else fill())
        return gzip.compress(f"{{{','.join(parts)}}}".encode(), 1)

    target = route.partition(" ")[2].replace("{", "").replace("}", "")
    return Costly(name, route, content, _JSON | {"Content-Encoding": "gzip"}, target)


def _resolved(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def batch_bodies(model_id: str) -> Iterator[Costly]:
    """Bodies of ``forward_backward``, each a repeated field of empty entries, at every depth of the request."""
    request = tinker_pb2.ForwardBackwardRequest
    start = request(model_id=model_id, seq_id=1, loss_fn="cross_entropy").SerializeToString()
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    for name, fill in _filled(request.DESCRIPTOR, PROTOBUF_BYTES):
        content = lambda fill=fill: gzip.compress(start + fill(), 1)  # noqa: E731
        yield Costly(f"batch {name}", BATCHES, content, headers, BATCHES.partition(" ")[2])


def messages() -> Iterator[Costly]:
    """Messages for every RPC, each a repeated field of empty entries, at every depth of the request, or no message."""
    for service in services():
        for method in service.methods:
            route = f"/{service.full_name}/{method.name}"
            unknown = partial(bytes, MESSAGE_BYTES)  # a field of number 0
            for name, content in [*_filled(method.input_type, MESSAGE_BYTES), ("none", unknown)]:
                yield Costly(f"{method.name} {name}", route, content, {})


def services() -> list[ServiceDescriptor]:
    """The services of the gRPC door."""
    files = (training_pb2.DESCRIPTOR, jobs_pb2.DESCRIPTOR, engine_pb2.DESCRIPTOR)
    return [service for file in files for service in file.services_by_name.values()]


def _filled(descriptor: Descriptor, size: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    for path in paths_of(descriptor, ()):
        yield ".".join(field.name for field in path), partial(_repeated, path, size)


def _repeated(path: tuple[FieldDescriptor, ...], size: int) -> bytes:
    tag = varint(path[-1].number << 3 | 2)
    content = (tag + b"\0") * (size // (len(tag) + 1))
    for field in reversed(path[:-1]):
        content = varint(field.number << 3 | 2) + varint(len(content)) + content
    return content


def paths_of(descriptor: Descriptor, before: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    """Ways to the fields with a length in bytes; a message is entered once on each."""
    for field in descriptor.fields:
        if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            if field.is_repeated:
                yield (*before, field)
            inside = field.message_type
            if inside is not None and len(before) < 3 and inside not in [each.containing_type for each in before]:
                yield from paths_of(inside, (*before, field))


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def drawn(rng: random.Random, bodies: list[Costly]) -> tuple[list[Costly], Iterator[Costly]]:
    """One body of every route, and the others, in any order."""
    rng.shuffle(bodies)
    first = {body.route: body for body in bodies}
    return list(first.values()), (body for body in bodies if first[body.route] is not body)
