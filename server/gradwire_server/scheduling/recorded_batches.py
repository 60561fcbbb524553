"""Which batches of a run are recorded for people to look at, and with what.

The engine is asked for the log-probabilities and the advantages that the loss saw beside what the caller asked for; the
caller's result is without them. They are a by-product of the loss, so the gradient is the same with and without.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Sequence

from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.recorded_files import RecordedFiles
from gradwire_server.journal.run_row import RunRecord
from gradwire_server.journal.segments import Buffer
from gradwire_server.operation_kinds import loss_result, training_call

log = logging.getLogger(__name__)

SEEN = ("logprobs", "advantages")


def is_recorded(record: RunRecord, header: pb.OperationHeader) -> bool:
    """Whether a run's setting picks this operation: always its first batch, of the others a share drawn by number."""
    share = record.config.record_batches
    call = training_call(header.operation) if share > 0 else None
    if call is None or call.accumulate:
        return False
    drawn = hashlib.blake2b(f"{record.run_id}/{header.seq}".encode(), digest_size=8).digest()
    return header.seq == 1 or int.from_bytes(drawn, "little") < share * 2**64


class RecordedBatches:
    """Records batches with their results, in tasks of its own."""

    def __init__(self, files: RecordedFiles) -> None:
        self._files = files
        self._writing: set[asyncio.Task[None]] = set()

    def ask(self, record: RunRecord, request: engine_pb2.EngineOperation) -> None:
        """Let the engine return the log-probabilities and advantages of an operation's batch.

        A run with a reward or classification head has no output head whose log-probabilities its losses see.
        """
        call = training_call(request.operation)
        if call is not None and record.config.head in ("", "value"):
            call.outputs.extend(name for name in SEEN if name not in call.outputs)

    def take(
        self,
        record: RunRecord,
        header: pb.OperationHeader,
        batch: Sequence[Buffer],
        result: pb.OperationResult,
        data: Buffer,
    ) -> Buffer:
        """Record a batch with its result, and return the result's tensors without those that only the recording has."""
        call = training_call(header.operation)
        if call is None or result.status != pb.STATUS_SUCCEEDED:
            return data
        columns = codec.decode(result.tensors, data)
        seen = {name: columns[name] for name in SEEN if name in columns}
        if extra := seen.keys() - set(call.outputs):
            for name in extra:
                del columns[name]
            specs, buffers = codec.encode(columns)
            result.ClearField("tensors")
            result.tensors.extend(specs)
            data = b"".join(buffers)
        outputs, parts = codec.encode(seen)
        loss = loss_result(result)
        recording = pb.Recording(
            kind="batch", number=header.seq, step=record.step, time=time.time(),
            operation=header.operation.WhichOneof("kind") or "", loss_fn=call.loss_fn,
            loss_kwargs_json=call.loss_kwargs_json, loss=loss.loss if loss.HasField("loss") else None,
            rows=loss.num_sequences, tokens=loss.num_tokens, tensors=header.tensors, outputs=outputs,
        )  # fmt: skip
        task = asyncio.create_task(self._write(record.run_id, recording, [*batch, *parts]))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return data

    async def _write(self, run_id: str, recording: pb.Recording, content: Sequence[Buffer]) -> None:
        try:
            if not await asyncio.to_thread(self._files.write, run_id, recording, content):
                log.warning("batch %d of %s is larger than max_recorded_bytes", recording.number, run_id)
        except OSError as error:  # a recording is for people; the training goes on without it
            log.warning("batch %d of %s was not recorded: %s", recording.number, run_id, error)

    async def settle(self) -> None:
        """Wait until everything taken so far is written."""
        await asyncio.gather(*self._writing)
