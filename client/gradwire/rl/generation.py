"""The interface of inference: sampling parameters, generations, and the protocol."""

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
    """Sampling parameters.

    Attributes:
        max_tokens: Maximum number of tokens per response.
        temperature: Divides the logits; 0 is greedy.
        top_k, top_p: Keep only the most probable tokens; 0 and 1 keep all, as training on the samples requires.
        stop: Strings at which a response ends.
        stop_token_ids: Token ids at which it ends, in addition to the model's own end tokens.
        seed: The same seed and prompts give the same responses, if the backend supports it.
        ignore_eos: Continue past the model's end tokens.
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
        if isinstance(self.stop, str):  # a single string is one stop string, not a list of characters
            object.__setattr__(self, "stop", (self.stop,))


@dataclass(frozen=True)
class Generation:
    """A response.

    Attributes:
        text: The text without the stop string.
        token_ids: ``[tokens]``, all sampled tokens; empty if the backend returns no ids.
        logprobs: ``[tokens]``, log-probability of each token in nats.
        stop_reason: ``"eos"``, ``"stop"`` or ``"length"``.
        version: Optimizer steps of the policy that wrote it, if the backend knows.
    """

    text: str
    token_ids: IntArray
    logprobs: FloatArray
    stop_reason: str
    version: int = 0


@dataclass(frozen=True)
class TopLogits:
    """The most probable next tokens of a prompt, most probable first.

    Attributes:
        token_ids: ``[k]``.
        logits: ``[k]``, normalised to log-probabilities (the logits up to a constant per prompt).
        tokens: The tokens' texts, if the backend returns texts instead of ids.
    """

    token_ids: IntArray
    logits: FloatArray
    tokens: tuple[str, ...] = ()


@runtime_checkable
class InferenceModule(Protocol):
    """Generates continuations of token rows. Prompts are token ids; :class:`TextCodec` makes them from text.

    Attributes:
        version: Optimizer steps of the policy whose weights it samples with.
    """

    version: int

    @property
    def codec(self) -> TextCodec: ...

    def can_update(self, run: Any) -> bool:
        """Whether :meth:`update_weights` can load this run's weights; training needs it."""
        ...

    async def update_weights(self, run: Any, version: int) -> None:
        """Sample with the weights of the run (a ``TrainingClient``), which has taken ``version`` steps, from now on."""
        ...

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        """Generate one response per prompt, in order."""
        ...

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        """Return ``[tokens - 1]`` per row: the log-probability of each token but the first."""
        ...

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        """Return the ``top_k`` most probable next tokens of each prompt."""
        ...


class TextCodec(Protocol):
    """Converts text to token ids and back.

    Attributes:
        end_text: The text of the end token, if a chat template writes it after each turn.
    """

    end_text: str

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]: ...

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]: ...


class TokenizerCodec:
    """Codec of a tokenizer object: from ``transformers``, or any object with ``encode`` and ``decode``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.end_text: str = getattr(tokenizer, "eos_token", None) or ""

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        rows = [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [np.asarray(getattr(row, "ids", row), dtype=np.int64) for row in rows]

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]:
        return [self.tokenizer.decode(np.asarray(row).tolist()) for row in rows]


class ServiceCodec:
    """Uses the server's tokenizer of a model through ``service.encode`` and ``service.decode``; caches texts.

    Args:
        service: The service returned by ``gradwire.connect``.
        model: A model's name.
        remember: Number of texts whose ids are cached.
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
