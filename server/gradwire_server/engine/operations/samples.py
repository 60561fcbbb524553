"""Sampling requests, in a run's order or outside it: what each asks for, its job in the sampler, and its answer.

    asked_in_run, asked_outside    a request -> Asked       finds the weights, reads prompts and images; changes nothing
    begin                          Asked -> Started         gives the sampler a job, and scores the prompts
    Started.outcome                                         the samples of a finished job

A run's samples begin in the order of its operations. They are answered in the same order, whichever ends first, and the
run's other requests wait for the last of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.crash_points import crash_point
from gradwire_server.engine.errors import OperationError, invalid, panics_as_errors
from gradwire_server.engine.failures import is_fatal, to_error
from gradwire_server.engine.interruption import given_s, interruptible
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.model.vision.row_images import (
    RowImages,
    check_without_images,
    images_of_rows,
    prompts_with_images,
    read_images,
)
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.lifecycle import (
    Answer,
    Execution,
    begins,
    failure,
    not_started,
    plain_answer,
    success,
)
from gradwire_server.engine.operations.request import Columns, Outcome, Request
from gradwire_server.engine.sampling.prompt_scores import Draws, PromptScores, candidate_ids, score_prompts
from gradwire_server.engine.sampling.samplers.sampler import Job, SamplingParams
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.sampling_seed import own_seed


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The contents of a sampling request.

    Attributes:
        call: The request's settings.
        prompts: Token ids as they were sent; none if the prompts are texts.
        images: Images of the prompts; None for prompts without.
        candidates: Token ids to score in each place of the prompts.
        draws: Tokens to draw in each place of the prompts; None for none.
        owner: The key that the samples are for.
        alone: Whether no other samples may go through the model with these.
        salt: Requests with the same salt share the known beginnings of prompts.
    """

    policy: Policy
    call: training_pb2.SampleCall
    params: SamplingParams
    prompts: Sequence[Sequence[int]]
    images: RowImages | None
    candidates: Sequence[Sequence[int]] = ()
    draws: Draws | None = None
    owner: str
    alone: bool
    salt: str


@dataclass(frozen=True)
class Started:
    """A job in progress.

    Attributes:
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
            num_drafted_tokens=samples.num_drafted_tokens,
            num_accepted_tokens=samples.num_accepted_tokens,
            num_cached_tokens=self.job.num_cached_tokens,
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


def asked_in_run(
    context: EngineContext, run: EngineRun, seq: int, call: training_pb2.SampleCall, columns: Columns, owner: str
) -> Asked:
    """Read a run's ``sample``, the operation ``seq``.

    A call without a seed has one that follows from the run's seed and the operation's number. It draws nothing from the
    run's generators, so that a recovery need not repeat it.
    """
    prompts: Sequence[Sequence[int]] = ()
    if "prompt_ids" in columns:
        column = columns["prompt_ids"]
        if len(column.levels) != 1 or column.values.ndim != 1 or column.values.dtype.kind not in "iu":
            raise invalid("prompt_ids is one row of token ids a prompt", "prompt_ids")
        prompts = [row.tolist() for row in column.rows()]
    seed = call.seed if call.HasField("seed") else own_seed(run.config.seed, seq)
    images = images_of_rows(run.policy, columns) if IMAGES in columns or IMAGE_BYTES in columns else None
    return Asked(
        policy=run.policy,
        call=call,
        params=SamplingParams.from_call(call, seed),
        prompts=prompts,
        images=images,
        owner=owner,
        alone=_alone_in_run(context) or call.deterministic,
        salt=owner,
    )


def asked_outside(context: EngineContext, request: engine_pb2.EngineRequest) -> Asked:
    """Read samples of a model, a checkpoint or a run's weights, outside any run's queue, or a part of such samples."""
    asked, call, salt = request.sample, request.sample.call, request.owner
    if request.sampled_run:
        run = context.held(request.sampled_run)
        context.residency.use(run)
        policy = run.policy
    elif request.HasField("weights"):
        policy = context.references.shared(request.weights).policy
    else:
        policy = context.references.resolve(asked.model, field="model").policy
        salt = "" if context.shares_prefixes and asked.model in context.pool.names else salt
    images = None
    if asked.prompt_images or asked.images:
        images = read_images(policy, [list(each.images) for each in asked.prompt_images], asked.images)
    return Asked(
        policy=policy,
        call=call,
        params=SamplingParams.from_call(call, call.seed, stream=request.streams, first_prompt=request.first_prompt),
        prompts=[list(sequence.ids) for sequence in asked.prompt_ids],
        images=images,
        candidates=[list(each.ids) for each in asked.prompt_candidates],
        draws=Draws(asked.prompt_draws, asked.prompt_draw_temperature, call.seed) if asked.prompt_draws else None,
        owner=request.owner,
        alone=(request.in_run and _alone_in_run(context)) or call.deterministic,
        salt=salt,
    )


def _alone_in_run(context: EngineContext) -> bool:
    """Whether a run's samples are computed alone: on a CPU, where its results are then the same whatever others do."""
    return context.pool.device.type == "cpu" and not context.groups_runs


def begin(context: EngineContext, asked: Asked) -> Started:
    """Give the sampler a job, and score its prompts if the call wants that."""
    policy, call, params, draws = asked.policy, asked.call, asked.params, asked.draws
    needed = bool(call.prompts or params.stop or params.forms)
    tokenizer = context.tokenizer(policy.facts.name, needed=needed)
    sent = asked.prompts or _encoded(policy, call, tokenizer)
    prompts = sent
    if asked.images is not None:
        prompts = prompts_with_images(sent, asked.images)
    elif policy.split_model.vision is not None:
        check_without_images(policy, [torch.tensor(prompt) for prompt in sent])
    if call.top_prompt_logprobs and not call.prompt_logprobs:
        raise invalid("top_prompt_logprobs come with prompt_logprobs", "top_prompt_logprobs")
    if call.top_prompt_logprobs > policy.facts.vocab_size:
        message = f"top_prompt_logprobs is {call.top_prompt_logprobs} of {policy.facts.vocab_size} tokens"
        raise invalid(message, "top_prompt_logprobs")
    if asked.candidates and not call.prompt_logprobs:
        raise invalid("prompt_candidates come with prompt_logprobs", "prompt_candidates")
    wanted = candidate_ids(sent, asked.candidates, policy.facts.vocab_size) if asked.candidates else None
    if draws is not None and not (call.prompt_logprobs and 0 <= draws.temperature < math.inf):
        raise invalid("prompt_draws come with prompt_logprobs, at a temperature of 0 or more", "prompt_draws")
    job = context.sampler.begin(
        policy,
        prompts,
        params,
        tokenizer,
        owner=asked.owner,
        alone=asked.alone,
        mixed=context.groups_runs,
        salt=asked.salt,
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


def _encoded(policy: Policy, call: training_pb2.SampleCall, tokenizer: TextTokenizer | None) -> Sequence[Sequence[int]]:
    """A call's prompts that are texts."""
    if not call.prompts:
        return []
    if tokenizer is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {policy.facts.name!r} has no tokenizer here: send token ids",
            field="prompts",
        )
    return tokenizer.encode(call.prompts)


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


@dataclass(eq=False)
class _Sampling:
    """A sampling request. ``execution`` is None outside a run, and if the request could not begin.

    Attributes:
        used_s: Seconds of computing, of those that it shared its share.
        told: Whether the front knows, or need not know, that it is being computed.
    """

    message: engine_pb2.EngineRequest
    began: float = field(default_factory=time.perf_counter)
    execution: Execution | None = None
    started: Started | None = None
    answer: Answer | None = None
    used_s: float = 0.0
    told: bool = False

    @property
    def ended(self) -> bool:
        return self.answer is not None or (self.started is not None and self.started.job.done)


class SamplesInProgress:
    """Begin, advance and answer sampling requests."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._outside: list[_Sampling] = []
        self._runs: dict[str, list[_Sampling]] = {}

    def __len__(self) -> int:
        return len(self._outside) + sum(map(len, self._runs.values()))

    def of(self, run_id: str) -> bool:
        """Whether samples of this run are in progress, also those outside its queue, which read its weights."""
        return run_id in self._runs or any(sampling.message.sampled_run == run_id for sampling in self._outside)

    def begin(self, decision: Decision, request: Request) -> Iterator[Answer]:
        """Begin a request of a decision; an error becomes its answer. Yields that prompts are about to be scored."""
        message = request.message
        sampling = _Sampling(message, told=not message.tells_start)
        run = self._context.runs.get(message.operation.run_id)
        if run is None:
            self._outside.append(sampling)
        else:
            self._runs.setdefault(run.run_id, []).append(sampling)
        if not begins(self._context, decision, message):
            sampling.answer = not_started()
            return
        if not sampling.told and message.sample.call.prompt_logprobs:
            yield _start(sampling)
        given = given_s()
        try:
            if request.error is not None:
                raise request.error
            self._begin(sampling, request)
        except Exception as error:  # the boundary: the caller receives any error
            sampling.answer = self._failed(sampling, error)
        sampling.used_s = time.perf_counter() - sampling.began - (given_s() - given)

    def step(self, decision: Decision) -> None:
        """Advance some of the samples by a token; end those that the decision ends."""
        for sampling in self._all():
            error = decision.stopped.get(sampling.message.id)
            if error is not None and sampling.started is not None and not sampling.ended:
                sampling.answer = self._stopped(sampling, sampling.started, error)
                sampling.started = None
        if self._context.sampler.turn():
            together = [(each, each.started.num_samples) for each in self._all() if each.started and not each.ended]
            began = time.perf_counter()
            self._context.sampler.step()
            of_one_s = (time.perf_counter() - began) / max(1, sum(num_samples for _, num_samples in together))
            for sampling, num_samples in together:
                sampling.used_s += of_one_s * num_samples

    def messages(self) -> list[engine_pb2.EngineRequest]:
        """The requests of the samples in progress that have not ended."""
        return [sampling.message for sampling in self._all() if not sampling.ended]

    def finished(self) -> list[Answer]:
        """Take the answers that can be sent now, behind the new tokens of samples that stream."""
        answers = [_start(each) for each in self._all() if not each.told and each.started and each.started.job.begun]
        answers += [frame for sampling in self._all() if sampling.message.streams for frame in _new_tokens(sampling)]
        for sampling in [sampling for sampling in self._outside if sampling.ended]:
            self._outside.remove(sampling)
            answers.append(self._answer(sampling))
        for run_id, samplings in list(self._runs.items()):
            while samplings and samplings[0].ended:
                answers.append(self._answer(samplings.pop(0)))
                if answers[-1].reply.result.status == training_pb2.STATUS_FAILED:
                    self._take_back(self._context.runs[run_id], samplings)
            if not samplings:
                del self._runs[run_id]
        return answers

    def _all(self) -> list[_Sampling]:
        return [*self._outside, *chain.from_iterable(self._runs.values())]

    def _begin(self, sampling: _Sampling, request: Request) -> None:
        context, message = self._context, request.message
        if message.HasField("sample"):
            crash_point("engine.before_operation")
            with panics_as_errors(), interruptible(lambda: context.agreement.check(message)):
                sampling.started = begin(context, asked_outside(context, message))
            return
        execution = sampling.execution = Execution(context, request)
        call = message.operation.operation.sample
        with panics_as_errors(), interruptible(lambda: context.agreement.check(message)):
            seq, owner = message.operation.seq, message.owner
            sampling.started = begin(context, asked_in_run(context, execution.run, seq, call, request.columns, owner))

    def _answer(self, sampling: _Sampling) -> Answer:
        answer = sampling.answer
        if answer is None:
            try:
                answer = self._succeeded(sampling)
            except Exception as error:  # the boundary, as in begin()
                answer = self._failed(sampling, error)
        answer.reply.id = sampling.message.id
        if answer.reply.HasField("result"):
            answer.reply.result.timings.used_s = sampling.used_s
        self._context.agreement.confirm(answer.reply)
        return answer

    def _succeeded(self, sampling: _Sampling) -> Answer:
        assert sampling.started is not None
        outcome = sampling.started.outcome()
        if sampling.execution is not None:
            outcome.result.sample.step = sampling.execution.run.step
            return sampling.execution.succeeded(outcome)
        if sampling.message.sampled_run:  # whose training waits until its samples have ended
            outcome.result.sample.step = self._context.held(sampling.message.sampled_run).step
        seconds = time.perf_counter() - sampling.began
        self._context.tracing.record("gradwire.engine.sample", "", seconds)
        answer = success(outcome, 0, seconds)
        crash_point("engine.before_reply")
        return answer

    def _stopped(self, sampling: _Sampling, started: Started, error: Exception) -> Answer:
        """Make the answer to a request that was stopped: outside a run, what was computed for it."""
        tokens = self._context.sampler.cancel(started.job)
        if not sampling.message.HasField("sample"):
            return self._failed(sampling, error)
        if not started.job.begun:
            return not_started()
        everywhere = self._context.agreement.gathered(str(tokens).encode())
        result = training_pb2.OperationResult(status=training_pb2.STATUS_CANCELLED)
        result.timings.engine_s = time.perf_counter() - sampling.began
        result.sample.num_prompt_tokens = started.num_prompt_tokens
        result.sample.num_sampled_tokens = sum(map(int, everywhere))
        result.sample.num_cached_tokens = started.job.num_cached_tokens
        return plain_answer(result=result)

    def _failed(self, sampling: _Sampling, error: Exception) -> Answer:
        if sampling.execution is not None:
            return sampling.execution.failed(error)
        if is_fatal(error):
            raise error
        asked = sampling.message.operation
        if asked.run_id in self._context.runs:
            return failure(self._context, asked, error)
        return plain_answer(error=to_error(error, "request sample"))

    def _take_back(self, run: EngineRun, samplings: Iterable[_Sampling]) -> None:
        """Cancel the samples of a run that must not be executed after the failure of one before them."""
        for sampling in samplings:
            unless_failed = sampling.message.operation.unless_failed
            if unless_failed and run.failed_seq >= unless_failed and sampling.started is not None:
                self._context.sampler.cancel(sampling.started.job)
                sampling.started, sampling.answer = None, not_started()


def _start(sampling: _Sampling) -> Answer:
    sampling.told = True
    return Answer(engine_pb2.EngineReply(id=sampling.message.id, sample_frame=training_pb2.SampleFrame()), [])


def _new_tokens(sampling: _Sampling) -> list[Answer]:
    deltas = sampling.started.job.new_tokens() if sampling.started is not None else []
    if not deltas:
        return []
    frame = training_pb2.SampleFrame(deltas=deltas)
    return [Answer(engine_pb2.EngineReply(id=sampling.message.id, sample_frame=frame), [])]
