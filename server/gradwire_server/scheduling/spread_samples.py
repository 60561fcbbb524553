"""Samples of one request on several engines.

The prompts are divided among the engines that serve the model. The first part goes to the engine that the request would
go to alone, the others wait for their turns elsewhere. Where a run's current weights are read, its engine writes them
into a file for the others, once for each set of weights, in front of its own part; so all parts read the same weights,
and the run goes on once its engine has done its part. Each sample's random numbers are those of its place in the whole
request, so its tokens are the same wherever it is generated. Its log-probabilities may differ in the last bits, because
these depend on what is computed together; the result says which engine has generated what.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb

from gradwire_server.journal.segments import Buffer
from gradwire_server.sampling_seed import own_seed
from gradwire_server.scheduling.operation import QueuedOperation
from gradwire_server.scheduling.placement import EngineQueue, Placement, Visit
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.samples_in_parts import Asked, OnFrame, OnResult, Part, SamplesInParts, Turns
from gradwire_server.scheduling.shared_files import SharedFiles
from gradwire_server.stores.store import Store

LEAST_SAMPLES = 32
"""Samples of a part at least: with fewer, an engine hardly ends sooner than it would with all of them.

Of a token, most of the time is the same for any number of samples, until there are some dozens (``docs/scaling.md``).
"""


class SpreadSamples:
    """Spreads requests for samples over engines.

    Args:
        placement: The engines.
        turns: Gives places in them.
        store: The store of checkpoints.

    Attributes:
        files: The files of weights that they share.
    """

    def __init__(self, placement: Placement, turns: Turns, store: Store) -> None:
        self._placement, self._turns = placement, turns
        self.files = SharedFiles(store)

    def may_spread(self, queue: RunQueue, operation: QueuedOperation) -> bool:
        """Whether a run's operation asks for samples that several engines could generate."""
        if len(self._placement.engines) < 2 or not operation.row.samples or operation.deaths:
            return False
        tensors, call = operation.header.tensors, operation.header.operation.sample
        if tensors and not (len(tensors) == 1 and tensors[0].name == "prompt_ids" and len(tensors[0].level_sizes) == 1):
            return False
        prompts = tensors[0].level_sizes[0] if tensors else len(call.prompts)
        return self._count(queue.record.config.base_model, call, prompts) > 1

    def in_run(self, queue: RunQueue, operation: QueuedOperation, payload: Sequence[Buffer]) -> SamplesInParts | None:
        """Begin the samples of a run's operation, which is alone in its engine; None if they are not to be spread."""
        if not self.may_spread(queue, operation):
            return None
        sample, config = pb.SampleRequest(call=operation.header.operation.sample), queue.record.config
        if operation.header.tensors:
            try:
                column = codec.decode(operation.header.tensors, b"".join(payload))["prompt_ids"]
            except codec.CodecError:
                return None  # its engine says what is wrong
            if column.values.ndim != 1 or column.values.dtype.kind not in "iu":
                return None
            sample.prompt_ids.extend(pb.TokenIds(ids=row.tolist()) for row in column.rows())
        if not sample.call.HasField("seed"):
            sample.call.seed = own_seed(config.seed, operation.seq)
        asked = Asked(queue.record.owner, config.base_model, sample, queue, operation)
        return self.begin(asked, self._placement.of(queue.record.run_id))

    def outside(
        self,
        request: engine_pb2.EngineRequest,
        visit: Visit,
        there: EngineQueue,
        on_frame: OnFrame | None,
        finished: OnResult,
    ) -> SamplesInParts | None:
        """Begin samples outside a run's queue; None if they are not to be spread.

        Args:
            request: As it would go to one engine.
            visit: The visit that has a place in an engine for them.
            there: That engine.
            on_frame: Takes the frames that the request asks for.
            finished: Takes the results of parts that were stopped.
        """
        sample = request.sample
        if self._count(visit.model, sample.call, max(len(sample.prompt_ids), len(sample.call.prompts))) < 2:
            return None
        if not sample.call.HasField("seed"):
            sample.call.seed = secrets.randbits(62)
        asked = Asked(
            visit.owner,
            visit.model,
            sample,
            visit.run,
            streams=request.streams,
            tells_start=request.tells_start,
            finished=finished,
        )
        return self.begin(asked, there, on_frame)

    def begin(self, asked: Asked, there: EngineQueue, on_frame: OnFrame | None = None) -> SamplesInParts:
        """Begin samples; the part of the engine ``there`` is sent at once, ahead of whatever that is sent next."""
        call = asked.sample.call
        prompts = max(len(asked.sample.prompt_ids), len(call.prompts))
        others = [each for each in self._placement.able(asked.model) if each is not there]
        count = min(self._count(asked.model, call, prompts), 1 + len(others))
        ends = [prompts * number // count for number in range(count + 1)]
        parts = [
            Part(engine, start, end, part_of(asked.sample, start, end))
            for engine, start, end in zip([there, *others], ends, ends[1:], strict=False)
        ]
        return SamplesInParts(self._turns, self.files, asked, parts, on_frame)

    def _count(self, model: str, call: pb.SampleCall, prompts: int) -> int:
        """Number of engines for so many prompts."""
        if call.deterministic or call.prompt_logprobs:
            return 1
        serving = [each for each in self._placement.engines if model in each.engine.models and not each.drains]
        return min(len(serving), prompts, prompts * (call.n or 1) // LEAST_SAMPLES)


def part_of(whole: pb.SampleRequest, start: int, end: int) -> pb.SampleRequest:
    """The request for the samples of some of the prompts."""
    part = pb.SampleRequest(model=whole.model, call=whole.call, images=whole.images)
    if whole.call.prompts:
        del part.call.prompts[:]
        part.call.prompts.extend(whole.call.prompts[start:end])
    part.prompt_ids.extend(whole.prompt_ids[start:end])
    part.prompt_images.extend(whole.prompt_images[start:end])
    return part
