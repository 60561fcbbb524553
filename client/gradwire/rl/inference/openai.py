"""Any endpoint with OpenAI's API: vLLM, SGLang, llama.cpp, a hosted model."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.extras import require
from gradwire.rl.generation import Generation, SamplingParams, TextCodec, TokenRow, TopLogits
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.inference.weights import WeightFolder, has_tied_head, is_adapter
from gradwire.rl.types import FloatArray
from gradwire.wire.options import check_options


class NotFoundError(ValueError):
    """The endpoint knows no such model, or no such route."""


class VLLMRoutes(WeightFolder):
    """Adds vLLM's own routes to the client of an endpoint; requests take their turns while they are in flight."""

    _base_url: str
    _turns: asyncio.Semaphore
    _concurrency: int
    _asleep: contextlib.AsyncExitStack | None = None

    @abstractmethod
    async def _command(self, url: str, body: Mapping[str, Any]) -> None:
        """Send a ``POST`` once.

        Raises:
            NotFoundError: There is no such route.
            ValueError: The endpoint refused the request.
        """

    @abstractmethod
    async def _question(self, url: str) -> Any:
        """The answer to a ``GET``, decoded."""

    async def _load_all_weights(self, folder: Path, version: int) -> None:
        if has_tied_head(folder) and await self._device() == "cpu":
            raise UnsupportedError(
                f"vLLM at {self._base_url} runs on a CPU, where it keeps the old output head of a model that shares it "
                'with the embedding. Train with lora={...} and weights="adapter", or sample with VLLMInference'
            )
        async with await self._all_turns():
            # Other clients' requests end with the weights that they began with, or begin when all weights are new.
            try:
                await self._of_vllm("pause?mode=wait")
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await self._of_vllm("collective_rpc", reload)
                await self._of_vllm("reset_prefix_cache")
                await self._of_vllm("update_weight_version", {"new_version": str(version)})
                self.version = version
            finally:
                await self._of_vllm("resume")

    async def _all_turns(self) -> contextlib.AsyncExitStack:
        """Wait until no request is in flight, whose tokens would be of two versions; others wait until the exit."""
        async with contextlib.AsyncExitStack() as turns:
            for _ in range(self._concurrency):
                await turns.enter_async_context(self._turns)
            return turns.pop_all()

    async def sleep(self) -> None:
        """Let vLLM give its memory to the trainer, with its weights in host memory; requests wait until it wakes."""
        async with await self._all_turns() as turns:
            await self._of_vllm("sleep?level=1&mode=wait")
            self._asleep = turns.pop_all()

    async def wake(self) -> None:
        """Undo :meth:`sleep`; nothing if it is awake."""
        if self._asleep is not None:
            await self._of_vllm("wake_up")
            turns, self._asleep = self._asleep, None
            await turns.aclose()

    async def _of_vllm(self, route: str, body: Mapping[str, Any] | None = None) -> None:
        """Send a request of vLLM's that is beside its API of OpenAI's."""
        try:
            await self._command(f"{self._root}/{route}", body or {})
        except NotFoundError as error:
            raise UnsupportedError(
                f"{error}: it is no vLLM of 0.32 or newer with VLLM_SERVER_DEV_MODE=1, which new weights for the whole "
                "model and sleeping need"
            ) from None

    @property
    def _root(self) -> str:
        return self._base_url.removesuffix("/v1")

    async def _device(self) -> str:
        """The type of device that vLLM runs on; empty if the endpoint does not tell."""
        try:
            told = await self._question(f"{self._root}/server_info?config_format=json")
        except ValueError:
            return ""
        return str(told.get("vllm_config", {}).get("device_config", {}).get("device", ""))


BUSY = frozenset({429, 502, 503, 504})
"""Status codes of an endpoint that may answer later."""


class OpenAIOptions(TypedDict, total=False):
    """The keyword arguments of :class:`OpenAIInference`.

    Attributes:
        api_key: Sent as a bearer token.
        send_ids: Also requests the sampled ids (vLLM's ``return_token_ids``); True by default. Without them the text is
            encoded again, which is close but not exact: good for evaluation and judges, not for training. An endpoint
            without ids (OpenAI's own, ``transformers serve``) refuses ``top_k`` and ``ignore_eos`` as well.
        weights: How the endpoint receives new weights, which training needs. ``"adapter"``: a LoRA run's, by
            ``POST load_lora_adapter``; vLLM needs ``--enable-lora`` and
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. ``"model"``: all weights, by vLLM's ``POST collective_rpc`` of
            ``reload_weights`` while it is paused, which needs ``VLLM_SERVER_DEV_MODE=1``; on a CPU only for models
            with an output head of their own (``tie_word_embeddings`` false). None, the default: not at all.
        weights_folder: Folder to export weights to; the endpoint must see it under the same path.
        adapters_url: The endpoint's ``load_lora_adapter``; by default below ``base_url``, as in vLLM (SGLang has
            it at the root).
        whole_logprobs: Whether the endpoint's log-probabilities are of the whole distribution at the sampling
            temperature where ``top_p`` or ``top_k`` cut it, as gradwire's are, and vLLM's ``raw_logprobs`` at
            temperature 1. False by default, as vLLM's ``processed_logprobs``: the trainer then scores such samples.
        sleeps: Whether the endpoint sleeps while the policy trains, for a vLLM on the trainer's GPU: it needs
            ``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1``. False by default.
        concurrency: Requests in flight; 16 by default.
        timeout_s: Time limit of a request; 300 by default.
    """

    api_key: str
    send_ids: bool
    weights: Literal["adapter", "model"] | None
    weights_folder: Path | str | None
    adapters_url: str
    whole_logprobs: bool
    sleeps: bool
    concurrency: int
    timeout_s: float


class OpenAIInference(VLLMRoutes, ToolGeneration):
    """Client of an endpoint by the ``openai`` package, which repeats requests that a busy endpoint refused.

    Rollouts are sampled by ``POST {base_url}/completions``, which takes exact token ids; :meth:`chat` sends whole
    conversations to ``POST {base_url}/chat/completions``, all that most hosted models offer.

    To train on samples of another temperature than 1, the endpoint must return log-probabilities at that temperature:
    vLLM does with ``--logprobs-mode processed_logprobs``.

    Args:
        base_url: Up to and including ``/v1``.
        model: The endpoint's name of the model.
        codec: The model's tokenizer. Prompts are sent as token ids if ``send_ids`` (vLLM, SGLang), else as text.
            Only :meth:`chat` works without one.
        options: ``api_key``, ``weights``, ``send_ids`` and others: see :class:`OpenAIOptions`.

    Raises:
        ImportError: ``openai`` is not installed: ``pip install 'gradwire[openai]'``.
    """

    def __init__(
        self, base_url: str, model: str, codec: TextCodec | None = None, **options: Unpack[OpenAIOptions]
    ) -> None:
        check_options(OpenAIOptions, options, type(self))
        weights, weights_folder = options.get("weights"), options.get("weights_folder")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        if weights not in (None, "adapter", "model"):
            raise ValueError(f'weights must be "adapter", "model" or None, got {weights!r}')
        self._openai = require("openai", "openai", "OpenAIInference")
        self._client = self._openai.AsyncOpenAI(
            base_url=base_url,
            api_key=options.get("api_key") or "none",  # not OPENAI_API_KEY, which belongs to another endpoint
            timeout=options.get("timeout_s", 300.0),
            default_headers={"Connection": "close"},  # an idle connection would belong to one event loop
        )
        self.model = model
        self._base_url = base_url.rstrip("/")
        self._weights = weights
        self.weights_folder = None if weights_folder is None else Path(weights_folder)
        self._adapters_url = options.get("adapters_url") or f"{self._base_url}/load_lora_adapter"
        self._adapters: dict[str, Path] = {}
        self._loading = asyncio.Lock()
        self._reloads: Counter[str] = Counter()
        self.sleeps = options.get("sleeps", False)
        self.whole_logprobs = options.get("whole_logprobs", False)
        self._codec = codec
        self._send_ids = options.get("send_ids", True)
        self._concurrency = options.get("concurrency", 16)
        self._turns = asyncio.Semaphore(self._concurrency)

    @property
    def codec(self) -> TextCodec:
        if self._codec is None:
            raise ValueError("OpenAIInference was created without a codec: only chat() works without a tokenizer")
        return self._codec

    def can_update(self, run: Any) -> bool:
        return self._weights is not None and super().can_update(run)

    async def load_weights(self, folder: Path, version: int) -> None:
        if is_adapter(folder) != (self._weights == "adapter"):
            trained = "an adapter" if is_adapter(folder) else "all weights"
            raise ValueError(
                f'the run trains {trained}, but OpenAIInference was created with weights="{self._weights}"'
            )
        await self.wake()
        if self._weights == "model":
            await self._load_all_weights(folder, version)
            return
        name = folder.name
        await self._command(self._adapters_url, {"lora_name": name, "lora_path": str(folder)})
        self.model, self.version = name, version
        # Requests in flight still name the previous adapter: it is kept until the next one arrives.
        self._adapters[name] = folder
        for old in list(self._adapters)[:-2]:
            del self._adapters[old], self._reloads[old]
            await self._command(self._adapters_url.replace("/load_", "/unload_"), {"lora_name": old})

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        options = self._options(params) | {"max_tokens": params.max_tokens, "logprobs": 0}
        answers = await asyncio.gather(
            *(self._complete(p, {**options, **_seed(params, i)}) for i, p in enumerate(prompts))
        )
        return [await self._generation(choice, version) for choice, version in answers]

    async def chat(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], params: SamplingParams
    ) -> list[Generation]:
        """Answer each conversation; the endpoint applies its own chat template.

        For judges and evaluation. With ``send_ids`` generations have token ids and log-probabilities; otherwise they
        have text only, and parameters beyond OpenAI's own are refused by most endpoints.

        Args:
            conversations: Rows of ``{"role": ..., "content": ...}``.
        """
        options = self._options(params) | {"max_completion_tokens": params.max_tokens}
        if self._send_ids:
            options["logprobs"] = True

        async def answer(messages: Sequence[Mapping[str, Any]], seed: dict[str, int]) -> tuple[Any, int]:
            return await self._choice(self._client.chat.completions, messages=list(messages), **options, **seed)

        answers = await asyncio.gather(*(answer(c, _seed(params, i)) for i, c in enumerate(conversations)))
        return [
            Generation(
                choice.message.content or "",
                np.asarray(getattr(choice, "token_ids", None) or (), np.int64),
                np.asarray([token.logprob for token in getattr(choice.logprobs, "content", None) or ()], np.float32),
                _stop_reason(choice),
                version,
            )
            for choice, version in answers
        ]

    def _options(self, params: SamplingParams) -> dict[str, Any]:
        """Parameters that both endpoints share; those that OpenAI's API lacks go into ``extra_body``."""
        options: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p}
        if params.stop:
            options["stop"] = list(params.stop)
        extras = {
            "stop_token_ids": list(params.stop_token_ids),
            "top_k": params.top_k,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": self._send_ids,
        }
        return options | {"extra_body": {name: value for name, value in extras.items() if value}}

    async def _generation(self, choice: Any, version: int) -> Generation:
        ids = getattr(choice, "token_ids", None)
        if ids is None:
            ids = (await self.codec.encode([choice.text], add_special_tokens=False))[0]
        logprobs = [0.0 if each is None else each for each in getattr(choice.logprobs, "token_logprobs", None) or ()]
        return Generation(
            choice.text, np.asarray(ids, np.int64), np.asarray(logprobs, np.float32), _stop_reason(choice), version
        )

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        if temperature != 1.0:
            raise ValueError("the completions protocol scores at temperature 1 only")
        options = {"max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0.0}
        answers = await asyncio.gather(*(self._complete(row, options) for row in rows))
        scored = [self._logprobs(choice, "token_logprobs", len(row)) for (choice, _), row in zip(answers, rows)]
        return [np.asarray(each[1 : len(row)], np.float32) for each, row in zip(scored, rows)]

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        options = {"max_tokens": 1, "logprobs": top_k, "temperature": 0.0}
        answers = await asyncio.gather(*(self._complete(prompt, options) for prompt in prompts))
        result = []
        for choice, _ in answers:
            top = self._logprobs(choice, "top_logprobs", 1)[0]
            tokens = sorted(top, key=top.__getitem__, reverse=True)[:top_k]
            encoded = await self.codec.encode(tokens, add_special_tokens=False)
            ids = np.array([row[0] if len(row) == 1 else -1 for row in encoded], np.int64)
            result.append(TopLogits(ids, np.array([top[token] for token in tokens], np.float32), tuple(tokens)))
        return result

    def _logprobs(self, choice: Any, name: str, count: int) -> Any:
        logprobs = getattr(choice.logprobs, name, None) or ()
        if len(logprobs) < count:
            raise UnsupportedError(
                f"{self._base_url}/completions returned {len(logprobs)} of {count} {name}: it does not score prompts"
            )
        return logprobs

    async def _text(self, ids: list[int]) -> str:
        """Decode without the token that begins a text, because the endpoint's tokenizer adds it again."""
        start = (await self.codec.encode([""]))[0].tolist()
        return (await self.codec.decode([ids[len(start) :] if start == ids[: len(start)] else ids]))[0]

    async def _complete(self, prompt: TokenRow, options: Mapping[str, Any]) -> tuple[Any, int]:
        ids = np.asarray(prompt).tolist()
        written = ids if self._send_ids else await self._text(ids)
        return await self._choice(self._client.completions, prompt=written, **options)

    async def _choice(self, api: Any, **options: Any) -> tuple[Any, int]:
        """Send a request at its turn; return the answer's choice, and the version of the weights that gave it."""
        async with self._turns:
            version, model = self.version, self.model
            reloads = self._reloads[model]
            try:
                answer = await self._answer(api.create(model=model, **options))
            except NotFoundError:
                if model not in self._adapters:
                    raise
                await self._load_again(model, reloads)
                answer = await self._answer(api.create(model=model, **options))
        if not getattr(answer, "choices", None):
            raise ValueError(f"{self._base_url} answered without a completion: {str(answer)[:500]}")
        return answer.choices[0], version

    async def _load_again(self, adapter: str, reloads: int) -> None:
        """Load an adapter that the endpoint no longer has, as after a restart; once for all requests that miss it.

        Args:
            reloads: How often that had happened when the request was sent.
        """
        async with self._loading:
            if self._reloads[adapter] == reloads:
                loaded = {"lora_name": adapter, "lora_path": str(self._adapters[adapter])}
                await self._command(self._adapters_url, loaded)
                self._reloads[adapter] += 1

    async def _question(self, url: str) -> Any:
        return await self._answer(self._client.get(url, cast_to=object))

    async def _command(self, url: str, body: Mapping[str, Any]) -> None:
        """Send one of the endpoint's own requests beyond OpenAI's API, once: a repeat could find it carried out."""
        await self._answer(self._client.post(url, cast_to=str, body=body, options={"max_retries": 0}))

    async def _answer(self, request: Awaitable[Any]) -> Any:
        """Await a request.

        Raises:
            ConnectionError: No answer, or the endpoint is still busy after the package's own attempts.
            ValueError: The endpoint refused the request.
        """
        try:
            return await request
        except self._openai.APIStatusError as error:
            kind = ConnectionError if error.status_code in BUSY else ValueError
            kind = NotFoundError if error.status_code == 404 else kind
            raise kind(f"{error.request.url} answered {error.status_code}: {error.response.text[:2000]}") from None
        except self._openai.APIConnectionError as error:
            raise ConnectionError(f"{error.request.url}: {error.__cause__ or error}") from None


def _seed(params: SamplingParams, index: int) -> dict[str, int]:
    """The seed of one row of a call."""
    return {} if params.seed is None else {"seed": params.seed + index}


def _stop_reason(choice: Any) -> str:
    if choice.finish_reason == "length":
        return "length"
    return "stop" if getattr(choice, "stop_reason", None) else "eos"
