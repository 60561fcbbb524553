"""A Hugging Face model in this process. Imports torch and transformers when an instance is made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.extras import require
from gradwire.rl.generation import (
    Generation,
    SamplingParams,
    TextCodec,
    TokenizerCodec,
    TokenRow,
    TopLogits,
)
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.inference.weights import ADAPTER_FILE, WeightFolder, is_adapter
from gradwire.rl.types import FloatArray

CONTEXT_TOKENS = 16
"""Tokens of a prompt with which those after it are decoded: a decoder may drop the blank that a text begins with."""
MISFIT = "the run's weights do not fit the model of LocalInference, which must be the run's base model"


class LocalInference(WeightFolder, ToolGeneration):
    """A ``transformers`` causal LM in this process.

    A LoRA run's adapter is loaded onto the model with ``peft``; the weights of a fully trained run replace the
    model's own. The model must be the run's base model.

    Args:
        model: A loaded model.
        tokenizer: Its tokenizer.
    """

    whole_logprobs = True

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._torch = require("torch", "server", "LocalInference")
        self._model, self._tokenizer = model, tokenizer
        self._codec = TokenizerCodec(tokenizer)
        self._lock = asyncio.Lock()

    @staticmethod
    def from_pretrained(path: str, **options: Any) -> LocalInference:
        """Load model and tokenizer; ``options`` go to ``AutoModelForCausalLM.from_pretrained``."""
        transformers = require("transformers", "server", "LocalInference")
        model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()
        return LocalInference(model, transformers.AutoTokenizer.from_pretrained(path))

    @property
    def codec(self) -> TextCodec:
        return self._codec

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        async with self._lock:
            version = self.version
            made = await asyncio.to_thread(self._generate, prompts, params)
        return [replace(each, version=version) for each in made]

    async def load_weights(self, folder: Path, version: int) -> None:
        async with self._lock:
            await asyncio.to_thread(self._load, folder)
            self.version = version

    def _load(self, folder: Path) -> None:
        try:
            wrong = self._load_adapter(folder) if is_adapter(folder) else self._load_model(folder)
        except (ValueError, RuntimeError, KeyError) as error:
            raise ValueError(f"{MISFIT}: {error}") from error
        if wrong:
            raise ValueError(f"{MISFIT}: {len(wrong)} tensors are on one side only, such as {min(wrong)}")

    def _load_adapter(self, folder: Path) -> set[str]:
        peft = require("peft", "server", "LocalInference of a LoRA run")
        if not isinstance(self._model, peft.PeftModel):
            self._model = peft.PeftModel.from_pretrained(self._model, folder).eval()
            return set()
        load_file = require("safetensors.torch", "server", "LocalInference").load_file
        return set(peft.set_peft_model_state_dict(self._model, load_file(folder / ADAPTER_FILE)).unexpected_keys)

    def _load_model(self, folder: Path) -> set[str]:
        load_file = require("safetensors.torch", "server", "LocalInference").load_file
        state = {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}
        found = self._model.load_state_dict(state, strict=False)
        self._model.tie_weights()
        return {*found.unexpected_keys, *found.missing_keys} - set(self._model._tied_weights_keys or ())

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
        rows = zip(prompts, sampled.cpu().numpy(), logprobs.cpu().numpy())
        return [self._cut(prompt, row, lps, params, ends) for prompt, row, lps in rows]

    def _cut(self, prompt: TokenRow, row: Any, logprobs: Any, params: SamplingParams, ends: set[int]) -> Generation:
        before = [int(token) for token in prompt[-CONTEXT_TOKENS:]]

        def text_of(size: int, *, special: bool = False) -> str:
            decode = self._tokenizer.decode
            whole = decode([*before, *row[:size]], skip_special_tokens=not special)
            return str(whole[len(decode(before, skip_special_tokens=not special)) :])

        length, reason = len(row), "length"
        found = np.flatnonzero(np.isin(row, list(ends)))
        if len(found):
            length, reason = int(found[0]) + 1, "eos"
        text = text_of(length)
        for size in range(1, length + 1) if params.stop else ():
            partial = text_of(size, special=True)  # a stop string may have special tokens
            places = [at for string in params.stop if (at := partial.find(string)) >= 0]
            if places:
                text, length, reason = partial[: min(places)], size, "stop"
                for special in self._tokenizer.all_special_tokens:
                    text = text.replace(special, "")
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
