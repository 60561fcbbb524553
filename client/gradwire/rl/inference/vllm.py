"""vLLM in this process. Imports vllm when an instance is made."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.extras import require
from gradwire.rl.generation import Generation, SamplingParams, TextCodec, TokenizerCodec, TokenRow, TopLogits
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.inference.weights import WeightFolder, has_tied_head, is_adapter
from gradwire.rl.types import FloatArray

_ADAPTER_NUMBERS = itertools.count(1)
"""vLLM keeps an adapter whose number it knows, and its prompt cache with it: each version of any run has its own."""


class VLLMInference(WeightFolder, ToolGeneration):
    """A ``vllm.LLM`` in this process.

    The adapter of a LoRA run is loaded beside the base model, the weights of a fully trained run replace the model's.

    Args:
        llm: The engine, or the name or path of a model for it: the run's base model. Your own engine needs
            ``logprobs_mode="processed_logprobs"`` to train on samples of another temperature than 1, and
            ``enable_lora=True`` with a ``max_lora_rank`` for LoRA runs.
        options: Options of ``vllm.LLM`` if a name is given. LoRA is enabled up to rank 64 by default. With
            ``enable_sleep_mode=True`` it sleeps while the policy trains, for one GPU.
    """

    def __init__(self, llm: Any, **options: Any) -> None:
        self._vllm = require("vllm", "vllm", "VLLMInference")
        if isinstance(llm, str):
            lora = {"enable_lora": True, "max_lora_rank": 64} if options.get("enable_lora", True) else {}
            llm = self._vllm.LLM(llm, **{"logprobs_mode": "processed_logprobs", **lora, **options})
        self._llm = llm
        self._codec = TokenizerCodec(self._llm.get_tokenizer())
        self._lock = asyncio.Lock()
        self._load: Callable[[Path], None] | None = None
        self._adapter: Any = None
        self._asleep = False

    @property
    def codec(self) -> TextCodec:
        return self._codec

    @property
    def whole_logprobs(self) -> bool:
        """Whether log-probabilities are of the whole distribution where ``top_p`` or ``top_k`` cut it."""
        return str(self._llm.llm_engine.vllm_config.model_config.logprobs_mode).startswith("raw")

    @property
    def sleeps(self) -> bool:
        """Whether it sleeps while the policy trains."""
        return bool(self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode)

    async def sleep(self) -> None:
        """Give the GPU's memory to the trainer, with the weights in host memory; requests wait until it wakes."""
        await self._lock.acquire()
        try:
            await asyncio.to_thread(self._llm.sleep, level=1)
            self._asleep = True
        finally:
            if not self._asleep:
                self._lock.release()

    async def wake(self) -> None:
        """Undo :meth:`sleep`; nothing if it is awake."""
        if self._asleep:
            await asyncio.to_thread(self._llm.wake_up)
            self._asleep = False
            self._lock.release()

    @property
    def _on_cpu(self) -> bool:
        return bool(require("vllm.platforms", "vllm", "VLLMInference").current_platform.is_cpu())

    async def load_weights(self, folder: Path, version: int) -> None:
        load = self._load_adapter if is_adapter(folder) else self._load_model
        await self.wake()
        async with self._lock:
            if self._load not in (None, load):
                raise ValueError(
                    "the engine has received weights of a LoRA run and of a fully trained run: use one engine for each"
                )
            self._load = load
            await asyncio.to_thread(load, folder)
            self.version = version

    def _load_adapter(self, folder: Path) -> None:
        number, engine = next(_ADAPTER_NUMBERS), self._llm.llm_engine
        adapter = require("vllm.lora.request", "vllm", "VLLMInference").LoRARequest(f"v{number}", number, str(folder))
        engine.add_lora(adapter)
        if self._adapter is not None:
            engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = adapter

    def _load_model(self, folder: Path) -> None:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        if self._on_cpu and has_tied_head(folder):
            self._pack_output_head()
        self._llm.reset_prefix_cache()

    def _pack_output_head(self) -> None:
        # On a CPU vLLM multiplies with a packed copy of the output head. reload_weights packs it again only if the
        # head has weights of its own.
        try:
            self._llm.apply_model(_pack_output_heads)
        except Exception as error:
            raise UnsupportedError(
                "this vLLM engine runs in another process, where the output head of a model that shares it with the "
                "embedding cannot be updated on a CPU. Set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the engine is made, "
                f"or train with lora={{...}}: {error}"
            ) from error

    async def _run(self, rows: Sequence[TokenRow], **options: Any) -> tuple[list[Any], int]:
        """Return vLLM's outputs, and the version of the weights that produced them."""
        prompts = [{"prompt_token_ids": np.asarray(row).tolist()} for row in rows]
        async with self._lock:
            params, adapter, version = self._vllm.SamplingParams(**options), self._adapter, self.version
            made = await asyncio.to_thread(self._llm.generate, prompts, params, use_tqdm=False, lora_request=adapter)
        return list(made), version

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        outputs, version = await self._run(
            prompts, max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p,
            top_k=params.top_k or -1, stop=list(params.stop), stop_token_ids=list(params.stop_token_ids),
            seed=params.seed, ignore_eos=params.ignore_eos, logprobs=0,
        )  # fmt: skip
        result = []
        for output in (each.outputs[0] for each in outputs):
            logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs)]
            reason = "length" if output.finish_reason == "length" else "stop" if output.stop_reason else "eos"
            ids = np.asarray(output.token_ids, np.int64)
            result.append(Generation(output.text, ids, np.asarray(logprobs, np.float32), reason, version))
        return result

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        if temperature != 1.0:
            raise ValueError("vLLM scores prompts at temperature 1 only")
        if self._on_cpu and self._llm.llm_engine.vllm_config.lora_config is not None:
            # Its kernels for adapters expect one token per row here: an error would leave the engine unusable.
            raise UnsupportedError(
                "vLLM on a CPU cannot score prompts with LoRA enabled: score with the run, or make the engine with "
                "enable_lora=False"
            )
        outputs, _ = await self._run(rows, max_tokens=1, prompt_logprobs=0)
        return [
            np.array([out.prompt_logprobs[t][int(row[t])].logprob for t in range(1, len(row))], np.float32)
            for row, out in zip(rows, outputs)
        ]

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        outputs, _ = await self._run(prompts, max_tokens=1, logprobs=top_k)
        result = []
        for output in outputs:
            best = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: -item[1].logprob)[:top_k]
            ids, scores = [token for token, _ in best], [entry.logprob for _, entry in best]
            result.append(TopLogits(np.array(ids, np.int64), np.array(scores, np.float32)))
        return result


def _pack_output_heads(model: Any) -> None:
    layers = require("vllm.model_executor.layers.vocab_parallel_embedding", "vllm", "VLLMInference")
    for layer in model.modules():
        if isinstance(layer, layers.ParallelLMHead):
            layer.quant_method.process_weights_after_loading(layer)
