"""Operations that save, load and export a run."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path
from typing import Literal

from gradwire_proto.v1 import training_pb2 as pb

from gradwire.futures import Future
from gradwire.losses import model_path
from gradwire.operations.submitter import Submitter
from gradwire.results import Checkpoint
from gradwire.wire.entries import Request
from gradwire.wire.files import check_folder, download
from gradwire.wire.requests import message

logger = logging.getLogger(__name__)


class CheckpointOperations(Submitter):
    """Operations that write or read folders. Every method submits at once and returns a future."""

    def save_checkpoint(
        self, name: str = "", note: str = "", overwrite: bool = False, timeout: float | None = None
    ) -> Future[Checkpoint]:
        """Save weights, optimizer state, random generators and the position in the queue.

        Args:
            name: Letters, digits and ``._-``; empty: ``step-N``.
            note: A note for people.
            overwrite: Replace a checkpoint of the same name instead of raising AlreadyExistsError.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
        """

        def build() -> Request:
            save = message(pb.SaveCheckpoint, name=name, note=note, overwrite=overwrite)
            return Request.of(pb.Operation(save_checkpoint=save))

        return self._queue.submit("save_checkpoint", build, Checkpoint.from_wire, timeout)

    def load_checkpoint(
        self, checkpoint: str | Checkpoint, weights_only: bool = False, timeout: float | None = None
    ) -> Future[Checkpoint]:
        """Restore a checkpoint, ``"NAME"`` of this run or ``"RUN_ID/NAME"``; the future gives its description.

        Args:
            checkpoint: The checkpoint to restore.
            weights_only: Keep the optimizer state and the random generators as they are.
            timeout: Seconds after its acceptance by the server from which on the operation fails with
                ``DeadlineExceededError`` if it still waits; once begun it is finished. None for no limit.
        """

        def build() -> Request:
            load = message(pb.LoadCheckpoint, checkpoint=model_path(checkpoint), weights_only=weights_only)
            return Request.of(pb.Operation(load_checkpoint=load))

        return self._queue.submit("load_checkpoint", build, Checkpoint.from_wire, timeout)

    def export(
        self,
        path: str | os.PathLike[str],
        format: Literal["auto", "hf", "peft", "merged"] = "auto",
        timeout: float | None = None,
    ) -> Future[Path]:
        """Write the run's weights at this point of the program to a local folder.

        Args:
            path: The folder; created if missing.
            format: ``"hf"`` for ``transformers``, ``"peft"`` for the adapter alone, ``"merged"`` for the adapter
                merged into its base, which a server with ``--quantize`` holds in few bits and the export never
                (the log says how far the two are apart); ``"auto"``: ``"peft"`` for a LoRA run, else ``"hf"``.
            timeout: As for :meth:`save_checkpoint`; the transfer of the files, which follows, is not limited.

        Errors of the future:
            InvalidArgumentError: The path is a file or cannot be written to, or the format is unknown.
        """
        name = f"export-{secrets.token_hex(8)}"

        def build() -> Request:
            check_folder("export", path)
            return Request.of(pb.Operation(export=message(pb.ExportModel, name=name, format=format)))

        async def fetch(export: pb.ExportResult) -> Path:
            if export.HasField("logprob_difference"):
                logger.warning(
                    "%s: the adapter was trained on a quantized base and is merged into the unquantized weights; the "
                    "log-probabilities of the export differ from the run's by up to %.2g nats",
                    self.run_id,
                    export.logprob_difference,
                )
            source = pb.DownloadRequest(export=f"{self.run_id}/{export.name or name}")
            return await download(self._transport, source, Path(path))

        exported = self._queue.submit("export", build, lambda result, columns: result.export, timeout)
        return exported._then(f"export of {self.run_id}", fetch)
