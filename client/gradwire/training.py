"""The training client: one run, its operations and its description."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.descriptions import ModelInfo, RunInfo
from gradwire.errors import AccessError, ConnectionLostError
from gradwire.extras import require
from gradwire.futures import Future
from gradwire.history import History
from gradwire.losses import model_path
from gradwire.operations import Operations
from gradwire.recordings import RecordedBatch, Recording, RunActivity, rollouts_json
from gradwire.results import Checkpoint, Columns, LossResult, OptimStepResult, SampleResult, TrainStepResult
from gradwire.sessions import RolloutSession, RolloutSessions, SessionOptions
from gradwire.whole_files import write_tar
from gradwire.wire.files import check_folder, download
from gradwire.wire.options import check_options

ROLLOUTS_BYTES = 4 << 20
"""Most bytes of an iteration's rollouts that are recorded."""


class TrainingClient(Operations):
    """One run. Created by ``create_run``, ``fork_run`` or ``get_training_client`` of a :class:`gradwire.ServiceClient`.

    The first operation, or awaiting the client itself, opens the run and fences any other writer.
    """

    def __await__(self) -> Generator[Any, None, TrainingClient]:
        yield from self._link.open().__await__()
        return self

    async def earlier_operations(self) -> dict[int, Future[Any]]:
        """Return the operations that earlier clients submitted and never acknowledged: number -> future of the result.

        Call it before the first operation of this client. After the training program was killed, these are the
        operations that were pending: the server executes them, so do not submit them again. ``info().accepted_seq`` is
        the number of the last one.
        """
        return await self._link.adopt(_any_result)

    async def info(self) -> RunInfo:
        """Fetch the run's description; operations still in the queue are not included."""
        return RunInfo.from_message(
            await self._transport.unary(lambda stub: stub.GetRun, pb.GetRunRequest(run_id=self.run_id))
        )

    async def model_info(self) -> ModelInfo:
        """Fetch the description of the run's base model."""
        request = pb.ListModelsRequest(name=(await self.info()).base_model)
        (model,) = (await self._transport.unary(lambda stub: stub.ListModels, request)).models
        return ModelInfo.from_message(model)

    async def history(self, at_most: int = 0) -> History:
        """Return the figures of the run's operations: loss, metrics, learning rate, gradient norm, tokens, seconds.

        The server keeps it as long as the run: it outlives the program that trains, and a restart of the server. An
        operation shows once its result can be awaited. Of a fork it begins with the source's, up to the checkpoint.

        Args:
            at_most: About so many operations of a longer history, evenly spaced; 0 for all.
        """
        return History.from_wire(await self._transport.history(self.run_id, at_most))

    async def activity(self, limit: int = 100) -> RunActivity:
        """Fetch the run's newest operations with their states and times, and what a recovery of it would cost now.

        Args:
            limit: Most operations; the server keeps 256 that have a result, in memory.
        """
        request = pb.ListOperationsRequest(run_id=self.run_id, limit=limit)
        return RunActivity.from_message(await self._transport.unary(lambda stub: stub.ListOperations, request))

    async def rollout_session(
        self, model: str | Checkpoint | None = None, **options: Unpack[SessionOptions]
    ) -> RolloutSession:
        """Create a session in which an agent samples from this run: a base URL, and a record of what it did there.

        Args:
            model: None: at each call the weights that the run has then. Else a checkpoint.
            options: See :class:`gradwire.SessionOptions`.

        Raises:
            UnsupportedError: The server has no HTTP door.
            LimitExceededError: The key has too many sessions.
        """
        check_options(SessionOptions, options, self.rollout_session)
        source = self.run_id if model is None else self._path_of(model)
        return await RolloutSessions(self._transport).create(source, options)

    async def list_recordings(self) -> list[Recording]:
        """List what was recorded of the run, oldest first: batches (``record_batches``) and rollouts."""
        request = pb.ListRecordingsRequest(run_id=self.run_id)
        answer = await self._transport.unary(lambda stub: stub.ListRecordings, request)
        return [Recording.from_message(each) for each in answer.recordings]

    async def recorded_batch(self, number: int) -> RecordedBatch:
        """Fetch a recorded batch with the log-probabilities that its loss saw.

        Args:
            number: Number of its operation, as :meth:`list_recordings` has it.

        Raises:
            UnknownFileError: It was not recorded, or newer recordings took its room.
        """
        return RecordedBatch.from_wire(*await self._transport.recording(self.run_id, "batch", number))

    async def recorded_rollouts(self, iteration: int) -> list[dict[str, Any]]:
        """Fetch the rollouts that were recorded of an iteration, as :meth:`record_rollouts` was given them.

        Raises:
            UnknownFileError: There are none.
        """
        _, content = await self._transport.recording(self.run_id, "rollouts", iteration)
        found: list[dict[str, Any]] = json.loads(content)
        return found

    async def record_rollouts(self, iteration: int, rollouts: Sequence[Mapping[str, Any]]) -> int:
        """Keep rollouts with the run for people to look at, in place of those of the same iteration.

        Args:
            rollouts: JSON data, as :class:`gradwire.rl.TrajectoryRecorder` writes it. Beyond 4 MiB the rest is left
                out.

        Returns:
            The number of rollouts that were kept.
        """
        content, rows = rollouts_json(rollouts, ROLLOUTS_BYTES)
        request = pb.RecordRolloutsRequest(run_id=self.run_id, iteration=iteration, rollouts_json=content, rows=rows)
        await self._transport.unary(lambda stub: stub.RecordRollouts, request)
        return rows

    async def list_checkpoints(self) -> list[Checkpoint]:
        """List the run's checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(run_id=self.run_id)
        answer = await self._transport.unary(lambda stub: stub.ListCheckpoints, request)
        return [Checkpoint.from_message(each) for each in answer.checkpoints]

    async def delete_checkpoint(self, checkpoint: str | Checkpoint) -> None:
        """Delete a checkpoint: ``"NAME"`` of this run, or ``"RUN_ID/NAME"``."""
        request = pb.DeleteCheckpointRequest(checkpoint=self._path_of(checkpoint))
        await self._transport.delete(lambda stub: stub.DeleteCheckpoint, request)

    async def download_checkpoint(self, checkpoint: str | Checkpoint, path: str | os.PathLike[str]) -> Path:
        """Copy a checkpoint's files to a local folder, which is created if missing."""
        check_folder("download_checkpoint", path)
        request = pb.DownloadRequest(checkpoint=self._path_of(checkpoint))
        return await download(self._transport, request, Path(path))

    async def download_record(self, path: str | os.PathLike[str], *, sign: bool = False) -> Path:
        """Write the record of this run to a tar file, from which ``gradwire verify`` computes the run again.

        It has the operations that have results, with their batches, and what they gave: from the run's creation on with
        ``create_run(keep_journal=True)``, otherwise from an early checkpoint that is still there, which it contains.

        Args:
            path: The file, which is replaced once the record is complete; its folder is created if missing.
            sign: Whether the server signs it with its key (Ed25519).

        Raises:
            PermissionDeniedError: The run is shared with this key to read.
            UnsupportedError: It cannot be recorded: a batch or a checkpoint that it reads is not kept.
        """
        request, path = pb.DownloadRequest(record=self.run_id, sign=sign), Path(path)
        check_folder("download_record", path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            await download(self._transport, request, Path(folder))
            await asyncio.to_thread(write_tar, Path(folder), path)
        return path

    async def push_to_hub(
        self,
        repo: str,
        format: Literal["auto", "hf", "peft", "merged"] = "auto",
        *,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str = "",
        endpoint: str | None = None,
    ) -> str:
        """Upload the run's weights, in program order, to a repository of the Hugging Face hub; needs ``gradwire[hub]``.

        Args:
            repo: ``"NAME"`` or ``"ORGANISATION/NAME"``; created if missing.
            format: As for :meth:`export`.
            private: Whether a repository that is created here is private; None: as the organisation's settings say.
            token: Token of the hub; by default the one of ``hf auth login``.
            commit_message: By default the run's id and step.
            endpoint: Address of the hub; by default ``HF_ENDPOINT``, or huggingface.co.

        Returns:
            The address of the commit.

        Raises:
            AccessError: The hub refuses the token.
            ConnectionLostError: The hub cannot be reached, or does not take the files.
        """
        hub = require("huggingface_hub", "hub", "push_to_hub")
        with tempfile.TemporaryDirectory(prefix="gradwire-hub-") as folder:
            await self.export(folder, format)
            note = commit_message or f"gradwire run {self.run_id}, step {(await self.info()).step}"

            def push() -> str:
                api = hub.HfApi(endpoint=endpoint, token=token)
                created = api.create_repo(repo, private=private, exist_ok=True)
                return str(api.upload_folder(repo_id=created.repo_id, folder_path=folder, commit_message=note))

            try:
                return await asyncio.to_thread(push)
            except hub.errors.HTTPError as error:
                if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
                    raise AccessError(
                        f"the hub refuses to write {repo}: log in with `hf auth login`, or pass a token that may write"
                    ) from error
                where = endpoint or hub.constants.ENDPOINT
                why = str(error).strip().partition("\n")[0]
                raise ConnectionLostError(f"the hub at {where} did not take {repo}: {why}") from error

    async def cancel_operation(self, seq: int) -> bool:
        """Cancel an operation of this run by its number, whoever submitted it; its writer goes on.

        Its future raises ``OperationCancelledError``, and those of operations that counted on it
        ``AbortedPredecessorError``. An operation that is being executed is stopped, if its kind can be.

        Args:
            seq: The operation's number, as in :meth:`activity`.

        Returns:
            False if it has ended, or cannot be stopped.

        Raises:
            UnknownOperationError: No such operation was submitted.
        """
        request = pb.CancelRequest(run_id=self.run_id, seq=seq)
        return (await self._transport.unary(lambda stub: stub.Cancel, request)).cancelled

    async def discard_pending(self) -> int:
        """Cancel the accepted operations of a parked run that have no result, and let the run go on without them.

        The server parks a run that it cannot restore, for example because it was started without the run's model or
        because a checkpoint is damaged: ``info().parked`` says why. A parked run goes on by itself once the cause is
        gone, so discard only what you can do without. Futures of discarded operations raise
        ``OperationCancelledError``.

        Returns:
            Number of discarded operations.

        Raises:
            UnsupportedError: The run is not parked.
        """
        return await self._link.discard()

    async def accept_changes(self) -> RunInfo:
        """Let this run go on although what it is computed with has changed.

        A restored run is compared with what it was: the files of its base model, the dtype, the versions of torch,
        transformers and gradwire, the code of its losses, and the results of repeated operations. A difference parks
        it, and ``info().parked`` names the difference. With this call the run goes on with it; ``info().changes`` keeps
        a note. Other runs are not affected, and another client that writes to this run may go on.

        Raises:
            UnsupportedError: The run is not parked, or for another reason.
            PermissionDeniedError: The run belongs to another key.
        """
        request = pb.AcceptChangesRequest(run_id=self.run_id)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.AcceptChanges, request))

    async def share(self, reader: str) -> RunInfo:
        """Let another key of the server read this run: its results and checkpoints, sampling and forking from them.

        Args:
            reader: The name of the key, as in ``gradwire keys create``.

        Raises:
            InvalidArgumentError: No key has this name.
        """
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    async def unshare(self, reader: str) -> RunInfo:
        """Revoke :meth:`share`. Forks and downloads that the reader made are kept."""
        request = pb.ShareRunRequest(run_id=self.run_id, reader=reader, revoke=True)
        return RunInfo.from_message(await self._transport.unary(lambda stub: stub.ShareRun, request))

    def _path_of(self, checkpoint: str | Checkpoint) -> str:
        path = model_path(checkpoint)
        return path if "/" in path else f"{self.run_id}/{path}"


def _any_result(result: pb.OperationResult, columns: Columns) -> Any:
    """Decode the result of an operation of any kind."""
    decoders: dict[str, Callable[[pb.OperationResult, Columns], Any]] = {
        "loss": LossResult.from_wire,
        "optim_step": OptimStepResult.from_wire,
        "train_step": TrainStepResult.from_wire,
        "sample": SampleResult.from_wire,
        "checkpoint": Checkpoint.from_wire,
    }
    decode = decoders.get(result.WhichOneof("kind") or "")
    return decode(result, columns) if decode else None
