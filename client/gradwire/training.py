"""The training client: one run, its operations and what is known of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import RunInfo
from gradwire.files import download
from gradwire.futures import Future
from gradwire.losses import model_path
from gradwire.operations import Operations
from gradwire.results import Checkpoint, Columns, LossResult, OptimStepResult, SampleResult


class TrainingClient(Operations):
    """One run. Made by ``create_run``, ``fork_run`` or ``get_training_client`` of a :class:`gradwire.ServiceClient`.

    The run is opened, and another writer fenced, with the first operation, or by awaiting the client itself.
    """

    def __await__(self) -> Generator[Any, None, TrainingClient]:
        yield from self._link.open().__await__()
        return self

    async def earlier_operations(self) -> dict[int, Future[Any]]:
        """What clients before this one submitted and never acknowledged: number -> future of its result.

        To be called before the first operation of this client. When the program that trains was killed, these are what
        was pending: they are done, or will be, and are not to be submitted again. ``info().accepted_seq`` is the number
        of the last.
        """
        return await self._link.adopt(_any_result)

    async def info(self) -> RunInfo:
        """The run as the server knows it now; operations in the queue do not show yet."""
        return RunInfo.from_message(
            await self._transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=self.run_id))
        )

    async def list_checkpoints(self) -> list[Checkpoint]:
        """The run's checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(run_id=self.run_id)
        answer = await self._transport.unary(lambda stub: stub.ListCheckpoints, request)
        return [Checkpoint.from_message(each) for each in answer.checkpoints]

    async def delete_checkpoint(self, checkpoint: str | Checkpoint) -> None:
        """Deletes one: ``"NAME"`` of this run, or ``"RUN_ID/NAME"``."""
        request = pb.DeleteCheckpointRequest(checkpoint=self._path_of(checkpoint))
        await self._transport.unary(lambda stub: stub.DeleteCheckpoint, request)

    async def download_checkpoint(self, checkpoint: str | Checkpoint, path: str | os.PathLike[str]) -> Path:
        """Copies a checkpoint's files to a local folder, which is made where it is missing."""
        request = pb.DownloadRequest(checkpoint=self._path_of(checkpoint))
        return await download(self._transport, request, Path(path))

    async def share(self, reader: str) -> RunInfo:
        """Lets another key of the server read this run: its results and checkpoints, sampling and forking from them.

        Args:
            reader: the name of the key, as of ``gradwire keys create``.

        Raises:
            InvalidArgumentError: when no key has this name.
        """
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    async def unshare(self, reader: str) -> RunInfo:
        """Takes back what :meth:`share` gave. What the reader forked or downloaded stays with it."""
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader, revoke=True)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    def _path_of(self, checkpoint: str | Checkpoint) -> str:
        path = model_path(checkpoint)
        return path if "/" in path else f"{self.run_id}/{path}"


def _any_result(result: pb.OperationResult, columns: Columns) -> Any:
    """What an operation gives that is known by its result only."""
    decoders: dict[str, Callable[[pb.OperationResult, Columns], Any]] = {
        "loss": LossResult.from_wire,
        "optim_step": OptimStepResult.from_wire,
        "sample": SampleResult.from_wire,
        "checkpoint": Checkpoint.from_wire,
    }
    decode = decoders.get(result.WhichOneof("kind") or "")
    return decode(result, columns) if decode else None
