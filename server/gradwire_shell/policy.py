"""The content security policy: pages load from this server alone, and run no script but their own."""

from __future__ import annotations

import secrets
from typing import Any

from gradwire_http.request_headers import media_type
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline';"
    " img-src 'self' data:; font-src 'self' data:; connect-src 'self' ws: wss:; object-src 'none';"
    " frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
"""NiceGUI compiles templates and evaluates its own calls, hence ``unsafe-eval``; it adds elements of style by script,
hence the inline styles. Its inline scripts have a nonce; others, and handlers in attributes, do not run."""


class ContentPolicy:
    """Add the headers, and the nonce to the scripts of the pages of an application, which compresses nothing itself.

    What pages show of runs and people is escaped in their source, so every script that begins there is the framework's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        nonce = secrets.token_urlsafe(16)
        held: list[Message] = []

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=list(message.get("headers", ())))
                headers["content-security-policy"] = POLICY.format(nonce=nonce)
                headers["x-content-type-options"] = "nosniff"
                headers["referrer-policy"] = "same-origin"
                message = message | {"headers": headers.raw}
                if media_type(headers.get("content-type", "")) == "text/html":
                    held.append(message)
                    return
            elif held:
                held.append(message)
                if not message.get("more_body"):
                    await self._send_page(held, nonce, send)
                return
            await send(message)

        await self.app(scope, receive, with_headers)

    async def _send_page(self, held: list[Message], nonce: str, send: Send) -> None:
        start, *parts = held
        page = b"".join(part.get("body", b"") for part in parts)
        page = page.replace(b"<script", f'<script nonce="{nonce}"'.encode())
        headers = MutableHeaders(raw=start["headers"])
        if "content-length" in headers:
            headers["content-length"] = str(len(page))
        held.clear()
        await send(start)
        await send({"type": "http.response.body", "body": page})
