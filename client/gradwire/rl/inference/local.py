"""A Hugging Face model in this process, and vLLM in this process. Both need their library, and import it here only."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.rl.extras import require
from gradwire.rl.generation import (
    Generation,
    SamplingParams,
    TextCodec,
    TokenizerCodec,
    TokenRow,
    TopLogits,
)
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.types import FloatArray


class LocalInference(ToolGeneration):
    """A ``transformers`` causal LM: to judge, to compare, to evaluate beside the run.

    Args:
        model: a loaded model.
        tokenizer: its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._torch = require("torch", "server", "LocalInference")
        self._model, self._tokenizer = model, tokenizer
        self._codec = TokenizerCodec(tokenizer)
        self._lock = asyncio.Lock()

    @staticmethod
    def from_pretrained(path: str, **options: Any) -> LocalInference:
        """Loads model and tokenizer; ``options`` go to ``AutoModelForCausalLM.from_pretrained``."""
        transformers = require("transformers", "server", "LocalInference")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()
        return LocalInference(model, transformers.AutoTokenizer.from_pretrained(path))

    @property
    def codec(self) -> TextCodec:
        return self._codec

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        async with self._lock:
            return await asyncio.to_thread(self._generate, prompts, params)

    def _padded(self, rows: Sequence[TokenRow], *, left: bool) -> tuple[Any, Any]:
        width = max(len(row) for row in rows)
        ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        for index, row in enumerate(rows):
            there = slice(width - len(row), width) if left else slice(0, len(row))
            ids[index, there], mask[index, there] = row, 1
        to = self._torch.from_numpy
        return to(ids).to(self._model.device), to(mask).to(self._model.device)

    def _generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        ids, mask = self._padded(prompts, left=True)
        ends = set(params.stop_token_ids)
        own = self._model.generation_config.eos_token_id
        if not params.ignore_eos:
            ends |= set(own if isinstance(own, list) else [own]) - {None}
        options: dict[str, Any] = {"do_sample": False}
        if params.temperature > 0:
            options = {
                "do_sample": True,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
            }
        if params.stop:
            options |= {"stop_strings": list(params.stop), "tokenizer": self._tokenizer}
        if params.seed is not None:
            self._torch.manual_seed(params.seed)
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=params.max_tokens, eos_token_id=sorted(ends) or None,
                pad_token_id=0, return_dict_in_generate=True, output_logits=True, **options,
            )  # fmt: skip
        sampled = out.sequences[:, ids.shape[1] :]
        logits = self._torch.stack(out.logits, dim=1).float()
        if params.temperature > 0:
            logits = logits / params.temperature
        logprobs = logits.log_softmax(-1).gather(-1, sampled[..., None])[..., 0]
        return [self._cut(row, lps, params, ends) for row, lps in zip(sampled.cpu().numpy(), logprobs.cpu().numpy())]

    def _cut(self, row: Any, logprobs: Any, params: SamplingParams, ends: set[int]) -> Generation:
        length, reason = len(row), "length"
        found = np.flatnonzero(np.isin(row, list(ends)))
        if len(found):
            length, reason = int(found[0]) + 1, "eos"
        text = self._tokenizer.decode(row[:length], skip_special_tokens=True)
        for size in range(1, length + 1) if params.stop else ():
            partial = self._tokenizer.decode(row[:size], skip_special_tokens=True)
            places = [at for string in params.stop if (at := partial.find(string)) >= 0]
            if places:
                text, length, reason = partial[: min(places)], size, "stop"
                break
        return Generation(text, row[:length].astype(np.int64), logprobs[:length].astype(np.float32), reason)

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        async with self._lock:
            scores = await asyncio.to_thread(self._scores, rows, temperature)
        return [
            np.take_along_axis(score[: len(row) - 1], np.asarray(row)[1:, None], axis=-1)[:, 0]
            for row, score in zip(rows, scores)
        ]

    def _scores(self, rows: Sequence[TokenRow], temperature: float) -> list[FloatArray]:
        ids, mask = self._padded(rows, left=False)
        with self._torch.inference_mode():
            logits = self._model(input_ids=ids, attention_mask=mask).logits.float() / temperature
            return list(logits.log_softmax(-1).cpu().numpy())

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        async with self._lock:
            scores = await asyncio.to_thread(self._scores, prompts, 1.0)
        last = [score[len(prompt) - 1] for prompt, score in zip(prompts, scores)]
        orders = [np.argsort(-row, kind="stable")[:top_k] for row in last]
        return [TopLogits(order, row[order]) for order, row in zip(orders, last)]


class VLLMInference(ToolGeneration):
    """A ``vllm.LLM`` in this process.

    Args:
        llm: the engine, or a model's name or path for it. Your own engine needs
            ``logprobs_mode="processed_logprobs"`` to train on samples of another temperature than 1.
    """

    def __init__(self, llm: Any) -> None:
        self._vllm = require("vllm", "vllm", "VLLMInference")
        self._llm = self._vllm.LLM(llm, logprobs_mode="processed_logprobs") if isinstance(llm, str) else llm
        self._codec = TokenizerCodec(self._llm.get_tokenizer())
        self._lock = asyncio.Lock()

    @property
    def codec(self) -> TextCodec:
        return self._codec

    async def _run(self, rows: Sequence[TokenRow], **options: Any) -> list[Any]:
        prompts = [{"prompt_token_ids": np.asarray(row).tolist()} for row in rows]
        async with self._lock:
            params = self._vllm.SamplingParams(**options)
            return list(await asyncio.to_thread(self._llm.generate, prompts, params, use_tqdm=False))

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        outputs = await self._run(
            prompts, max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p,
            top_k=params.top_k or -1, stop=list(params.stop), stop_token_ids=list(params.stop_token_ids),
            seed=params.seed, ignore_eos=params.ignore_eos, logprobs=0,
        )  # fmt: skip
        result = []
        for output in (each.outputs[0] for each in outputs):
            logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs)]
            reason = "length" if output.finish_reason == "length" else "stop" if output.stop_reason else "eos"
            ids = np.asarray(output.token_ids, np.int64)
            result.append(Generation(output.text, ids, np.asarray(logprobs, np.float32), reason))
        return result

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        if temperature != 1.0:
            raise ValueError("vLLM scores prompts at temperature 1 only")
        outputs = await self._run(rows, max_tokens=1, prompt_logprobs=0)
        return [
            np.array([out.prompt_logprobs[t][int(row[t])].logprob for t in range(1, len(row))], np.float32)
            for row, out in zip(rows, outputs)
        ]

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        outputs = await self._run(prompts, max_tokens=1, logprobs=top_k)
        result = []
        for output in outputs:
            best = sorted(output.outputs[0].logprobs[0].items(), key=lambda item: -item[1].logprob)[:top_k]
            ids, scores = [token for token, _ in best], [entry.logprob for _, entry in best]
            result.append(TopLogits(np.array(ids, np.int64), np.array(scores, np.float32)))
        return result
