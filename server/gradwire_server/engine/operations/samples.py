"""Conversion of sampling requests to jobs of the sampler, and of finished jobs to results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.engine.errors import OperationError, invalid
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.vision.row_images import (
    RowImages,
    check_without_images,
    images_of_rows,
    prompts_with_images,
    read_images,
)
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.request import Columns, Outcome
from gradwire_server.engine.sampling.prompt_scores import Draws, PromptScores, candidate_ids, score_prompts
from gradwire_server.engine.sampling.samplers.sampler import Job, SamplingParams
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.sampling_seed import own_seed


@dataclass(frozen=True)
class Started:
    """A job in progress.

    Attributes:
        job: The job.
        num_prompt_tokens: Number of tokens in its prompts.
        num_samples: Number of its samples.
        prompt_scores: The scores of its prompts if the call wants them, else None.
    """

    job: Job
    num_prompt_tokens: int
    num_samples: int
    prompt_scores: PromptScores | None = None

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
        if samples.top is not None:
            columns |= {
                "top_token_ids": Column(samples.top[0], levels), "top_logprobs": Column(samples.top[1], levels)
            }  # fmt: skip
        if self.prompt_scores is not None:
            columns |= _prompt_columns(self.prompt_scores)
        return Outcome(training_pb2.OperationResult(sample=result), columns)


def begin_in_run(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.SampleCall, columns: Columns, owner: str
) -> Started:
    """Begin a run's ``sample``, the operation ``seq``.

    A call without a seed has one that follows from the run's seed and the operation's number. It draws nothing from the
    run's generators, so that a recovery need not repeat it.

    On a CPU it is computed alone unless runs are grouped, so that a run's results are bit-identical whatever other runs
    do.

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
    images = images_of_rows(run.policy, columns) if IMAGES in columns or IMAGE_BYTES in columns else None
    return _begin(context, run.policy, call, prompts, seed, owner=owner, alone=_alone_in_run(context), images=images)


def _alone_in_run(context: EngineContext) -> bool:
    return context.pool.device.type == "cpu" and not context.groups_runs


def begin_outside(context: EngineContext, request: engine_pb2.EngineRequest) -> Started:
    """Begin samples of a model, a checkpoint or a run's weights, outside any run's queue, or a part of such samples.

    Raises:
        OperationError: The request is invalid.
    """
    asked = request.sample
    if request.sampled_run:
        run = context.held(request.sampled_run)
        context.residency.use(run)
        policy = run.policy
    elif request.HasField("weights"):
        policy = context.references.shared(request.weights).policy
    else:
        policy = context.references.resolve(asked.model, field="model").policy
    prompts = [list(sequence.ids) for sequence in asked.prompt_ids]
    draws = Draws(asked.prompt_draws, asked.prompt_draw_temperature, asked.call.seed) if asked.prompt_draws else None
    candidates = [list(each.ids) for each in asked.prompt_candidates]
    images = None
    if asked.prompt_images or asked.images:
        images = read_images(policy, [list(each.images) for each in asked.prompt_images], asked.images)
    return _begin(
        context,
        policy,
        asked.call,
        prompts,
        asked.call.seed,
        owner=request.owner,
        alone=request.in_run and _alone_in_run(context),
        stream=request.streams,
        first_prompt=request.first_prompt,
        candidates=candidates,
        draws=draws,
        images=images,
    )


def _begin(
    context: EngineContext,
    policy: Policy,
    call: training_pb2.SampleCall,
    prompts: Sequence[Sequence[int]] | None,
    seed: int,
    owner: str,
    alone: bool,
    stream: bool = False,
    first_prompt: int = 0,
    candidates: Sequence[Sequence[int]] = (),
    draws: Draws | None = None,
    images: RowImages | None = None,
) -> Started:
    params = SamplingParams.from_call(call, seed, stream=stream, first_prompt=first_prompt)
    needed = bool(call.prompts or params.stop or params.forms)
    tokenizer = context.tokenizer(policy.facts.name, needed=needed)
    if not prompts and call.prompts:
        if tokenizer is None:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {policy.facts.name!r} has no tokenizer here: send token ids",
                field="prompts",
            )
        prompts = tokenizer.encode(call.prompts)
    sent = prompts = prompts or []
    if images is not None:
        prompts = prompts_with_images(prompts, images)
    elif policy.split_model.vision is not None:
        check_without_images(policy, [torch.tensor(prompt) for prompt in prompts])
    if call.top_prompt_logprobs and not call.prompt_logprobs:
        raise invalid("top_prompt_logprobs come with prompt_logprobs", "top_prompt_logprobs")
    if call.top_prompt_logprobs > policy.facts.vocab_size:
        message = f"top_prompt_logprobs is {call.top_prompt_logprobs} of {policy.facts.vocab_size} tokens"
        raise invalid(message, "top_prompt_logprobs")
    if candidates and not call.prompt_logprobs:
        raise invalid("prompt_candidates come with prompt_logprobs", "prompt_candidates")
    wanted = candidate_ids(sent, candidates, policy.facts.vocab_size) if candidates else None
    if draws is not None and not (call.prompt_logprobs and 0 <= draws.temperature < math.inf):
        raise invalid("prompt_draws come with prompt_logprobs, at a temperature of 0 or more", "prompt_draws")
    job = context.sampler.begin(
        policy,
        prompts,
        params,
        tokenizer,
        owner=owner,
        alone=alone or call.deterministic,
        mixed=context.groups_runs,
    )
    sizes = sum(map(len, prompts)), len(prompts) * params.n
    if not call.prompt_logprobs:
        return Started(job, *sizes)
    try:
        scores = score_prompts(
            policy,
            prompts,
            temperature=params.temperature or 1.0,
            top=call.top_prompt_logprobs,
            candidates=wanted,
            draws=draws,
            budget=context.memory.most,
            agreement=context.agreement,
            divided=not call.deterministic,
        )
    except BaseException:
        context.sampler.cancel(job)
        raise
    return Started(job, *sizes, scores)


def _prompt_columns(scores: PromptScores) -> dict[str, Column]:
    levels = (scores.lengths,)
    columns = {"prompt_logprobs": Column(scores.logprobs, levels)}
    if scores.top is not None:
        ids, logprobs = scores.top
        columns |= {"prompt_top_token_ids": Column(ids, levels), "prompt_top_logprobs": Column(logprobs, levels)}
    if scores.candidates is not None:
        columns |= {"prompt_candidate_logprobs": Column(scores.candidates, levels)}
    if scores.drawn is not None:
        ids, logprobs = scores.drawn
        columns |= {"prompt_drawn_token_ids": Column(ids, levels), "prompt_drawn_logprobs": Column(logprobs, levels)}
    return columns
