"""Conversion of sampling requests to jobs of the sampler, and of finished jobs to results."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.sampling.sampler import Job, SamplingParams
from gradwire_server.engine.state.engine_run import EngineRun


@dataclass(frozen=True)
class Started:
    """A job in progress, and the number of tokens in its prompts."""

    job: Job
    num_prompt_tokens: int

    def outcome(self) -> Outcome:
        """The result of a finished job.

        Raises:
            Exception: The error that ended the job.
        """
        samples = self.job.samples()
        result = training_pb2.SampleResult(
            stop_reasons=samples.stop_reasons,
            texts=samples.texts,
            num_prompt_tokens=self.num_prompt_tokens,
            num_sampled_tokens=len(samples.token_ids),
        )
        levels = (samples.counts, samples.lengths)
        columns = {"token_ids": Column(samples.token_ids, levels), "logprobs": Column(samples.logprobs, levels)}
        return Outcome(training_pb2.OperationResult(sample=result), columns)


def begin_in_run(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.SampleCall, columns: Columns
) -> Started:
    """Begin a run's ``sample``, the operation ``seq``.

    A call without a seed has one that follows from the run's seed and the operation's number. It draws nothing from the
    run's generators, so that a recovery need not repeat it.

    On a CPU it is computed alone, so that a run's results are bit-identical whatever other runs do.

    Raises:
        OperationError: The request is invalid.
    """
    prompts = None
    if "prompt_ids" in columns:
        column = columns["prompt_ids"]
        if len(column.levels) != 1 or column.values.ndim != 1 or column.values.dtype.kind not in "iu":
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                "prompt_ids is one row of token ids a prompt",
                field="prompt_ids",
            )
        prompts = [row.tolist() for row in column.rows()]
    seed = call.seed if call.HasField("seed") else own_seed(run.config.seed, seq)
    return _begin(context, run.policy, call, prompts, seed, alone=context.pool.device.type == "cpu")


def own_seed(run_seed: int, seq: int) -> int:
    """Seed of a sample that was given none."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{seq}".encode(), digest_size=8).digest()) >> 2


def begin_outside(context: EngineContext, asked: training_pb2.SampleRequest) -> Started:
    """Begin samples of a model or checkpoint outside any run.

    Raises:
        OperationError: The request is invalid.
    """
    policy = context.references.resolve(asked.model, field="model").policy
    prompts = [list(sequence.ids) for sequence in asked.prompt_ids]
    return _begin(context, policy, asked.call, prompts, secrets.randbits(62), alone=False)


def _begin(
    context: EngineContext,
    policy: Policy,
    call: training_pb2.SampleCall,
    prompts: Sequence[Sequence[int]] | None,
    seed: int,
    alone: bool,
) -> Started:
    params = SamplingParams.from_call(call, seed)
    tokenizer = context.tokenizer(policy.facts.name)
    if not prompts and call.prompts:
        if tokenizer is None:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {policy.facts.name!r} has no tokenizer here: send token ids",
                field="prompts",
            )
        prompts = tokenizer.encode(call.prompts)
    prompts = prompts or []
    job = context.sampler.begin(policy, prompts, params, tokenizer, alone=alone)
    return Started(job, sum(map(len, prompts)))
