"""Reading saved checkpoints back, beside the request loop.

It takes as long as the disk does and touches no run, so operations do not wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.engine.failures import to_error
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine_link.frames import LinkClosed


class ReadBack:
    """Thread that verifies checkpoints, one after the other.

    Args:
        send: Called with each reply, in the thread.
    """

    def __init__(self, store: CheckpointStore, send: Callable[[engine_pb2.EngineReply], None]) -> None:
        self._store, self._send = store, send
        self._thread = ThreadPoolExecutor(1, "read-back")

    def submit(self, request: engine_pb2.EngineRequest) -> None:
        """Verify a checkpoint after those that wait, and reply."""
        self._thread.submit(self._reply, request)

    def answer(self, request: engine_pb2.EngineRequest) -> engine_pb2.EngineReply:
        """Verify a checkpoint at once; an error becomes the answer."""
        try:
            manifest = self._store.verify(request.verify_checkpoint.checkpoint)
            result = training_pb2.OperationResult(checkpoint=manifest.to_proto())
            return engine_pb2.EngineReply(id=request.id, result=result)
        except Exception as error:  # the boundary: the thread goes on and the caller receives the error
            return engine_pb2.EngineReply(id=request.id, error=to_error(error, "request verify_checkpoint"))

    def _reply(self, request: engine_pb2.EngineRequest) -> None:
        with contextlib.suppress(LinkClosed):  # the thread that reads the link ends the process
            self._send(self.answer(request))
