"""Compaction: a conversation as what its user said, and the model's own summary of the rest."""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

SUMMARIZE = (
    "Summarize this conversation for whoever goes on with it and sees nothing else of it: what is asked for, what was"
    " done and found, with names, paths and figures, and what is left to do."
)
SUMMARY_TOKENS = 4096
"""The longest summary."""
SUMMARY = "A summary of the conversation so far:\n\n"
_SEAL = b"gradwire:"


def compacted(items: Sequence[Mapping[str, Any]], response: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request for compaction: all messages of the user, and one item with the summary.

    Args:
        response: The answer to :data:`SUMMARIZE`, asked after it.
    """
    asked = [item for item in items if item.get("type", "message") == "message" and item.get("role") == "user"]
    kept = [{"type": "message", "id": _id("msg"), "status": "completed", **_in_parts(item)} for item in asked]
    texts = [part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]]
    summary = {"type": "compaction", "id": _id("cmp"), "encrypted_content": sealed("".join(texts).strip())}
    of_response = {name: response[name] for name in ("created_at", "usage")}
    return {"id": _id("resp"), "object": "response.compaction", "output": [*kept, summary], **of_response}


def sealed(text: str) -> str:
    """A text as ``encrypted_content``, in which clients without stored responses carry it; no secret from them."""
    return base64.b64encode(_SEAL + text.encode(errors="replace")).decode()


def unsealed(content: Any) -> str | None:
    """The text of :func:`sealed`; None for what another server made."""
    try:
        text = base64.b64decode(content if isinstance(content, str) else "", validate=True)
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(_SEAL).decode(errors="replace") if text.startswith(_SEAL) else None


def _in_parts(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item.get("content")
    return {**item, "content": [{"type": "input_text", "text": content}] if isinstance(content, str) else content}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"
