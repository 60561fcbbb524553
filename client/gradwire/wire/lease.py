"""The right to write to one run: acquired from the server, and asked for again after a broken connection."""

from __future__ import annotations

import getpass
import os
import secrets
import socket

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import RewoundError, RunBusyError, StaleEpochError
from gradwire.wire.queue import OperationQueue
from gradwire.wire.transport import Transport


class Lease:
    """The lease of one run.

    Args:
        queue: The operations; opening sets the base of their numbers.
        takeover: Whether opening the run fences another writer.

    Attributes:
        epoch: Epoch of this writer, sent with every operation; 0 before :meth:`open`.
        released: Highest number whose result the server had deleted when the run was opened.
    """

    def __init__(self, queue: OperationQueue, transport: Transport, takeover: bool) -> None:
        self._queue, self._transport, self._takeover = queue, transport, takeover
        self._writer = _writer()
        self.epoch = self.released = 0

    async def open(self) -> None:
        """Acquire the run."""
        response = await self._acquire(takeover=self._takeover)
        self.epoch = response.epoch
        self._queue.base = response.run.accepted_seq
        self.released = response.run.released_seq

    async def reopen(self, stale: StaleEpochError) -> None:
        """Reopen the run after a broken connection: the server may have restarted, or another writer may hold the
        run."""
        try:
            response = await self._acquire(takeover=False)
        except RunBusyError as busy:
            raise stale from busy
        base, accepted = self._queue.base, response.run.accepted_seq
        if accepted > base + self._queue.last_index:
            raise stale
        acknowledged = (self._queue.first_unacknowledged or self._queue.last_index + 1) - 1
        if accepted < base + acknowledged:
            raise RewoundError(
                f"the server went back to operation {accepted} of {self._queue.run_id}: the "
                f"{base + acknowledged - accepted} after it were discarded; open the run again to continue from there"
            )
        self.epoch = response.epoch

    async def _acquire(self, *, takeover: bool) -> pb.OpenRunResponse:
        request = pb.OpenRunRequest(run_id=self._queue.run_id, takeover=takeover, writer=self._writer)
        return await self._transport.unary(lambda stub: stub.OpenRun, request)


def _writer() -> str:
    """Name this writer for another writer's error message; unique per client."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the uid has no name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}:{os.getpid()}-{secrets.token_hex(4)}"
