"""The feedback service beside a console: the playground hands it answers to rate, and pages show what people said."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from gradwire_console.answers import Answers

EVERY_S = 10.0


@dataclass(frozen=True)
class Rated:
    """People's ratings of the answers from one source of an agent.

    Attributes:
        source: A version, ``"base"``, the path of a checkpoint or the name of a model; "" for others.
        scores: Number of scores.
        mean: Their mean, 0 to 1; None without any.
        wins, ties, losses: Results of its answers against another source's, in rankings.
        weight: Share of the users that it is deployed for.
    """

    agent: str
    source: str
    scores: int
    mean: float | None
    wins: int
    ties: int
    losses: int
    weight: float

    @property
    def words(self) -> str:
        """For people: ``"0.82 of 12, won 3 of 5"``."""
        said = [f"{self.mean:.2f} of {self.scores}"] if self.mean is not None else []
        if ranked := self.wins + self.ties + self.losses:
            said.append(f"won {self.wins} of {ranked}")
        return ", ".join(said)


class Feedback:
    """A feedback service.

    Args:
        key: A key of it with the role ``read``; "" where it asks for none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key, self._answers = checked(url), key, Answers()

    async def ratings(self) -> list[Rated]:
        """Return all ratings by agent and source, at most ten seconds old; all pages share them.

        Raises:
            OSError: The service cannot be reached, or refuses; it says why.
        """
        return await self._answers.of("ratings", self._ask, every_s=EVERY_S, stale_s=EVERY_S)

    async def _ask(self) -> list[Rated]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with httpx.AsyncClient(timeout=10.0) as client:
                answer = await client.get(f"{self.url}/api/policies", headers=headers)
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise OSError(f"the feedback service at {self.url} does not answer: {reason}") from None
        if answer.status_code in (401, 403):
            raise OSError(
                f"the feedback service at {self.url} refuses: {_detail(answer)}. Start the console with a key of it in"
                " GRADWIRE_FEEDBACK_KEY: gradwire feedback keys create console --role read"
            )
        if not answer.is_success:
            raise OSError(f"the feedback service at {self.url} answers {answer.status_code}: {_detail(answer)}")
        return [
            Rated(
                agent["agentId"], each["source"], each["scores"], each["mean"], each["wins"], each["ties"],
                each["losses"], agent["weights"].get(each["source"], 0.0),
            )
            for agent in answer.json()
            for each in agent["sources"]
        ]  # fmt: skip


def _detail(answer: httpx.Response) -> str:
    try:
        body: Any = answer.json()
    except ValueError:
        body = None
    return str(body.get("detail", "") if isinstance(body, dict) else answer.text)[:200]


def checked(url: str) -> str:
    """The address of a feedback service.

    Raises:
        ValueError: It is not the address of a feedback service.
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
