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
MAX_SAMPLES = 1 << 16


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling.

    Attributes:
        max_tokens: Maximum tokens per sample; fewer if the context ends first.
        seed: Equal seeds, prompts and weights give equal samples. Each sample has its own random numbers, keyed by its
            place in the request, so they do not depend on what is computed together.
        n: Samples per prompt.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Restrict to this many most probable tokens; 0 is off.
        top_p: Restrict to the most probable tokens that together reach this probability; 1 is off.
        stop: Stop strings; a sample ends with the token that completes one, and its text ends before it.
        stop_token_ids: Tokens that end a sample, in addition to the model's own end tokens.
        ignore_eos: Whether the model's end tokens do not end a sample.
    """

    max_tokens: int
    seed: int
    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    @classmethod
    def from_call(cls, call: training_pb2.SampleCall, seed: int) -> SamplingParams:
        """Read and check the parameters of a request; ``seed`` is used if it has none.

        Raises:
            OperationError: INVALID_ARGUMENT, with the argument and its rule.
        """
        params = cls(
            max_tokens=call.max_tokens,
            seed=call.seed if call.HasField("seed") else seed,
            n=call.n or 1,
            temperature=call.temperature,
            top_k=call.top_k,
            top_p=call.top_p or 1.0,
            stop=tuple(call.stop),
            stop_token_ids=frozenset(call.stop_token_ids),
            ignore_eos=call.ignore_eos,
        )
        rules = {
            "max_tokens": (params.max_tokens >= 1, "max_tokens >= 1"),
            "n": (params.n <= MAX_SAMPLES, f"1 <= n <= {MAX_SAMPLES}"),
            "temperature": (0 <= params.temperature < math.inf, "temperature >= 0"),
            "top_p": (0 < params.top_p <= 1, "0 < top_p <= 1"),
            "stop": (all(params.stop), "no empty string"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise OperationError(
                    training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    f"sample: {name} is {getattr(params, name)!r}, and {rule} must hold",
                    field=name,
                    rule=rule,
                )
        return params


@dataclass(frozen=True)
class Sample:
    """One sample.

    Attributes:
        token_ids: The sampled tokens, including the one that ended it.
        logprobs: Log-probability of each token (nats), under the whole distribution at the sampling temperature (1 if
            that is 0): not renormalised after top-k and top-p, and thus equal to the result of ``compute_logprobs``.
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
    """

    counts: npt.NDArray[np.uint32]
    lengths: npt.NDArray[np.uint32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    stop_reasons: list[StopReason]
    texts: list[str] | None

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

    def samples(self) -> Samples:
        """The samples of a finished job.

        Raises:
            Exception: The error that ended the job.
        """


J = TypeVar("J", bound=Job)


class Sampler(Protocol[J]):
    """Generates samples with policies' weights; requests begin at any time, and steps advance them."""

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        alone: bool = False,
    ) -> J:
        """Begin a request for ``params.n`` samples of each prompt.

        The policy's weights must not change until the job is done or cancelled.

        Args:
            prompts: Token ids of each prompt.
            tokenizer: Used for texts and stop strings.
            alone: Compute without rows of other requests, so that results are bit-identical whatever else is requested.

        Raises:
            OperationError: INVALID_BATCH for a prompt, UNSUPPORTED for stop strings without a tokenizer.
        """

    def cancel(self, job: J) -> None:
        """Cancel a job and drop its samples."""

    def uses(self, policy: Policy) -> bool:
        """Whether a job of this policy is in progress."""

    def turn(self) -> Collection[J]:
        """The jobs that the next :meth:`step` advances; empty if all are done."""

    def step(self) -> None:
        """Advance the jobs of :meth:`turn` by about one token. Other errors are reported by the jobs.

        Raises:
            torch.AcceleratorError: The device is lost.
        """
