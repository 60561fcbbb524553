"""Images in conversations: parts of type ``image_url`` whose URL holds the image itself."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gradwire_server.doors.http.openai.requests import unsupported
from gradwire_server.errors import invalid

IMAGE_PART = "image_url"


class ConversationImages:
    """The images of one conversation, in order.

    Attributes:
        numbers: Each one's index into the contents.
        contents: The distinct images.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, int] = {}
        self.numbers: list[int] = []

    @property
    def contents(self) -> list[bytes]:
        return list(self._found)

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> dict[int, list[bytes]]:
        """Digests of the images of each message that has some, of the messages as templates take them."""
        digests = [hashlib.blake2b(content, digest_size=16).digest() for content in self._found]
        numbers, found = iter(self.numbers), dict[int, list[bytes]]()
        for index, message in enumerate(messages):
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part.get("type") == "image":
                    found.setdefault(index, []).append(digests[next(numbers)])
        return found

    def add(self, part: Mapping[str, Any], message: int) -> None:
        """Add the image of a part.

        Args:
            message: Number of its message.

        Raises:
            ServiceError: INVALID_ARGUMENT; UNSUPPORTED for an image that is elsewhere.
        """
        given = part.get(IMAGE_PART)
        url = given.get("url") if isinstance(given, Mapping) else given
        if not isinstance(url, str):
            raise invalid(f"message {message} has an image without a url", "messages")
        if not url.startswith("data:"):
            text = f"message {message} has the URL of an image; this server fetches nothing: send a data: URL"
            raise unsupported(text, "messages")
        head, comma, body = url.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise binascii.Error("it does not begin with data:TYPE;base64,")
            content = base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise invalid(f"message {message} has an image that cannot be read: {error}", "messages") from None
        self.numbers.append(self._found.setdefault(content, len(self._found)))
