"""Any endpoint with OpenAI's completions API: vLLM, SGLang, llama.cpp, a hosted model."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.rl.generation import Generation, SamplingParams, TextCodec, TokenRow, TopLogits
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.inference.weights import WeightFolder, is_adapter
from gradwire.rl.threads import run_in_daemon
from gradwire.rl.types import FloatArray


class OpenAIInference(WeightFolder, ToolGeneration):
    """Client of ``POST {base_url}/completions``.

    To train on samples of another temperature than 1, the endpoint must return log-probabilities at that temperature:
    vLLM does with ``--logprobs-mode processed_logprobs``.

    Args:
        base_url: Up to and including ``/v1``.
        model: The endpoint's name of the model.
        codec: The model's tokenizer. Prompts are sent as token ids if ``send_ids`` (vLLM, SGLang), else as text.
        api_key: Sent as a bearer token.
        send_ids: Also requests the sampled ids (vLLM's ``return_token_ids``); without them the text is
            encoded again, which is close but not exact: good for evaluation and judges, not for training. An endpoint
            without ids (OpenAI's own, ``transformers serve``) refuses ``top_k`` and ``ignore_eos`` as well.
        weights: How the endpoint receives new weights, which training needs. ``"adapter"``: a LoRA run's, by
            ``POST load_lora_adapter``; vLLM needs ``--enable-lora`` and
            ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``. ``"model"``: all weights, by vLLM's ``POST collective_rpc`` of
            ``reload_weights``, which needs ``VLLM_SERVER_DEV_MODE=1``; verify it on your version: with vLLM 0.32 on
            a CPU log-probabilities were off afterwards. None: not at all.
        weights_folder: Folder to export weights to; the endpoint must see it under the same path.
        adapters_url: The endpoint's ``load_lora_adapter``; by default below ``base_url``, as in vLLM (SGLang has
            it at the root).
        concurrency: Requests in flight.
        timeout_s: Time limit of a request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        codec: TextCodec,
        *,
        api_key: str = "",
        send_ids: bool = True,
        weights: Literal["adapter", "model"] | None = None,
        weights_folder: Path | str | None = None,
        adapters_url: str = "",
        concurrency: int = 16,
        timeout_s: float = 300.0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must start with http:// or https://, got {base_url!r}")
        if weights not in (None, "adapter", "model"):
            raise ValueError(f'weights must be "adapter", "model" or None, got {weights!r}')
        self.model = model
        self._base_url = base_url.rstrip("/")
        self._url = f"{self._base_url}/completions"
        self._weights = weights
        self.weights_folder = None if weights_folder is None else Path(weights_folder)
        self._adapters_url = adapters_url or f"{self._base_url}/load_lora_adapter"
        self._adapters: tuple[str, ...] = ()
        self._codec = codec
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._send_ids = send_ids
        self._turns = asyncio.Semaphore(concurrency)
        self._timeout_s = timeout_s

    @property
    def codec(self) -> TextCodec:
        return self._codec

    def can_update(self, run: Any) -> bool:
        return self._weights is not None and super().can_update(run)

    async def load_weights(self, folder: Path, version: int) -> None:
        if is_adapter(folder) != (self._weights == "adapter"):
            trained = "an adapter" if is_adapter(folder) else "all weights"
            raise ValueError(
                f'the run trains {trained}, but OpenAIInference was created with weights="{self._weights}"'
            )
        if self._weights == "model":
            root = self._base_url.removesuffix("/v1")
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._call(f"{root}/collective_rpc", reload)
            await self._call(f"{root}/reset_prefix_cache", {})
            self.version = version
            return
        name = folder.name
        await self._call(self._adapters_url, {"lora_name": name, "lora_path": str(folder)})
        self.model, self.version = name, version
        # Requests in flight still name the previous adapter: it is kept until the next one arrives.
        loaded = (*self._adapters, name)
        self._adapters = loaded[-2:]
        for old in loaded[:-2]:
            await self._call(self._adapters_url.replace("/load_", "/unload_"), {"lora_name": old})

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        options: dict[str, Any] = {
            "max_tokens": params.max_tokens, "temperature": params.temperature, "top_p": params.top_p, "logprobs": 0,
        }  # fmt: skip
        extras = {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids), "top_k": params.top_k}
        options |= {name: value for name, value in extras.items() if value}
        if params.ignore_eos:
            options["ignore_eos"] = True
        if self._send_ids:
            options["return_token_ids"] = True
        seeds = [{} if params.seed is None else {"seed": params.seed + index} for index in range(len(prompts))]
        version = self.version
        answers = await asyncio.gather(*(self._post(p, {**options, **seed}) for p, seed in zip(prompts, seeds)))
        return [await self._generation(answer["choices"][0], version) for answer in answers]

    async def _generation(self, choice: Mapping[str, Any], version: int) -> Generation:
        text = choice["text"]
        ids = choice.get("token_ids")
        if ids is None:
            ids = (await self._codec.encode([text], add_special_tokens=False))[0]
        logprobs = [
            0.0 if each is None else each for each in (choice.get("logprobs") or {}).get("token_logprobs") or ()
        ]
        reason = "length" if choice.get("finish_reason") == "length" else "stop" if choice.get("stop_reason") else "eos"
        return Generation(text, np.asarray(ids, np.int64), np.asarray(logprobs, np.float32), reason, version)

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        if temperature != 1.0:
            raise ValueError("the completions protocol scores at temperature 1 only")
        options = {"max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0.0}
        answers = await asyncio.gather(*(self._post(row, options) for row in rows))
        scored = [self._logprobs(answer, "token_logprobs", len(row)) for answer, row in zip(answers, rows)]
        return [np.asarray(each[1 : len(row)], np.float32) for each, row in zip(scored, rows)]

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        options = {"max_tokens": 1, "logprobs": top_k, "temperature": 0.0}
        answers = await asyncio.gather(*(self._post(prompt, options) for prompt in prompts))
        result = []
        for answer in answers:
            top = self._logprobs(answer, "top_logprobs", 1)[0]
            tokens = sorted(top, key=top.__getitem__, reverse=True)[:top_k]
            encoded = await self._codec.encode(tokens, add_special_tokens=False)
            ids = np.array([row[0] if len(row) == 1 else -1 for row in encoded], np.int64)
            result.append(TopLogits(ids, np.array([top[token] for token in tokens], np.float32), tuple(tokens)))
        return result

    def _logprobs(self, answer: Any, name: str, count: int) -> Any:
        found = (answer["choices"][0].get("logprobs") or {}).get(name) or ()
        if len(found) < count:
            raise UnsupportedError(f"{self._url} returned {len(found)} of {count} {name}: it does not score prompts")
        return found

    async def _text(self, ids: list[int]) -> str:
        """Decode without the token that begins a text, because the endpoint's tokenizer adds it again."""
        start = (await self._codec.encode([""]))[0].tolist()
        return (await self._codec.decode([ids[len(start) :] if start == ids[: len(start)] else ids]))[0]

    async def _post(self, prompt: TokenRow, options: Mapping[str, Any]) -> Any:
        ids = np.asarray(prompt).tolist()
        written = ids if self._send_ids else await self._text(ids)
        async with self._turns:
            return json.loads(await self._call(self._url, {"model": self.model, "prompt": written, **options}))

    async def _call(self, url: str, body: Mapping[str, Any]) -> bytes:
        request = urllib.request.Request(url, json.dumps(body).encode(), self._headers)

        def call() -> bytes:
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                told = error.read(2000).decode(errors="replace")
                if error.code in (429, 502, 503, 504):
                    raise ConnectionError(f"{url} answered {error.code}: {told}") from None
                raise ValueError(f"{url} answered {error.code}: {told}") from None
            except urllib.error.URLError as error:
                raise ConnectionError(f"{url}: {error.reason}") from None

        return await run_in_daemon(call)
