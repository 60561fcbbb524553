"""The interface of inference: sampling parameters, generations, and the protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from gradwire_proto.chat import Chat, TemplateError, cut

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
        version: Optimizer steps of the policy that wrote it, if the backend knows; of several, the first.
        token_versions: ``[tokens]``, that of each token where several policies wrote it; None: ``version`` for all.
    """

    text: str
    token_ids: IntArray
    logprobs: FloatArray
    stop_reason: str
    version: int = 0
    token_versions: IntArray | None = None


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

    An attribute ``whole_logprobs`` that is true says that log-probabilities are of the whole distribution even where
    ``top_p`` or ``top_k`` cut it. Without it the trainer scores such samples.
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


@runtime_checkable
class ChatCodec(Protocol):
    """A codec that knows the model's chat template.

    Attributes:
        name: Name of the model or its tokenizer, for messages.
    """

    name: str

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        keep_sampled: bool = False,
    ) -> IntArray | None:
        """Render a conversation as token ids; None if the model has no chat template.

        An assistant's message may have ``token_ids``, the tokens that were sampled for it; they are kept as far as the
        template keeps the message's text, or whole if ``keep_sampled``.
        """
        ...


class TokenizerCodec:
    """Codec of a tokenizer object: from ``transformers``, or any object with ``encode`` and ``decode``.

    Args:
        tokenizer: The tokenizer; conversations use its ``chat_template``, if it has one.
        template_kwargs: Further variables of the template, e.g. ``enable_thinking=False``.
    """

    def __init__(self, tokenizer: Any, **template_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.end_text: str = getattr(tokenizer, "eos_token", None) or ""
        self.name: str = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._template_kwargs = template_kwargs

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        rows = [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
        return [np.asarray(getattr(row, "ids", row), dtype=np.int64) for row in rows]

    async def decode(self, rows: Sequence[TokenRow]) -> list[str]:
        return [self.tokenizer.decode(np.asarray(row).tolist()) for row in rows]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        keep_sampled: bool = False,
    ) -> IntArray | None:
        tokenizer = self.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return None

        def write(written: Sequence[Mapping[str, Any]], prompt: bool) -> str:
            try:
                return str(
                    tokenizer.apply_chat_template(
                        list(written), tokenize=False, add_generation_prompt=prompt, **self._template_kwargs
                    )
                )
            except Exception as error:  # a template may fail by any of Python's errors
                raise TemplateError(f"the chat template of {self.name}: {error}") from error

        specials = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens))
        chat = Chat(write, specials, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))
        rows = [
            np.asarray(piece.token_ids, np.int64)
            if piece.token_ids is not None
            else (await self.encode([piece.text], add_special_tokens=False))[0]
            for piece in cut(
                chat,
                messages,
                add_generation_prompt=add_generation_prompt,
                history="kept" if keep_sampled else "as written",
            )
        ]
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)


class ServiceCodec:
    """Uses the server's tokenizer of a model through ``service.encode``, ``decode`` and ``render``; caches texts.

    Args:
        service: The service returned by ``gradwire.connect``.
        model: A model's name.
        remember: Number of texts whose ids are cached.
        template_kwargs: Further variables of the model's chat template, e.g. ``enable_thinking=False``.
    """

    def __init__(
        self, service: Any, model: str, *, end_text: str = "", remember: int = 8192, **template_kwargs: Any
    ) -> None:
        self._service, self._model, self._remember = service, model, remember
        self._template_kwargs = template_kwargs
        self._has_template: bool | None = None
        self.end_text = end_text
        self.name = model
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

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        keep_sampled: bool = False,
    ) -> IntArray | None:
        if self._has_template is None:
            self._has_template = bool((await self._service.tokenizer_info(self._model)).chat_template)
        if not self._has_template:
            return None
        row = await self._service.render(
            messages, train_on=None, add_generation_prompt=add_generation_prompt, model=self._model,
            keep_sampled=keep_sampled, **self._template_kwargs,
        )  # fmt: skip
        return np.asarray(row["input_ids"], np.int64)
