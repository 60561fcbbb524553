"""What an inference module takes and gives: sampling parameters, generations, and the protocol itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from gradwire.rl.types import FloatArray, IntArray

TokenRow = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_tokens: at most, a response.
        temperature: divides the logits; 0 is greedy.
        top_k, top_p: keep only the likeliest tokens; 0 and 1 keep all, as training on the samples wants it.
        stop: strings at which a response ends.
        stop_token_ids: ids at which it ends, beside the model's own end tokens.
        seed: the same seed and prompts give the same responses, where the backend can.
        ignore_eos: go on past the model's end tokens.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # one string is one, not its characters
            object.__setattr__(self, "stop", (self.stop,))


@dataclass(frozen=True)
class Generation:
    """A response.

    Attributes:
        text: without the stop string it ended at.
        token_ids: ``[tokens]``, all that was sampled; empty where the backend tells no ids.
        logprobs: ``[tokens]``, of each in nats.
        stop_reason: ``"eos"``, ``"stop"`` or ``"length"``.
        version: optimizer steps of the policy that wrote it, where the backend knows.
    """

    text: str
    token_ids: IntArray
    logprobs: FloatArray
    stop_reason: str
    version: int = 0


@dataclass(frozen=True)
class TopLogits:
    """The likeliest next tokens of a prompt, likeliest first.

    Attributes:
        token_ids: ``[k]``.
        logits: ``[k]``, normalised to log-probabilities (the logits up to a constant of the prompt).
        tokens: their texts, where the backend gives those and not ids.
    """

    token_ids: IntArray
    logits: FloatArray
    tokens: tuple[str, ...] = ()


@runtime_checkable
class InferenceModule(Protocol):
    """Anything that continues token rows. Prompts are token ids; :class:`TextCodec` makes them from text.

    Attributes:
        version: optimizer steps of the policy whose weights it samples with.
    """

    version: int

    @property
    def codec(self) -> TextCodec: ...

    def can_update(self, run: Any) -> bool:
        """Whether :meth:`update_weights` can bring this run's weights here; training needs it."""
        ...

    async def update_weights(self, run: Any, version: int) -> None:
        """Samples with the weights of the run (a ``TrainingClient``) from now on, which has taken ``version`` steps."""
        ...

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        """One response a prompt, in order."""
        ...

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        """Of each row, ``[tokens - 1]``: the log-probability of each token but the first."""
        ...

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        """The ``top_k`` likeliest next tokens of each prompt."""
        ...


class TextCodec(Protocol):
    """Text to token ids and back, by whoever holds the tokenizer.

    Attributes:
        end_text: how the end token is written, where a chat template writes it after each turn.
    """

    end_text: str

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]: ...

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]: ...


class TokenizerCodec:
    """The user's own tokenizer object: of ``transformers``, or anything with ``encode`` and ``decode``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end_text: str = getattr(tokenizer, "eos_token", None) or ""

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        rows = [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [np.asarray(getattr(row, "ids", row), dtype=np.int64) for row in rows]

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]:
        return [self.tokenizer.decode(np.asarray(row).tolist()) for row in rows]


class ServiceCodec:
    """The server's tokenizer of a model, through ``service.encode`` and ``service.decode``; texts are remembered.

    Args:
        service: what ``gradwire.connect`` gives.
        model: a model's name.
        remember: how many texts' ids are kept.
    """

    def __init__(self, service: Any, model: str, *, end_text: str = "", remember: int = 8192) -> None:
        self._service, self._model, self._remember = service, model, remember
        self.end_text = end_text
        self._known: dict[tuple[str, bool], IntArray] = {}

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        keys = [(text, add_special_tokens) for text in texts]
        new = list(dict.fromkeys(text for text, special in keys if (text, special) not in self._known))
        if new:
            rows = await self._service.encode(self._model, new, add_special_tokens=add_special_tokens)
            if len(self._known) + len(new) > self._remember:
                self._known = {key: self._known[key] for key in keys if key in self._known}
            for text, row in zip(new, rows, strict=True):
                self._known[text, add_special_tokens] = np.asarray(row, dtype=np.int64)
        return [self._known[key] for key in keys]

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]:
        return list(await self._service.decode(self._model, [np.asarray(row).tolist() for row in rows]))
