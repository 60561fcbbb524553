"""Conversion between text and token ids with the models' own tokenizers, in threads; needs neither model nor torch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from gradwire_proto.v1 import training_pb2 as pb
from tokenizers import Tokenizer

from gradwire_server.errors import ServiceError

THREADS = 2


class Tokenizers:
    """The tokenizers of the models that have one.

    Args:
        files: Path of each model's ``tokenizer.json``, by model name.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)
        self._loaded: dict[str, Tokenizer] = {}
        self._threads = ThreadPoolExecutor(THREADS, "gradwire-tokenizer")  # long texts do not block other thread pools

    async def encode(self, model: str, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Encode texts into token ids.

        Raises:
            ServiceError: UNSUPPORTED for a model without a tokenizer.
        """

        def run() -> list[list[int]]:
            tokenizer = self._load(model)
            return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)]

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

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

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

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
