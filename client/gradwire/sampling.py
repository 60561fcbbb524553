"""Sampling: forms of prompts, and samples outside a run's queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column, decode
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors
from gradwire.errors import DeadlineExceededError, GradwireError, InvalidArgumentError, WouldDeadlockError, type_of
from gradwire.futures import Future, failed, running_loop, start
from gradwire.losses import model_path
from gradwire.results import Array, Checkpoint, Columns, SampledToken, SampleResult
from gradwire.wire.columns import token_rows
from gradwire.wire.entries import check_timeout
from gradwire.wire.images import to_image_columns
from gradwire.wire.processes import Connected
from gradwire.wire.requests import message
from gradwire.wire.transport import Transport

R = TypeVar("R")

Prompts = str | Sequence[Any]
"""A text, a row of token ids, or a list of either."""
NO_BIAS: Mapping[int, float] = MappingProxyType({})


def sample_call(prompts: Prompts, images: Any = None, **arguments: Any) -> tuple[pb.SampleCall, dict[str, Column]]:
    """Build the message, and columns with the prompts' ids, if they were given as ids, and with their images.

    Args:
        images: A list of images for each prompt, or None.
        arguments: The other arguments of :meth:`gradwire.TrainingClient.sample`, all but ``timeout``.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if _are_texts(prompts) else []
    columns = {} if texts else {"prompt_ids": token_rows("prompt_ids", prompts)}
    if images is not None:
        columns |= to_image_columns(images, len(texts) or columns["prompt_ids"].num_rows)
    stop, logit_bias, json_schema = (arguments.pop(name) for name in ("stop", "logit_bias", "json_schema"))
    if not isinstance(logit_bias, Mapping):
        raise InvalidArgumentError(
            f"logit_bias maps token ids to numbers, and is no {type(logit_bias).__name__}",
            field="logit_bias",
            rule="a mapping",
        )
    for name in ("n", "top_p", "repetition_penalty"):
        value = arguments[name]
        if not value > 0:  # the wire would take 0 for its default
            raise InvalidArgumentError(f"sample: {name} is {value}; it must be greater than 0", field=name, rule="> 0")
    call = message(
        pb.SampleCall,
        prompts=texts,
        stop=[stop] if isinstance(stop, str) else stop,
        logit_bias=[message(pb.LogitBias, token_id=token, bias=bias) for token, bias in logit_bias.items()],
        json_schema=_schema(json_schema),
        **arguments,
    )
    return call, columns


def _schema(schema: Mapping[str, Any] | str | None) -> str:
    if schema is None or isinstance(schema, str):
        return schema or ""
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"json_schema is not a JSON object: {error}", field="json_schema", rule="a JSON schema"
        ) from None


def _is_list(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def _are_texts(prompts: Sequence[Any]) -> bool:
    if not hasattr(prompts, "__len__"):
        raise InvalidArgumentError(
            f"prompts are texts or rows of token ids, not {type_of(prompts)}", field="prompts", rule="a list"
        )
    if any(isinstance(each, Mapping) for prompt in prompts for each in (prompt if _is_list(prompt) else [prompt])):
        raise InvalidArgumentError(
            "prompts are texts or rows of token ids, and these are chat messages: give the ids that `await "
            "service.render(messages, train_on=None, add_generation_prompt=True)` returns as input_ids",
            field="prompts", rule="texts or ids",
        )  # fmt: skip
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
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"{repr(ids)[:200]} is not a row of token ids, which are whole numbers from 0 to 2**32 - 1",
            rule="0 <= id < 2**32",
        ) from None


class SamplingClient(Connected):
    """Samples from a model, a checkpoint or a run's current weights, outside any run's queue.

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
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = NO_BIAS,
        json_schema: Mapping[str, Any] | str | None = None,
        top_logprobs: int = 0,
        images: Sequence[Sequence[Any]] | None = None,
        deterministic: bool = False,
    ) -> Future[SampleResult]:
        """Generate continuations of prompts: see :meth:`gradwire.TrainingClient.sample`.

        ``timeout`` counts from the call, as nothing is queued; the server stops when it is over.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "prompts", "timeout")}
        return self._asked(f"sample from {self.model}", prompts, arguments, SampleResult.from_wire, timeout)

    def stream(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = NO_BIAS,
        json_schema: Mapping[str, Any] | str | None = None,
        top_logprobs: int = 0,
        deterministic: bool = False,
    ) -> TokenStream:
        """Generate one continuation of a prompt token by token; the arguments as for :meth:`sample`.

        ``async for token in client.stream(...)``; in a script without an event loop, ``for token in ...``. Each is a
        :class:`gradwire.SampledToken`. Generation ends when you leave the loop and drop the stream.
        """
        arguments = {name: value for name, value in locals().items() if name not in ("self", "prompt")}
        call, columns = sample_call(prompt if isinstance(prompt, str) else [prompt], n=1, **arguments)
        return TokenStream(self._transport, self._loop, self._request(call, columns))

    def compute_logprobs(
        self, input_ids: Sequence[Any], temperature: float = 1.0, timeout: float | None = None
    ) -> Future[list[Array]]:
        """Compute the log-probabilities of each row's tokens but the first, in nats.

        Args:
            input_ids: Rows of token ids, or one row.
            temperature: Divides the logits.
            timeout: As for :meth:`sample`.
        """

        def scores(result: pb.OperationResult, columns: Columns) -> list[Array]:
            return columns["prompt_logprobs"].rows()

        return self._asked("compute_logprobs", input_ids, _scoring(temperature), scores, timeout)

    def compute_top_logprobs(
        self, input_ids: Sequence[Any], k: int, temperature: float = 1.0, timeout: float | None = None
    ) -> Future[list[tuple[Array, Array]]]:
        """Compute the ``k`` most probable tokens in the place of each row's tokens but the first.

        Args:
            input_ids: Rows of token ids, or one row.
            k: Number of tokens in each place.
            temperature: Divides the logits.
            timeout: As for :meth:`sample`.

        Returns:
            A future of ``(token_ids, logprobs)`` a row: ``[tokens - 1, k]`` int and float32 in nats, most probable
            first.
        """

        def scores(result: pb.OperationResult, columns: Columns) -> list[tuple[Array, Array]]:
            ids, logprobs = columns["prompt_top_token_ids"].rows(), columns["prompt_top_logprobs"].rows()
            return list(zip(ids, logprobs, strict=True))

        return self._asked("compute_top_logprobs", input_ids, _scoring(temperature, k), scores, timeout)

    def _asked(
        self,
        label: str,
        prompts: Prompts,
        arguments: dict[str, Any],
        decoded: Callable[..., R],
        timeout: float | None,
    ) -> Future[R]:
        try:
            check_timeout(timeout)
            request = self._request(*sample_call(prompts, **arguments))
        except GradwireError as error:
            return failed(label, error)

        async def work() -> R:
            try:
                async with asyncio.timeout(timeout):
                    result, payload = await self._transport.sample(request)
            except TimeoutError as error:
                raise DeadlineExceededError(f"{label} was not done within its timeout of {timeout} s") from error
            if result.status != pb.STATUS_SUCCEEDED:
                raise errors.from_wire(result.error)
            return decoded(result, decode(result.tensors, payload))

        return start(label, self._loop, work)

    def _request(self, call: pb.SampleCall, columns: Mapping[str, Column]) -> pb.SampleRequest:
        rows = [row.tolist() for row in columns["prompt_ids"].rows()] if "prompt_ids" in columns else []
        request = pb.SampleRequest(model=self.model, call=call, prompt_ids=map(token_ids, rows))
        if IMAGES in columns:
            request.images.extend(each.tobytes() for each in columns[IMAGE_BYTES].rows())
            request.prompt_images.extend(pb.ImageNumbers(images=row.tolist()) for row in columns[IMAGES].rows())
        return request

    def __repr__(self) -> str:
        return f"<SamplingClient {self.model}>"


def _scoring(temperature: float, top: int = 0) -> dict[str, Any]:
    return {
        "n": 1, "max_tokens": 0, "temperature": temperature, "top_p": 1.0, "repetition_penalty": 1.0, "stop": (),
        "logit_bias": NO_BIAS, "json_schema": None, "prompt_logprobs": True, "top_prompt_logprobs": top,
    }  # fmt: skip


class TokenStream:
    """The tokens of one sample as they are generated, for ``async for`` or ``for``.

    Created by :meth:`SamplingClient.stream`.
    """

    def __init__(self, transport: Transport, loop: asyncio.AbstractEventLoop, request: pb.SampleRequest) -> None:
        self._loop = loop
        self._tokens = _tokens(transport, request)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> SampledToken:
        return await self._on_loop(self._tokens.__anext__())

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> SampledToken:
        if running_loop() is self._loop:
            raise WouldDeadlockError("`for` would block the event loop that receives the tokens; use `async for`")
        try:
            return asyncio.run_coroutine_threadsafe(self.__anext__(), self._loop).result()
        except StopAsyncIteration:
            raise StopIteration from None

    async def aclose(self) -> None:
        """End the generation."""
        await self._on_loop(self._tokens.aclose())

    def close(self) -> None:
        """End the generation, from a thread without an event loop."""
        asyncio.run_coroutine_threadsafe(self.aclose(), self._loop).result()

    async def _on_loop(self, work: Coroutine[Any, Any, R]) -> R:
        if running_loop() is self._loop:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


async def _tokens(transport: Transport, request: pb.SampleRequest) -> AsyncGenerator[SampledToken]:
    async with contextlib.aclosing(transport.stream_sample(request)) as frames:
        async for frame in frames:
            for delta in frame.deltas:
                for token in SampledToken.from_wire(delta):
                    yield token
            if frame.HasField("result") and frame.result.status != pb.STATUS_SUCCEEDED:
                raise errors.from_wire(frame.result.error)
