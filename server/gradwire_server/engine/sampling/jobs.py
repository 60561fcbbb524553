"""A request to the local sampler: its checked prompts, and its samples as they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gradwire_proto.v1 import training_pb2
from tokenizers.decoders import DecodeStream

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.sampler import Samples, SamplingParams, StopReason

DECODED_ROWS = 64
"""Samples whose tokens become text at a time."""


@dataclass(frozen=True)
class _Ended:
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    by_token: bool
    text: str | None


class LocalJob:
    """One request; its rows are its samples, prompt by prompt.

    Args:
        policy: The policy to sample from.
        prompts, params, tokenizer: See :meth:`.sampler.Sampler.begin`.

    Attributes:
        ends: Tokens that end a sample.
        limits: ``[R]`` maximum tokens of each sample.
        error: The error that ended the job, or None.

    Raises:
        OperationError: The request is invalid.
    """

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None,
    ) -> None:
        _check(policy, prompts, params, tokenizer)
        facts = policy.facts
        self.prompts, self.params, self.tokenizer = [tuple(prompt) for prompt in prompts], params, tokenizer
        eos = frozenset(facts.eos_token_ids)
        self.ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos
        self.limits = np.repeat(
            [min(params.max_tokens, facts.context_length - len(prompt)) for prompt in prompts], params.n
        )
        self.error: Exception | None = None
        self._eos = eos - params.stop_token_ids
        self._ended: list[_Ended | None] = [None] * len(self.limits)
        self._left = len(self._ended)

    @property
    def done(self) -> bool:
        return not self._left or self.error is not None

    def order(self) -> list[int]:
        """All rows, longest prompts first, with a prompt's samples side by side."""
        rows = range(len(self.limits))
        return sorted(rows, key=lambda row: (-len(self.prompt_of(row)), row))

    def prompt_of(self, row: int) -> tuple[int, ...]:
        return self.prompts[row // self.params.n]

    def place_of(self, row: int) -> int:
        """Key of a row's random numbers, in addition to the seed."""
        return row // self.params.n << 32 | row % self.params.n

    def search(self) -> StopSearch | None:
        """Make a search for the stop strings in one sample; None if there are none."""
        if not self.params.stop or self.tokenizer is None:
            return None
        return StopSearch(self.params.stop, self.tokenizer)

    def end(
        self,
        row: int,
        token_ids: npt.NDArray[np.int32],
        logprobs: npt.NDArray[np.float32],
        by_token: bool,
        text: str | None,
    ) -> None:
        """Record a row's finished sample.

        Args:
            by_token: It ended with one of :attr:`ends`.
            text: The text before the stop string if it ended with one, else None.
        """
        self._left -= self._ended[row] is None
        self._ended[row] = _Ended(token_ids, logprobs, by_token, text)

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
            texts=self._texts(ended) if self.tokenizer is not None else None,
        )

    def _reason(self, row: _Ended) -> StopReason:
        if row.text is not None:
            return "stop"
        if not row.by_token:
            return "length"
        return "eos" if int(row.token_ids[-1]) in self._eos else "stop"

    def _texts(self, ended: list[_Ended]) -> list[str]:
        assert self.tokenizer is not None
        texts: list[str] = []
        for start in range(0, len(ended), DECODED_ROWS):  # lists of all tokens would take ten times their memory
            rows = ended[start : start + DECODED_ROWS]
            whole = [row.token_ids[: len(row.token_ids) - row.by_token].tolist() for row in rows if row.text is None]
            decoded = iter(self.tokenizer.decode(whole))
            texts += [next(decoded) if row.text is None else row.text for row in rows]
        return texts


class StopSearch:
    """Search for stop strings in a growing sample.

    Args:
        stop: The strings.
        tokenizer: Decodes tokens to text.
    """

    def __init__(self, stop: Sequence[str], tokenizer: TextTokenizer) -> None:
        self._stop = stop
        self._longest = max(map(len, stop))
        self._tokenizer = tokenizer.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._text = ""

    def find(self, token: int) -> str | None:
        """Add the next token, and return the text before the first stop string once there is one, else None."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return None
        start = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        places = [place for stop in self._stop if (place := self._text.find(stop, start)) >= 0]
        return self._text[: min(places)] if places else None


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
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise refuse(row, "has no tokens; begin with the model's start token, say", "at least one token")
        if len(prompt) >= facts.context_length:
            raise refuse(
                row,
                f"has {len(prompt)} tokens, and the model's context of {facts.context_length} leaves no room after it",
                f"tokens < {facts.context_length}",
            )
        if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < facts.vocab_size)
            raise refuse(row, f"has the token id {wrong}", f"0 <= id < {facts.vocab_size}")
    if params.stop and tokenizer is None:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} has no tokenizer here, so stop strings cannot be found: use stop_token_ids",
            field="stop",
        )
