"""The routes of ``/v1/responses``."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.access.keys import Caller
from gradwire_server.core.core import Core
from gradwire_server.doors.http.openai.answers import TokenTexts, unless_left
from gradwire_server.doors.http.openai.conversations import Conversation
from gradwire_server.doors.http.openai.events import event_stream
from gradwire_server.doors.http.openai.requests import named, unsupported
from gradwire_server.doors.http.openai.responses.compaction import SUMMARIZE, SUMMARY_TOKENS, compacted
from gradwire_server.doors.http.openai.responses.requests import Item, ResponseRequest, with_references
from gradwire_server.doors.http.openai.responses.writing import Writing
from gradwire_server.doors.http.openai.unserved import tell_ignored
from gradwire_server.doors.http.protocol import CallerOf
from gradwire_server.errors import ServiceError

KEPT_S = 24 * 3600.0
KEPT_BYTES = 16 << 20
"""Bytes kept of one key's responses, with everything that was said before; the oldest go first."""
ALL_KEPT_BYTES = 256 << 20
"""Bytes kept of all keys' responses; those of the key that has most go first."""


@dataclass(frozen=True)
class Kept:
    """One response.

    Attributes:
        content: It, as JSON.
        items: The items before it, its input and its output, as JSON.
        inputs: How many of the items were there before the output.
        ids: Ids of the items of its output.
        until: ``time.monotonic()`` at which it ends.
    """

    content: bytes
    items: bytes
    inputs: int
    ids: frozenset[str]
    until: float

    @property
    def size(self) -> int:
        return len(self.content) + len(self.items)

    def all_items(self) -> list[Item]:
        """Everything that was said."""
        found: list[Item] = json.loads(self.items)
        return found


@dataclass
class _Owner:
    """One key's responses, oldest first."""

    responses: dict[str, Kept] = field(default_factory=dict)
    size: int = 0

    def drop(self, response_id: str) -> None:
        self.size -= self.responses.pop(response_id).size


class KeptResponses:
    """The responses of every key."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}

    def put(self, owner: str, response: dict[str, Any], items: Sequence[Item]) -> None:
        """Keep a response, unless it alone is beyond the bound.

        Args:
            items: The items before it.
        """
        self._end()
        output = response["output"]
        kept = Kept(
            json.dumps(response).encode(),
            json.dumps([*items, *output]).encode(),
            len(items),
            frozenset(item["id"] for item in output),
            time.monotonic() + KEPT_S,
        )
        own = self._owners.setdefault(owner, _Owner())
        own.responses[response["id"]] = kept
        own.size += kept.size
        while own.size > KEPT_BYTES:
            own.drop(next(iter(own.responses)))
        while sum(each.size for each in self._owners.values()) > ALL_KEPT_BYTES:
            most = max(self._owners.values(), key=lambda each: each.size)
            most.drop(next(iter(most.responses)))

    def get(self, owner: str, response_id: str, param: str = "response_id") -> Kept:
        """A response.

        Raises:
            ServiceError: UNKNOWN_OPERATION, also for another key's.
        """
        self._end()
        kept = self._owners.get(owner, _Owner()).responses.get(response_id)
        if kept is None:
            message = (
                f"there is no response {response_id[:100]!r} any more, or it was never kept: they stay in the server's"
                " memory for a day, up to 16 MiB a key; send the whole conversation as input"
            )
            raise ServiceError(pb.ERROR_CODE_UNKNOWN_OPERATION, message, field=param)
        return kept

    def item(self, owner: str, item_id: str) -> Item:
        """An item of a response's output."""
        self._end()
        for kept in self._owners.get(owner, _Owner()).responses.values():
            if item_id in kept.ids:
                return next(item for item in kept.all_items() if item.get("id") == item_id)
        message = f"there is no item {item_id[:100]!r} any more, or its response was never kept; send the item itself"
        raise ServiceError(pb.ERROR_CODE_UNKNOWN_OPERATION, message, field="input")

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response."""
        self.get(owner, response_id)
        self._owners[owner].drop(response_id)

    def _end(self) -> None:
        """Forget what has had its day."""
        now = time.monotonic()
        for name, owner in list(self._owners.items()):
            while owner.responses and next(iter(owner.responses.values())).until < now:
                owner.drop(next(iter(owner.responses)))
            if not owner.responses:
                del self._owners[name]


PARAMETERS = dict.fromkeys(("prompts", "texts", "conversations", "images", "messages"), "input")
PARAMETERS |= {"json_schema": "text", "reasoning_effort": "reasoning.effort", "response_format": "text"}


def routes(core: Core) -> APIRouter:
    """The routes."""
    router, kept = APIRouter(), KeptResponses()

    def said(asked: ResponseRequest, caller: Caller) -> list[Item]:
        """The whole conversation that a request is about."""
        items = with_references(asked.own_items, lambda item: kept.item(caller.space, item))
        if asked.previous_response_id is None:
            return items
        before = kept.get(caller.space, asked.previous_response_id, "previous_response_id")
        return [*before.all_items(), *items]

    async def answer(
        asked: ResponseRequest, items: Sequence[Item], http: Request, caller: Caller
    ) -> Response | dict[str, Any]:
        with named(PARAMETERS):
            chat = asked.chat(items)
            conversation = Conversation(core, caller, chat)
            call = await conversation.request()
            tell_ignored(http, chat, PARAMETERS)
            writing = Writing(asked, TokenTexts(core, caller, conversation.base))

            async def events() -> AsyncGenerator[Mapping[str, Any]]:
                async for event in writing.events(conversation.parts(call)):
                    if event["type"] in ("response.completed", "response.incomplete"):
                        keep(caller.space, asked, writing.response, items)
                    yield event

            if asked.stream:
                return await event_stream(events(), writing.error, http.url.path, typed=True)
            response = await unless_left(lambda begun: writing.whole(conversation.parts(call, begun)), http)
        keep(caller.space, asked, response, items)
        return response

    @router.post("/responses", response_model=None)
    async def create_response(asked: ResponseRequest, http: Request, caller: CallerOf) -> Response | dict[str, Any]:
        return await answer(asked, said(asked, caller), http, caller)

    @router.post("/responses/input_tokens")
    async def count_input_tokens(asked: ResponseRequest, http: Request, caller: CallerOf) -> dict[str, Any]:
        with named(PARAMETERS):
            chat = asked.chat(said(asked, caller))
            call = await Conversation(core, caller, chat).request()
            tell_ignored(http, chat, PARAMETERS)
        return {"object": "response.input_tokens", "input_tokens": len(call.prompt_ids[0].ids)}

    @router.post("/responses/compact")
    async def compact_response(asked: ResponseRequest, http: Request, caller: CallerOf) -> dict[str, Any]:
        items = said(asked, caller)
        told = {"role": "user", "content": SUMMARIZE}
        turn = asked.model_copy(update={"store": False, "stream": None, "max_output_tokens": SUMMARY_TOKENS})
        response = await answer(turn, [*items, told], http, caller)
        assert isinstance(response, dict)
        return compacted(items, response)

    @router.get("/responses", include_in_schema=False)
    async def no_websocket() -> None:
        raise unsupported("responses are not served by a websocket: POST to /v1/responses, with stream for events", "")

    @router.post("/conversations", include_in_schema=False)
    @router.get("/conversations/{rest:path}", include_in_schema=False)
    async def no_conversations() -> None:
        message = "this server keeps no conversations: go on with previous_response_id, or send all of it as input"
        raise unsupported(message, "conversation")

    def keep(owner: str, asked: ResponseRequest, response: dict[str, Any], items: Sequence[Item]) -> None:
        if asked.store is not False:
            kept.put(owner, response, items)

    @router.get("/responses/{response_id}")
    async def get_response(response_id: str, caller: CallerOf) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(kept.get(caller.space, response_id).content)
        return found

    @router.get("/responses/{response_id}/input_items")
    async def list_input_items(response_id: str, caller: CallerOf) -> dict[str, Any]:
        found = kept.get(caller.space, response_id)
        items = [
            {"type": "message", "id": f"{response_id}_{number}", **item}
            for number, item in enumerate(found.all_items()[: found.inputs])
        ]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
        return {"object": "list", "data": items[::-1], "has_more": False, **ends}

    @router.delete("/responses/{response_id}")
    async def delete_response(response_id: str, caller: CallerOf) -> dict[str, Any]:
        kept.delete(caller.space, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router
