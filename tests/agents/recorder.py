"""A proxy between an agent and a server, which keeps what is asked and how it is answered."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BODIES = Path(__file__).with_name("bodies")
MOST_CHARS = 48
LIKE_AN_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|[0-9a-f]{16}")
UNPASSED = ("connection", "content-length", "date", "host", "transfer-encoding")


@dataclass
class Exchange:
    """A request and the status of its answer."""

    method: str
    path: str
    body: Any
    status: int
    ignored: str

    @property
    def sampled(self) -> bool:
        """Whether it asked for an answer of the model's, and got one."""
        return self.method == "POST" and self.status == 200 and not self.path.endswith("/count_tokens")


@dataclass
class Record:
    """What passed.

    Attributes:
        url: The proxy's address.
    """

    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def refusals(self) -> list[tuple[str, int]]:
        """What was refused of the doors' own paths."""
        return [(each.path, each.status) for each in self.exchanges if each.status >= 400 and each.method == "POST"]

    def summary(self) -> str:
        """A line for each exchange."""
        return "\n".join(f"{each.method} {each.path} {each.status} {each.ignored}" for each in self.exchanges)

    def save(self, name: str) -> None:
        """Write the last request with tools and without, shrunk, if ``GRADWIRE_RECORD_AGENTS`` is set."""
        if "GRADWIRE_RECORD_AGENTS" not in os.environ:
            return
        kept = {}
        for each in self.exchanges:
            if each.body is not None:
                path = each.path.partition("?")[0].split("/v1/")[-1]
                kept[path, bool(each.body.get("tools"))] = asdict(Body(path, shrunk(each.body), each.ignored))
        BODIES.mkdir(exist_ok=True)
        text = json.dumps([*kept.values()], separators=(",", ":"), ensure_ascii=False)
        (BODIES / f"{name}.json").write_text(text.replace('},{"path"', '},\n{"path"') + "\n")


@dataclass(frozen=True)
class Body:
    """A recorded request: its path below ``/v1``, its shrunk body, and what the answer said was ignored."""

    path: str
    body: dict[str, Any]
    ignored: str


def shrunk(value: Any, name: str = "") -> Any:
    """A body without prose and without what tells machines apart: its fields, types and small values.

    Tools are the first four and one of each other type, with three properties each; a text is how long it was.
    """
    if isinstance(value, str):
        if name == "arguments":
            return value if len(value) <= MOST_CHARS else "{}"
        told = len(value) > MOST_CHARS or name in ("description", "user_id") or LIKE_AN_ID.search(value)
        return (
            f"text of {len(value)}" if told and name not in ("id", "call_id", "tool_use_id", "tool_call_id") else value
        )
    if isinstance(value, list):
        if name == "tools":
            kinds = [each.get("type") for each in value]
            value = [each for number, each in enumerate(value) if number < 4 or kinds.index(kinds[number]) == number]
        return [shrunk(each, name) for each in value[: 8 if name in ("enum", "required") else None]]
    if isinstance(value, dict):
        if name in ("properties", "$defs"):
            value = dict(list(value.items())[:3])
        kept = value.get("properties")
        if isinstance(value.get("required"), list) and isinstance(kept, dict):
            value = value | {"required": [each for each in value["required"] if each in list(kept)[:3]]}
        return {key: shrunk(each, key) for key, each in value.items()}
    return value


@contextlib.contextmanager
def recorder(upstream: str) -> Iterator[Record]:
    """Serve a proxy of a server at this URL."""
    record = Record("")

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(upstream.removeprefix("http://"), timeout=300)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in UNPASSED}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            ignored = answer.headers.get("gradwire-ignored", "")
            asked = json.loads(body) if body[:1] == b"{" else None
            record.exchanges.append(Exchange(self.command, self.path, asked, answer.status, ignored))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in UNPASSED:
                    self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                while part := answer.read1(1 << 16):
                    self.wfile.write(part)
                    self.wfile.flush()
            connection.close()

        do_GET = do_POST = do_HEAD = do_DELETE = _pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        record.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield record
        finally:
            server.shutdown()
