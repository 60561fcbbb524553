"""Which beginnings of prompts an engine was sent, as its sampler may know their keys and values.

The front does not ask: an engine keeps what it has room for. So a beginning that it was sent is worth something, and
no more than a few requests that wait for it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.engine_client.client import EngineClient, Holder

BLOCK = 128
"""Tokens, or characters of a text, that are compared at once."""
BLOCKS = 1 << 14
"""Blocks that are remembered of each engine: two million tokens."""
REQUEST = 512
"""Tokens to compute that count as much as a request that an engine has."""
MOST = 8
"""Requests that an engine may have more than another, whatever it was sent."""


def beginnings(owner: str, request: pb.SampleRequest) -> list[bytes]:
    """Digests of a request's first prompt up to the end of each block; none of one with images."""
    if request.prompt_images:
        return []
    if request.prompt_ids:
        ids = np.array(request.prompt_ids[0].ids, np.uint32)
        blocks = [each.tobytes() for each in np.split(ids, range(BLOCK, len(ids), BLOCK))]
    else:
        text = request.call.prompts[0] if request.call.prompts else ""
        blocks = [text[start : start + BLOCK].encode() for start in range(0, len(text), BLOCK)]
    whole, found = hashlib.blake2b(repr((owner, request.model)).encode(), digest_size=16), list[bytes]()
    for block in blocks[: len(blocks) - 1]:  # the last one may go on
        whole.update(block)
        found.append(whole.digest())
    return found


class SentPrompts:
    """The beginnings that the process of an engine was sent, the latest last."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._holder: Holder | None = None
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def add(self, prompt: Sequence[bytes]) -> None:
        """Add the :func:`beginnings` of a prompt."""
        of_process = self._of_process()
        for block in reversed(prompt):  # so that its end is forgotten first
            of_process[block] = None
            of_process.move_to_end(block)
        while len(of_process) > BLOCKS:
            of_process.popitem(last=False)

    def worth(self, prompt: Sequence[bytes]) -> float:
        """What those of a prompt are worth, in requests."""
        of_process = self._of_process()
        count = next((number for number in range(len(prompt), 0, -1) if prompt[number - 1] in of_process), 0)
        return min(count * BLOCK / REQUEST, MOST)

    def _of_process(self) -> OrderedDict[bytes, None]:
        if self._holder is not self._engine.holder:
            self._holder = self._engine.holder
            self._blocks.clear()
        return self._blocks
