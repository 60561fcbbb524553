"""Text and conversations to token ids and back, with the models' own tokenizers, in threads; needs no torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from gradwire_proto.v1 import training_pb2 as pb
from tokenizers import Tokenizer

from gradwire_server.config import Limits
from gradwire_server.core.chat_template import ChatTemplate
from gradwire_server.core.rendering import Renderer
from gradwire_server.errors import ServiceError

THREADS = 2
R = TypeVar("R")


class Tokenizers:
    """The tokenizers of the models that have one.

    Args:
        files: Path of each model's ``tokenizer.json``, by model name.
        limits: The server's.
    """

    def __init__(self, files: Mapping[str, str], limits: Limits) -> None:
        self._files = dict(files)
        self._limits = limits
        self._loaded: dict[str, Tokenizer] = {}
        self._renderers: dict[str, Renderer] = {}
        self._threads = ThreadPoolExecutor(THREADS, "gradwire-tokenizer")  # long texts do not block other thread pools

    async def encode(self, model: str, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode texts into token ids.

        Raises:
            ServiceError: UNSUPPORTED for a model without a tokenizer.
        """

        def run() -> list[list[int]]:
            tokenizer = self._load(model)
            return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

        return await self._in_thread(run)

    async def decode(self, model: str, sequences: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        """Decode sequences of token ids into texts.

        Raises:
            ServiceError: UNSUPPORTED for a model without a tokenizer.
        """

        def run() -> list[str]:
            tokenizer = self._load(model)
            return list(
                tokenizer.decode_batch([list(ids) for ids in sequences], skip_special_tokens=skip_special_tokens)
            )

        return await self._in_thread(run)

    async def render(self, model: str, owner: str, request: pb.RenderRequest) -> pb.RenderResponse:
        """Render conversations: see :meth:`Renderer.render`.

        Raises:
            ServiceError: As there; UNSUPPORTED for a model without a tokenizer.
        """
        return await self._in_thread(lambda: self._renderer(model).render(owner, request))

    async def info(self, model: str) -> pb.TokenizerInfo:
        """Describe a tokenizer.

        Raises:
            ServiceError: UNSUPPORTED for a model without one.
        """
        return await self._in_thread(lambda: self._renderer(model).info())

    async def _in_thread(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _load(self, model: str) -> Tokenizer:
        if model not in self._files:
            raise ServiceError(
                pb.ERROR_CODE_UNSUPPORTED,
                f"the model {model!r} has no tokenizer.json on the server; encode with your own tokenizer",
                field="model",
            )
        if model not in self._loaded:
            tokenizer = Tokenizer.from_file(self._files[model])
            tokenizer.no_padding()
            tokenizer.no_truncation()
            self._loaded[model] = tokenizer
        return self._loaded[model]

    def _renderer(self, model: str) -> Renderer:
        if model not in self._renderers:
            tokenizer = self._load(model)
            try:
                template = ChatTemplate(Path(self._files[model]).parent)
            except (OSError, ValueError, KeyError, TypeError) as error:
                message = f"the tokenizer's settings of {model!r} cannot be read: {type(error).__name__}"
                raise ServiceError(pb.ERROR_CODE_UNSUPPORTED, message, field="model") from error
            self._renderers[model] = Renderer(model, tokenizer, template, self._limits)
        return self._renderers[model]
