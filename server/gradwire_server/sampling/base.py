"""What a sampler is: prompts in, samples with their log-probabilities out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError

if TYPE_CHECKING:
    from gradwire_server.engine.policy import Policy
    from gradwire_server.engine.tokenizers import TextTokenizer

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


class Sampler(Protocol):
    """Something that generates with a policy's weights."""

    def sample(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
    ) -> list[list[Sample]]:
        """``params.n`` samples of each prompt, in order.

        Args:
            prompts: token ids of each.
            tokenizer: for texts and stop strings.

        Raises:
            OperationError: INVALID_BATCH for a prompt, UNSUPPORTED for stop strings without a tokenizer.
        """
