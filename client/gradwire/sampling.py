"""Sampling: forms of prompts, and samples outside a run's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gradwire_proto.codec import Column, decode
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors
from gradwire.columns import token_rows
from gradwire.errors import DeadlineExceededError, GradwireError, InvalidArgumentError
from gradwire.futures import Future, failed, start
from gradwire.losses import model_path
from gradwire.queue import check_timeout
from gradwire.requests import message
from gradwire.results import Checkpoint, SampleResult
from gradwire.transport import Transport

Prompts = str | Sequence[Any]
"""A text, a row of token ids, or a list of either."""


def sample_call(
    prompts: Prompts,
    *,
    n: int,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    stop: str | Sequence[str],
    stop_token_ids: Sequence[int],
    seed: int | None,
    ignore_eos: bool,
) -> tuple[pb.SampleCall, dict[str, Column]]:
    """Build the message, and a column with the prompts' ids if they were given as ids."""
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if _are_texts(prompts) else []
    columns = {} if texts else {"prompt_ids": token_rows("prompt_ids", prompts)}
    call = message(
        pb.SampleCall,
        prompts=texts,
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=stop_token_ids,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    for name, value in (("n", n), ("top_p", top_p)):
        if not value > 0:  # the wire would take 0 for its default
            raise InvalidArgumentError(f"sample: {name} is {value}; it must be greater than 0", field=name, rule="> 0")
    return call, columns


def _are_texts(prompts: Sequence[Any]) -> bool:
    if not hasattr(prompts, "__len__"):
        raise InvalidArgumentError(
            f"prompts are texts or rows of token ids, not a {type(prompts).__name__}", field="prompts", rule="a list"
        )
    kinds = {isinstance(prompt, str) for prompt in prompts}
    if kinds == {True, False}:
        raise InvalidArgumentError(
            "prompts are either all texts or all rows of token ids", field="prompts", rule="one kind"
        )
    return kinds == {True}


def token_ids(ids: Sequence[int]) -> pb.TokenIds:
    """Check token ids that are sent outside tensors."""
    try:
        return pb.TokenIds(ids=ids)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"not token ids: {error}", rule="0 <= id < 2**32") from None


class SamplingClient:
    """Samples from a model or a checkpoint, outside any run's queue.

    Created by :meth:`gradwire.ServiceClient.sampling_client`.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, model: str | Checkpoint) -> None:
        self._transport = transport
        self._loop = loop
        self.model = model_path(model)

    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        timeout: float | None = None,
    ) -> Future[SampleResult]:
        """Generate continuations of prompts: see :meth:`gradwire.TrainingClient.sample`.

        ``timeout`` counts from the call, as nothing is queued; the server stops when it is over.
        """

        label = f"sample from {self.model}"
        try:
            check_timeout(timeout)
            call, columns = sample_call(
                prompts,
                n=n,
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                stop=stop,
                stop_token_ids=stop_token_ids,
                seed=seed,
                ignore_eos=ignore_eos,
            )
            rows = [row.tolist() for row in columns["prompt_ids"].rows()] if columns else []
            request = pb.SampleRequest(model=self.model, call=call, prompt_ids=map(token_ids, rows))
        except GradwireError as error:
            return failed(label, error)

        async def work() -> SampleResult:
            try:
                async with asyncio.timeout(timeout):
                    result, payload = await self._transport.sample(request)
            except TimeoutError as error:
                raise DeadlineExceededError(f"{label} was not done within its timeout of {timeout} s") from error
            if result.status != pb.STATUS_SUCCEEDED:
                raise errors.from_wire(result.error)
            return SampleResult.from_wire(result, decode(result.tensors, payload))

        return start(label, self._loop, work)

    def __repr__(self) -> str:
        return f"<SamplingClient {self.model}>"
