"""Responses that later requests go on from: in memory, within a bound, for a day, and only for who asked for them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.doors.http.openai.responses.requests import Item
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
