"""Samples outside a run's queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from gradwire_proto.codec import IMAGE_BYTES, IMAGES, Column, decode
from gradwire_proto.v1 import training_pb2 as pb

from gradwire import errors
from gradwire.errors import DeadlineExceededError, GradwireError, InvalidArgumentError, WouldDeadlockError
from gradwire.futures import Future, failed, running_loop, start
from gradwire.losses import model_path
from gradwire.results import Array, Checkpoint, Columns, SampledToken, SampleResult
from gradwire.wire.entries import check_timeout
from gradwire.wire.options import check_options
from gradwire.wire.processes import Connected
from gradwire.wire.sample_calls import Prompts, SamplingOptions, sample_call
from gradwire.wire.transport import Transport

R = TypeVar("R")
SampleMessage = tuple[pb.SampleCall, Mapping[str, Column]]


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
        *,
        images: Sequence[Sequence[Any]] | None = None,
        timeout: float | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Future[SampleResult]:
        """Generate continuations of prompts: see :meth:`gradwire.TrainingClient.sample`.

        ``timeout`` counts from the call, as nothing is queued; the server stops when it is over.
        """
        check_options(SamplingOptions, options, self.sample)

        def build() -> SampleMessage:
            return sample_call(prompts, options, n=n, images=images)

        return self._asked(f"sample from {self.model}", build, SampleResult.from_wire, timeout)

    def stream(self, prompt: str | Sequence[int], **options: Unpack[SamplingOptions]) -> TokenStream:
        """Generate one continuation of a prompt token by token.

        ``async for token in client.stream(...)``; in a script without an event loop, ``for token in ...``. Each is a
        :class:`gradwire.SampledToken`. Generation ends when you leave the loop and drop the stream.

        Args:
            prompt: A text, or a row of token ids.
            options: See :class:`gradwire.SamplingOptions`.
        """
        check_options(SamplingOptions, options, self.stream)
        message, columns = sample_call(prompt if isinstance(prompt, str) else [prompt], options)
        return TokenStream(self._transport, self._loop, self._request(message, columns))

    def compute_logprobs(
        self,
        input_ids: Sequence[Any],
        temperature: float = 1.0,
        timeout: float | None = None,
        *,
        images: Sequence[Sequence[Any]] | None = None,
    ) -> Future[list[Array]]:
        """Compute the log-probabilities of each row's tokens but the first, in nats.

        Args:
            input_ids: Rows of token ids, or one row.
            temperature: Divides the logits.
            timeout: As for :meth:`sample`.
            images: Each row's images, as for :meth:`sample`.
        """

        def scores(result: pb.OperationResult, columns: Columns) -> list[Array]:
            return columns["prompt_logprobs"].rows()

        return self._asked("compute_logprobs", lambda: _scoring(input_ids, temperature, images=images), scores, timeout)

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

        return self._asked("compute_top_logprobs", lambda: _scoring(input_ids, temperature, k), scores, timeout)

    def _asked(
        self,
        label: str,
        build: Callable[[], SampleMessage],
        decoded: Callable[..., R],
        timeout: float | None,
    ) -> Future[R]:
        try:
            check_timeout(timeout)
            request = self._request(*build())
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


def _scoring(
    input_ids: Prompts, temperature: float, top: int = 0, images: Sequence[Sequence[Any]] | None = None
) -> SampleMessage:
    options: SamplingOptions = {"max_tokens": 0, "temperature": temperature}
    return sample_call(input_ids, options, prompt_logprobs=True, top_prompt_logprobs=top, images=images)


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
