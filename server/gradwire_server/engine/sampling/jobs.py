"""A request to the local sampler: its checked prompts, and its samples as they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.engine.errors import OperationError, panics_as_errors
from gradwire_server.engine.failures import to_error
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.drawing.grammar import Grammar
from gradwire_server.engine.sampling.growing.drafts import FEWEST_TOKENS, Drafts, Occurrences, occurrences
from gradwire_server.engine.sampling.growing.growing_sample import GrowingSample, Handed
from gradwire_server.engine.sampling.growing.growing_text import GrowingText, StopString
from gradwire_server.engine.sampling.samplers.sampler import Samples, SamplingParams, StopReason, TopTokens

DECODED_ROWS = 64
"""Samples whose tokens become text at a time."""


@dataclass(frozen=True)
class _Ended:
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    by_token: bool
    text: str | None
    top: TopTokens | None
    drafted: int = 0
    accepted: int = 0


class LocalJob:
    """One request; its rows are its samples, prompt by prompt.

    Args:
        prompts, params, tokenizer, owner: See :meth:`.sampler.Sampler.begin`.
        tree: Names the weights and who may share their known pages.

    Attributes:
        owner: Name of the API key that asked for it.
        ends: Tokens that end a sample.
        limits: ``[R]`` maximum tokens of each sample.
        begun: Whether the prompt of one of its samples has been computed.
        own: The rows that this process computes; all of them, unless they are divided among ranks.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None,
        owner: str = "",
        tree: bytes = b"",
    ) -> None:
        _check(policy, prompts, params, tokenizer)
        facts, self.policy, self.owner = policy.facts, policy, owner
        self.prompts = [prompt if isinstance(prompt, tuple) else tuple(prompt) for prompt in prompts]
        self.params, self.tokenizer, self.tree = params, tokenizer, tree
        self._found: dict[int, int] = {}
        eos = frozenset(facts.eos_token_ids)
        stops = frozenset(params.stop_token_ids)
        self.ends = stops if params.ignore_eos else stops | eos
        self.limits = np.repeat(
            [min(params.max_tokens, facts.context_length - len(prompt)) for prompt in prompts], params.n
        )
        self.error: Exception | None = None
        self.begun = False
        self.own: Sequence[int] = range(len(self.limits))
        self._news: list[int] = []
        self._told_error = self._told_begun = False
        self._deltas: list[training_pb2.SampleDelta] = []
        self._eos = eos - stops
        self._ended: list[_Ended | None] = [None] * len(self.limits)
        self._left = len(self._ended)
        self._stops = [StopString(text) for text in params.stop]
        self._grammar: Grammar | None = None
        self._occurrences: dict[int, Occurrences] = {}
        self._handed = [Handed(row) for row in range(len(self.limits))] if params.stream else []
        if not params.max_tokens:
            for row in range(len(self.limits)):
                self.end(row, np.zeros(0, np.int32), np.zeros(0, np.float32), False, None)

    @property
    def has_grammar(self) -> bool:
        return bool(self.params.forms)

    def compile(self) -> None:
        """Compile the grammar, before the first :meth:`begin`; an error is the job's."""
        assert self.tokenizer is not None
        end_tokens = tuple(sorted(self.policy.facts.eos_token_ids))
        try:
            with panics_as_errors():
                ((form, text),) = self.params.forms.items()
                self._grammar = Grammar(form, text, self.tokenizer, self.policy.facts.vocab_size, end_tokens)
        except Exception as error:  # the boundary of a thread: whoever waits for the samples receives it
            self.error = error

    @property
    def num_ended_tokens(self) -> int:
        """Tokens of the samples of this process that have ended."""
        return sum(len(ended.token_ids) for row in self.own if (ended := self._ended[row]) is not None)

    @property
    def num_cached_tokens(self) -> int:
        """See :class:`.sampler.Job`."""
        return sum(self._found.values())

    def find(self, row: int, tokens: int) -> None:
        """Note how many tokens of a row's prompt were known when it was first about to join."""
        self._found.setdefault(row // self.params.n, tokens)

    @property
    def done(self) -> bool:
        return not self._left or self.error is not None

    def order(self) -> list[int]:
        """The rows of this process, longest prompts first, with a prompt's samples side by side."""
        return sorted(self.own, key=lambda row: (-len(self.prompt_of(row)), row))

    def prompt_of(self, row: int) -> tuple[int, ...]:
        return self.prompts[row // self.params.n]

    def place_of(self, row: int) -> int:
        """Key of a row's random numbers, in addition to the seed."""
        return self._prompt_number(row) << 32 | row % self.params.n

    def _prompt_number(self, row: int) -> int:
        return self.params.first_prompt + row // self.params.n

    def begin(self, row: int) -> GrowingSample | None:
        """Begin a row's sample; None if nothing is to be done for each of its tokens but to draw it."""
        if not (self._stops or self._grammar or self._handed or self.params.top_logprobs):
            return None
        return GrowingSample(
            self._text(row) if self._stops or self._handed else None,
            self._grammar.begin() if self._grammar else None,
            self._handed[row] if self._handed else None,
        )

    def drafts(self, row: int) -> Drafts | None:
        """Begin the drafts of a row's sample; None for one that is too short for them."""
        if self.limits[row] < FEWEST_TOKENS:
            return None
        number, prompt = row // self.params.n, self.prompt_of(row)
        if number not in self._occurrences:
            self._occurrences[number] = occurrences(prompt)
        return Drafts(prompt, self._occurrences[number])

    def _text(self, row: int) -> GrowingText | None:
        if self.tokenizer is None:
            return None
        keep = self.params.keep_special_tokens
        least = self.params.min_tokens
        return GrowingText(self.tokenizer, self._stops, self.prompt_of(row), min_tokens=least, keep_special_tokens=keep)

    def text_before_stop(self, row: int, token_ids: Sequence[int]) -> str:
        """The text of a row's tokens before the first stop string."""
        text = self._text(row)
        assert text is not None, "stop strings need a tokenizer"
        for token in token_ids:
            text.add(token)
        return text.shown

    def fail_non_finite(self, row: int) -> None:
        """End the job because the model gives no distribution to draw a row's next token from; names the first row."""
        if self.error is not None:
            return
        number = self._prompt_number(row)
        self.error = OperationError(
            training_pb2.ERROR_CODE_NON_FINITE,
            f"the model's logits after prompt {number} are not finite, so that there is nothing to sample from: a step"
            " has probably ruined its weights; load a checkpoint from before it",
            row=number,
            rule="finite",
        )

    def new_tokens(self) -> list[training_pb2.SampleDelta]:
        """See :class:`.sampler.Job`."""
        if self.error is not None:
            return []
        others, self._deltas = self._deltas, []
        own = [handed.take() for handed in self._handed if handed.waiting]
        return sorted([*own, *others], key=lambda delta: delta.row)

    def news(self, *, deltas: bool) -> engine_pb2.EngineSampledJob | None:
        """Take what this process has computed since the last call, for the other ranks; None if nothing.

        Args:
            deltas: Whether to take the new tokens of samples that stream, too.
        """
        ended, self._news = self._news, []
        told = engine_pb2.EngineSampledJob(
            ended=[_on_the_wire(row, found) for row in ended if (found := self._ended[row]) is not None],
            deltas=self.new_tokens() if deltas else [],
            error=None if self.error is None else to_error(self.error, "request sample"),
            begun=self.begun and not self._told_begun,
            found=self._found if ended else None,
        )
        self._told_begun = self.begun
        return told if told.ByteSize() else None

    def learn(self, told: engine_pb2.EngineSampledJob, *, own: bool) -> None:
        """Take note of what a rank has told, rank by rank: the error of the first one is that of the job.

        Args:
            own: Whether it is this process's :meth:`news`.
        """
        if told.HasField("error") and not self._told_error:
            self._told_error, self.error = True, OperationError.from_proto(told.error)
        if own:
            return
        self.begun |= told.begun
        for prompt, tokens in told.found.items():  # ranks may divide a prompt's rows
            self._found[prompt] = max(tokens, self._found.get(prompt, 0))
        for each in told.ended:
            self._left -= self._ended[each.row] is None
            self._ended[each.row] = _from_the_wire(each)
        self._deltas += told.deltas

    def end(
        self,
        row: int,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        by_token: bool,
        text: str | None,
        top: TopTokens | None = None,
        drafts: Drafts | None = None,
    ) -> None:
        """Record a row's finished sample.

        Args:
            by_token: Whether it ended with one of :attr:`ends`.
            text: The text before the stop string if it ended with one, else None.
            top: ``[tokens, k]`` the most probable tokens in each place, if ``top_logprobs`` are wanted.
        """
        self._left -= self._ended[row] is None
        counts = (0, 0) if drafts is None else (drafts.num_drafted, drafts.num_accepted)
        ended = self._ended[row] = _Ended(token_ids, logprobs, by_token, text, top, *counts)
        self._news.append(row)
        if self._handed:
            (whole,) = self._texts([row]) if self.tokenizer is not None else ("",)
            self._handed[row].end(whole, self._reason(ended))

    def samples(self) -> Samples:
        """See :class:`.sampler.Job`."""
        if self.error is not None:
            raise self.error
        ended = [row for row in self._ended if row is not None]
        assert len(ended) == len(self._ended), "samples() of a job that is not done"
        return Samples(
            counts=np.full(len(self.prompts), self.params.n, np.uint32),
            lengths=np.array([len(row.token_ids) for row in ended], np.uint32),
            token_ids=np.concatenate([row.token_ids for row in ended]),
            logprobs=np.concatenate([row.logprobs for row in ended]),
            stop_reasons=[self._reason(row) for row in ended],
            texts=self._texts(range(len(ended))) if self.tokenizer is not None else None,
            top=_together([row.top for row in ended if row.top is not None]),
            num_drafted_tokens=sum(row.drafted for row in ended),
            num_accepted_tokens=sum(row.accepted for row in ended),
        )

    def _reason(self, row: _Ended) -> StopReason:
        if row.text is not None:
            return "stop"
        if not row.by_token:
            return "length"
        return "eos" if int(row.token_ids[-1]) in self._eos else "stop"

    def _texts(self, rows: Sequence[int]) -> list[str]:
        """The texts of some rows that have ended."""
        assert self.tokenizer is not None
        texts: list[str] = []
        for start in range(0, len(rows), DECODED_ROWS):  # lists of all tokens would take ten times their memory
            prompts, whole, cut = [], [], []
            for row in rows[start : start + DECODED_ROWS]:
                ended = self._ended[row]
                assert ended is not None
                cut.append(ended.text)
                if ended.text is None:
                    prompts.append(self.prompt_of(row))
                    whole.append(ended.token_ids[: len(ended.token_ids) - ended.by_token].tolist())
            skip = not self.params.keep_special_tokens
            decoded = iter(self.tokenizer.decode_after(prompts, whole, skip_special_tokens=skip))
            texts += [next(decoded) if text is None else text for text in cut]
        return texts


def _on_the_wire(row: int, ended: _Ended) -> engine_pb2.EngineEndedSample:
    top_ids, top_logprobs = (b"", b"") if ended.top is None else (each.tobytes() for each in ended.top)
    return engine_pb2.EngineEndedSample(
        row=row,
        token_ids=ended.token_ids.tobytes(),
        logprobs=ended.logprobs.tobytes(),
        by_token=ended.by_token,
        text=ended.text,
        top_token_ids=top_ids,
        top_logprobs=top_logprobs,
        drafted=ended.drafted,
        accepted=ended.accepted,
    )


def _from_the_wire(told: engine_pb2.EngineEndedSample) -> _Ended:
    token_ids, logprobs = np.frombuffer(told.token_ids, np.int32), np.frombuffer(told.logprobs, np.float32)
    top = None
    if told.top_token_ids:
        shape = (len(token_ids), -1)
        top = (
            np.frombuffer(told.top_token_ids, np.int32).reshape(shape),
            np.frombuffer(told.top_logprobs, np.float32).reshape(shape),
        )
    text = told.text if told.HasField("text") else None
    return _Ended(token_ids, logprobs, told.by_token, text, top, told.drafted, told.accepted)


def _together(parts: Sequence[TopTokens]) -> TopTokens | None:
    if not parts:
        return None
    return np.concatenate([ids for ids, _ in parts]), np.concatenate([logprobs for _, logprobs in parts])


def _check(
    policy: Policy, prompts: Sequence[Sequence[int]], params: SamplingParams, tokenizer: TextTokenizer | None
) -> None:
    facts = policy.facts

    def refuse(row: int, message: str, rule: str) -> OperationError:
        return OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH, f"prompt {row} {message}", field="prompts", row=row, rule=rule
        )

    if not prompts:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_BATCH, "sample needs at least one prompt", field="prompts", rule="not empty"
        )
    for row, prompt in enumerate(prompts, params.first_prompt):
        if not prompt:
            raise refuse(row, "has no tokens: begin it with the model's start token, for example", "at least one token")
        if len(prompt) + min(params.max_tokens, 1) > facts.context_length:
            room = ", which leaves no room after it" if params.max_tokens else ""
            raise refuse(
                row,
                f"has {len(prompt)} tokens{room}: this model's maximum context length is {facts.context_length} tokens",
                f"tokens {'<' if params.max_tokens else '<='} {facts.context_length}",
            )
        if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
            outside = next(token for token in prompt if not 0 <= token < facts.vocab_size)
            raise refuse(
                row,
                f"has the token id {outside}: the model's are 0 to {facts.vocab_size - 1}",
                f"0 <= id < {facts.vocab_size}",
            )
    if params.stop and tokenizer is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} has no tokenizer here, so stop strings cannot be found: use stop_token_ids",
            field="stop",
        )
    for form in params.forms if tokenizer is None else ():
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} has no tokenizer here, so a {form} cannot be followed",
            field=form,
        )
    for index, token in enumerate(params.stop_token_ids):
        if not 0 <= token < facts.vocab_size:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"sample: stop_token_ids[{index}] is {token}, and the model {facts.name!r} has {facts.vocab_size} "
                "tokens: no sample could end with it",
                field="stop_token_ids",
                rule=f"0 <= id < {facts.vocab_size}",
            )
    for name, wrong in (
        ("logit_bias", next((token for token, _ in params.logit_bias if not 0 <= token < facts.vocab_size), None)),
        ("top_logprobs", params.top_logprobs if params.top_logprobs > facts.vocab_size else None),
    ):
        if wrong is not None:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"sample: {name} has {wrong}, and the model {facts.name!r} has {facts.vocab_size} tokens",
                field=name,
                rule=f"{'0 <= id <' if name == 'logit_bias' else 'at most'} {facts.vocab_size}",
            )
