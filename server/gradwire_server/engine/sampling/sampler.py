"""What a sampler is: prompts in, samples with their log-probabilities out."""

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
    """How to sample.

    Attributes:
        max_tokens: tokens a sample, at most; fewer where the context ends first.
        seed: the same seed, prompts and weights give the same samples. Each sample has random numbers of its own,
            by its place in the request, so that what is computed together does not matter.
        n: samples a prompt.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: only that many of the most probable tokens; 0 is off.
        top_p: only the most probable tokens that together reach this probability; 1 is off.
        stop: strings; a sample ends with the token that completes one, its text before it.
        stop_token_ids: tokens that end a sample, in addition to the model's own end tokens.
        ignore_eos: the model's end tokens do not end a sample.
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
        """The parameters of a request, checked; ``seed`` where it gives none.

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
        token_ids: what was sampled, the token that ended it included.
        logprobs: of each token (nats), under the whole distribution at the sampling temperature (1 where that is 0):
            not renormalised after top-k and top-p, and so equal to what ``compute_logprobs`` gives.
        stop_reason: ``"eos"``, ``"stop"`` (a stop string or token) or ``"length"``.
        text: without special tokens, without the token that ended it and before the stop string; None where the
            model has no tokenizer.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    text: str | None


@dataclass(frozen=True)
class Samples:
    """All samples of a request, prompt by prompt.

    Legend: ``P`` prompts, ``R`` samples, ``T`` tokens of all of them.

    Attributes:
        counts: ``[P]`` samples of each prompt, uint32.
        lengths: ``[R]`` tokens of each sample, uint32.
        token_ids: ``[T]`` int32.
        logprobs: ``[T]`` float32.
        stop_reasons: of each sample.
        texts: of each sample, or None; see :class:`Sample` for all of these.
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
    """A request that a sampler works on."""

    @property
    def done(self) -> bool: ...

    def samples(self) -> Samples:
        """What came of it, once it is done.

        Raises:
            Exception: what ended it instead.
        """


J = TypeVar("J", bound=Job)


class Sampler(Protocol[J]):
    """Something that generates with policies' weights: requests begin at any time, and steps bring all of them on."""

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        alone: bool = False,
    ) -> J:
        """Takes a request: ``params.n`` samples of each prompt.

        The policy's weights must stay as they are until the job is done or cancelled.

        Args:
            prompts: token ids of each.
            tokenizer: for texts and stop strings.
            alone: compute with no other request's rows, so that the result is the same to the last bit whatever else
                is asked for.

        Raises:
            OperationError: INVALID_BATCH for a prompt, UNSUPPORTED for stop strings without a tokenizer.
        """

    def cancel(self, job: J) -> None:
        """Forgets a job."""

    def uses(self, policy: Policy) -> bool:
        """Whether a job of this policy is under way."""

    def turn(self) -> Collection[J]:
        """The jobs that the next :meth:`step` will bring on; none when all are done."""

    def step(self) -> None:
        """Brings the jobs whose turn it is on by a token or so. What fails is told by the jobs.

        Raises:
            torch.AcceleratorError: when the device is lost.
        """
