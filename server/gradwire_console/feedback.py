"""The feedback service beside a console, to which the playground hands answers for people to rate."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from urllib.parse import quote, urlsplit


def checked(url: str) -> str:
    """The address of a feedback service.

    Raises:
        ValueError: It is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"--feedback {url!r} is not the address of a feedback service, as http://127.0.0.1:8000")
    return url.rstrip("/")


def offer_url(service: str, prompt: str, answers: Mapping[str, str]) -> str:
    """The page of the feedback service that shows these answers and puts them in its queue.

    They stand behind the ``#``, so that no server or proxy sees them on the way, and the person's own sign-in there
    decides whether they may. A run id names its model, for whoever reads the ratings.

    Args:
        answers: By model.
    """
    rows = [{"response": text, "runId": f"{model[-100:]} {secrets.token_hex(8)}"} for model, text in answers.items()]
    item = {"prompt": prompt, **rows[0], "others": rows[1:]}
    return f"{service}/offer#{quote(json.dumps(item), safe='')}"
