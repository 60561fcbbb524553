"""Interface of samplers: prompts in, samples with their log-probabilities out."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError

if TYPE_CHECKING:
    from gradwire_server.engine.model.policy import Policy
    from gradwire_server.engine.model.tokenizers import TextTokenizer

StopReason = Literal["eos", "stop", "length"]
TopTokens = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Token ids and their log-probabilities, most probable first along the last axis."""
LEAST_TEMPERATURE = 1e-6
"""Smaller ones count as this: logits over them may exceed what float32 holds."""
MAX_SAMPLES = 1 << 16


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    Attributes:
        max_tokens: Maximum tokens per sample; fewer if the context ends first.
        seed: Equal seeds, prompts and weights give equal samples. Each sample has its own random numbers, keyed by its
            place in the request, so they do not depend on what is computed together.
        n: Samples per prompt.
        temperature: Divides the logits; 0 takes the most probable token, and so does the least one.
        top_k: Restrict to this many most probable tokens; 0 is off.
        top_p: Restrict to the most probable tokens that together reach this probability; 1 is off.
        stop: Stop strings; a sample ends with the token that completes one, and its text ends before it.
        stop_token_ids: Tokens that end a sample, in addition to the model's own end tokens.
        ignore_eos: Whether the model's end tokens do not end a sample.
        min_p: Leave out tokens less probable than this share of the most probable one's probability, after top-k and
            top-p; 0 is off (Nguyen et al. 2024).
        repetition_penalty: Divides the positive logits, and multiplies the negative ones, of all tokens in the prompt
            or the sample so far; 1 is off (Keskar et al. 2019).
        presence_penalty: Subtracted from the logits of tokens in the sample so far.
        frequency_penalty: Subtracted from a token's logit for each time it is in the sample so far.
        logit_bias: Token ids and numbers added to their logits, before all penalties.
        json_schema: JSON schema of the sample's text; empty for any text.
        regex: Expression that the whole text matches, in Rust's syntax; empty for any text.
        grammar: Grammar of the text, in Lark's form or as GBNF; empty for any text.
        min_tokens: Tokens before which nothing ends a sample but its maximum.
        keep_special_tokens: Whether texts have the special tokens in them, but for the one that ends a sample.
        top_logprobs: Most probable tokens to return in each place.
        stream: Whether new tokens are handed out while the sample grows.
        deterministic: Whether one rank of the engine computes all samples, for the same bits on any number of ranks.
        first_prompt: Number of the first prompt in a larger request that this is a part of; it counts for a sample's
            place, and in errors.
    """

    max_tokens: int
    seed: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: Collection[int] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str = ""
    regex: str = ""
    grammar: str = ""
    min_tokens: int = 0
    keep_special_tokens: bool = False
    top_logprobs: int = 0
    stream: bool = False
    deterministic: bool = False
    first_prompt: int = 0

    @classmethod
    def from_call(
        cls, call: training_pb2.SampleCall, seed: int, *, stream: bool = False, first_prompt: int = 0
    ) -> SamplingParams:
        """Read and check the parameters of a request; ``seed`` is used if it has none.

        Raises:
            OperationError: INVALID_ARGUMENT, with the argument and its rule.
        """
        params = cls(
            max_tokens=call.max_tokens,
            seed=call.seed if call.HasField("seed") else seed,
            n=call.n or 1,
            temperature=max(call.temperature, LEAST_TEMPERATURE) if call.temperature > 0 else call.temperature,
            top_k=call.top_k,
            top_p=call.top_p or 1.0,
            stop=tuple(call.stop),
            stop_token_ids=tuple(call.stop_token_ids),
            ignore_eos=call.ignore_eos,
            min_p=call.min_p,
            repetition_penalty=call.repetition_penalty or 1.0,
            presence_penalty=call.presence_penalty,
            frequency_penalty=call.frequency_penalty,
            logit_bias=tuple((entry.token_id, entry.bias) for entry in call.logit_bias),
            json_schema=call.json_schema,
            regex=call.regex,
            grammar=call.grammar,
            min_tokens=call.min_tokens,
            keep_special_tokens=call.keep_special_tokens,
            top_logprobs=call.top_logprobs,
            stream=stream,
            deterministic=call.deterministic,
            first_prompt=first_prompt,
        )
        rules = {
            "max_tokens": (
                params.max_tokens >= 1 or (call.prompt_logprobs and call.HasField("max_tokens")),
                "max_tokens >= 1, or 0 with prompt_logprobs",
            ),
            "min_tokens": (params.min_tokens <= params.max_tokens, f"min_tokens <= max_tokens ({params.max_tokens})"),
            "n": (params.n <= MAX_SAMPLES, f"1 <= n <= {MAX_SAMPLES}"),
            "temperature": (0 <= params.temperature < math.inf, "temperature >= 0"),
            "top_p": (0 < params.top_p <= 1, "0 < top_p <= 1"),
            "stop": (all(params.stop), "no empty string"),
            "min_p": (0 <= params.min_p <= 1, "0 <= min_p <= 1"),
            "repetition_penalty": (0.01 <= params.repetition_penalty <= 100, "0.01 <= repetition_penalty <= 100"),
            "presence_penalty": (abs(params.presence_penalty) <= 100, "-100 <= presence_penalty <= 100"),
            "frequency_penalty": (abs(params.frequency_penalty) <= 100, "-100 <= frequency_penalty <= 100"),
            "logit_bias": (
                all(abs(bias) <= 100 for _, bias in params.logit_bias)
                and len(dict(params.logit_bias)) == len(params.logit_bias),
                "each token once, -100 <= bias <= 100",
            ),
        }
        for form in params.forms:
            rules[form] = (
                len(params.forms) == 1 and not params.ignore_eos and not params.min_tokens,
                "one of json_schema, regex and grammar, and not with ignore_eos or min_tokens",
            )
        for name, (holds, rule) in rules.items():
            if not holds:
                raise OperationError(
                    training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    f"sample: {name} is {getattr(params, name)!r}; the rule is {rule}",
                    field=name,
                    rule=rule,
                )
        return params

    @property
    def forms(self) -> dict[str, str]:
        """The constraints on the text's form that are set, by argument."""
        forms = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        return {name: text for name, text in forms.items() if text}

    @property
    def adjusts(self) -> bool:
        """Whether tokens are chosen by other logits than the model's own."""
        penalises = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(self.logit_bias or penalises or self.min_tokens)


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        token_ids: The sampled tokens, including the one that ended it.
        logprobs: Log-probability of each token (nats), under the model's whole distribution at the sampling temperature
            (1 if that is 0), and thus equal to the result of ``compute_logprobs``: top-k, top-p, min-p, penalties,
            biases and schemas choose tokens, and have no effect on these.
        stop_reason: ``"eos"``, ``"stop"`` (a stop string or token) or ``"length"``.
        text: Text without special tokens, without the token that ended it and before the stop string; None if the model
            has no tokenizer.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str | None


@dataclass(frozen=True)
class Samples:
    """All samples of a request, prompt by prompt; see :class:`Sample`.

    Legend: ``P`` prompts, ``R`` samples, ``T`` tokens of all of them.

    Attributes:
        counts: ``[P]`` samples of each prompt, uint32.
        lengths: ``[R]`` tokens of each sample, uint32.
        token_ids: ``[T]`` int32.
        logprobs: ``[T]`` float32.
        stop_reasons: Stop reason of each sample.
        texts: Text of each sample, or None without a tokenizer.
        top: ``[T, k]`` the most probable tokens in each token's place, int32, and their log-probabilities, float32,
            most probable first; None if ``top_logprobs`` is 0.
        num_drafted_tokens: Tokens that were computed before they were drawn; see :class:`.drafts.Drafts`.
        num_accepted_tokens: The number of these that were drawn.
    """

    counts: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reasons: list[StopReason]
    texts: list[str] | None
    top: TopTokens | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0

    def by_prompt(self) -> list[list[Sample]]:
        """The samples of each prompt."""
        ends = self.lengths.cumsum(dtype=np.int64)[:-1]
        ids, logprobs = np.split(self.token_ids, ends), np.split(self.logprobs, ends)
        texts: Sequence[str | None] = self.texts or [None] * len(ids)
        rows = iter(
            Sample(of_ids.tolist(), of_logprobs.tolist(), reason, text)
            for of_ids, of_logprobs, reason, text in zip(ids, logprobs, self.stop_reasons, texts, strict=True)
        )
        return [[next(rows) for _ in range(count)] for count in self.counts]


class Job(Protocol):
    """A request in a sampler."""

    @property
    def done(self) -> bool: ...

    @property
    def begun(self) -> bool:
        """Whether one of its samples has, or had, a place among those in progress."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts, each counted once, whose keys and values were known from earlier requests."""

    def new_tokens(self) -> list[training_pb2.SampleDelta]:
        """Take what the samples have grown by since the last call, if their parameters say ``stream``."""

    def samples(self) -> Samples:
        """The samples of a finished job.

        Raises:
            Exception: The error that ended the job.
        """


J = TypeVar("J", bound=Job)


@dataclass
class PromptTokens:
    """Tokens of the prompts of requests that have ended: those whose keys and values were known, and the others."""

    found: int = 0
    computed: int = 0

    def count(self, prompts: Sequence[Sequence[int]], found: int) -> None:
        """Count a request's prompts, of whose tokens so many were known."""
        self.found += found
        self.computed += sum(map(len, prompts)) - found


class Sampler(Protocol[J]):
    """Generates samples with policies' weights; requests begin at any time, and steps advance them.

    Attributes:
        beside_batches: Whether samples advance between the micro-batches of a batch, whose memory is taken then.
        prompt_tokens: Hits and misses among the prompts' tokens so far.
    """

    @property
    def prompt_tokens(self) -> PromptTokens: ...

    @property
    def beside_batches(self) -> bool: ...

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        owner: str = "",
        alone: bool = False,
        mixed: bool = False,
        salt: str | None = None,
    ) -> J:
        """Begin a request for ``params.n`` samples of each prompt.

        The policy's weights must not change until the job is done or cancelled.

        Args:
            prompts: Token ids of each prompt.
            tokenizer: Used for texts and stop strings.
            owner: Name of the API key that asks; keys share the key-value cache equally.
            alone: Compute without rows of other requests, so that results are bit-identical whatever else is requested.
            salt: Requests with other ones share no keys and values, so that nobody learns from the time of an answer
                what another asked; by default the owner.
            mixed: Compute with rows of other policies on the same copy of the model too, where possible.

        Raises:
            OperationError: INVALID_BATCH for a prompt, INVALID_ARGUMENT for a token id or a schema, UNSUPPORTED for
                stop strings or a form of the text without a tokenizer.
        """

    def cancel(self, job: J) -> int:
        """Cancel a job and drop its samples; returns how many tokens of them this process has computed."""

    def uses(self, policy: Policy) -> bool:
        """Whether a job of this policy is in progress."""

    def make_room(self) -> bool:
        """Free memory of the device that only samples in progress need, for a batch that is trained on; whether any
        was freed."""

    def turn(self) -> Collection[J]:
        """The jobs that the next :meth:`step` advances; empty if all are done."""

    def step(self) -> None:
        """Advance the jobs of :meth:`turn` by about one token. Other errors are reported by the jobs.

        Raises:
            torch.AcceleratorError: The device is lost.
        """

    def close(self) -> None:
        """Remove what would outlive the process."""
