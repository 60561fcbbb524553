"""Models that graders ask, by the names of this door."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fastapi import Request

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.openai.conversations import Conversation
from gradwire_server.doors.http.openai.names import find_model
from gradwire_server.doors.http.openai.requests import ChatRequest, JsonSchemaFormat, ResponseFormat
from gradwire_server.errors import ServiceError

JUDGED = ("score_model", "label_model")


def with_sources(core: Core, caller: Caller, grader: dict[str, Any], param: str) -> dict[str, Any]:
    """A valid grader whose models have the names that our SDK samples from.

    Raises:
        ServiceError: UNKNOWN_MODEL for one that the caller may not read.
    """
    expanded = copy.deepcopy(grader)
    for part in _judged(expanded):
        try:
            part["model"] = find_model(core, caller, part["model"]).source
        except ServiceError as error:
            error.error.field = param
            raise
    return expanded


def _judged(spec: Any) -> Iterator[dict[str, Any]]:
    """The parts of a grader that name a model."""
    if isinstance(spec, dict):
        if spec.get("type") in JUDGED:
            yield spec
        for each in spec.values():
            yield from _judged(each)


class Asked:
    """Puts the questions of a grader's trial to the server's models.

    Attributes:
        tokens: Name of a model -> tokens that it read and wrote.
    """

    def __init__(self, core: Core, caller: Caller, http: Request) -> None:
        self._core, self._caller, self._http = core, caller, http
        self.tokens: Counter[str] = Counter()

    async def __call__(self, question: dict[str, Any]) -> str:
        """The text of an answer.

        Raises:
            ServiceError: It could not be sampled.
        """
        form = ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema=question["json_schema"]))
        asked = ChatRequest(
            model=question["model"], messages=question["messages"], temperature=question["temperature"],
            top_p=question["top_p"], seed=question["seed"], max_tokens=question["max_tokens"], response_format=form,
        )  # fmt: skip
        conversation = Conversation(self._core, self._caller, asked)
        (part,), counts = await conversation.answers(await conversation.request(), self._http)
        self.tokens[question["model"]] += counts.prompt + counts.sampled
        return part.content
