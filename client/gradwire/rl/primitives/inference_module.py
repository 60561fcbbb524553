"""The synchronous interface of an inference module: strings in, strings out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from gradwire.extras import require
from gradwire.rl.environments import Tool
from gradwire.rl.generation import Generation, SamplingParams, TopLogits
from gradwire.rl.inference import InferenceModule as AsyncInferenceModule
from gradwire.rl.inference import LocalInference, VLLMInference
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.primitives.background import wait_for
from gradwire.rl.primitives.hosting import ServedModel
from gradwire.rl.primitives.running import running_episode
from gradwire.rl.primitives.tools import tools_of
from gradwire.rl.prompts import TokenHistory
from gradwire.rl.types import FloatArray, IntArray, Prompt, ToolResult

VLLMBackend = VLLMInference
NO_TOKENS = np.zeros(0, np.int64)


class HuggingFaceBackend(LocalInference):
    """A ``transformers`` model in this process: supports every method, but is slower than the others.

    Args:
        model: A loaded model, or a name or path.
        tokenizer: Its tokenizer; loaded automatically for a named model.
        options: Options of ``AutoModelForCausalLM.from_pretrained``, for a named model.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        if isinstance(model, str):
            transformers = require("transformers", "server", "HuggingFaceBackend")
            tokenizer = tokenizer or transformers.AutoTokenizer.from_pretrained(model)
            model = transformers.AutoModelForCausalLM.from_pretrained(model, **options).eval()
        if tokenizer is None:
            raise ValueError("a loaded model needs its tokenizer: InferenceModule(model=, tokenizer=)")
        super().__init__(model, tokenizer)
        self.model = model


class GeneratedText(str):
    """A response: a string with its tokens.

    Attributes:
        prompt_ids, token_ids: ``[tokens]``, empty if the text was not sampled here.
        logprobs: ``[tokens]``, log-probability of each sampled token in nats.
        stop_reason: ``"eos"``, ``"stop"`` or ``"length"``.
    """

    prompt_ids: IntArray = NO_TOKENS
    token_ids: IntArray = NO_TOKENS
    logprobs: FloatArray = NO_TOKENS.astype(np.float32)
    stop_reason: str = ""

    @classmethod
    def of(cls, prompt_ids: IntArray, generation: Generation) -> Self:
        """Convert a generation of an inference module."""
        text = cls(generation.text)
        text.prompt_ids, text.token_ids = prompt_ids, generation.token_ids
        text.logprobs, text.stop_reason = generation.logprobs, generation.stop_reason
        return text


class InferenceModule:
    """Text generation for scripts without an event loop.

    ``InferenceModule(model=model, tokenizer=tokenizer)`` samples with a loaded ``transformers`` model,
    ``InferenceModule("name", backend=...)`` creates the backend: ``"hf"``, ``"vllm"`` or ``"server"`` (a run on a
    gradwire server; an embedded one if no ``address`` is given). ``model`` may also be a backend: any
    :class:`gradwire.rl.InferenceModule`.

    Args:
        model: A loaded model, a name or path, or a backend.
        tokenizer: Tokenizer of a loaded model.
        backend: Backend of a named model; ``"hf"`` by default.
        max_new_tokens: Maximum response length, also in rollouts.
        temperature: Sampling temperature, also in rollouts.
        options: Options of the backend.

    Attributes:
        backend: The underlying asynchronous module.
        served: The server and the run behind it, for ``backend="server"``.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        backend: str | None = None,
        max_new_tokens: int = 64,
        temperature: float = 1.0,
        **options: Any,
    ) -> None:
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.served: ServedModel | None = None
        if backend not in (None, "hf", "vllm", "server"):
            raise ValueError(f'backend must be "hf", "vllm" or "server", got {backend!r}')
        self.backend: AsyncInferenceModule
        if hasattr(model, "codec"):
            self.backend = model
        elif backend == "server":
            self.served = ServedModel(model, **options)
            self.backend = wait_for(self.served.inference(tokenizer))
        elif backend == "vllm":
            self.backend = VLLMBackend(model, **options)
        else:
            self.backend = HuggingFaceBackend(model, tokenizer, **options)

    @property
    def params(self) -> SamplingParams:
        """The default sampling parameters."""
        return SamplingParams(max_tokens=self.max_new_tokens, temperature=self.temperature)

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        max_new_tokens: int | None = None,
        *,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[GeneratedText]:
        """Generate one response per prompt, in order. A prompt is text, or messages for the chat template.

        Inside an environment's ``step`` of a rollout, the prompts are batched with those of the other
        episodes, and the rollout sets length, temperature and seed.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        episode = running_episode(self)
        if episode is not None:
            return [GeneratedText(episode.ask(prompt)) for prompt in prompts]
        params = SamplingParams(
            max_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            temperature=self.temperature if temperature is None else temperature,
            top_k=top_k, top_p=top_p, stop=tuple(stop), seed=seed,
        )  # fmt: skip
        return wait_for(self._generate(prompts, params))

    async def _generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[GeneratedText]:
        rows = [await self._ids(prompt) for prompt in prompts]
        made = await self.backend.generate(rows, params) if rows else []
        return [GeneratedText.of(row, generation) for row, generation in zip(rows, made)]

    def get_logprobs(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[FloatArray]:
        """Return ``[tokens]`` per response: the log-probability of each of its tokens after the prompt, in nats."""

        async def scored() -> list[FloatArray]:
            pairs = await self._pairs(prompts, responses)
            scores = await self.backend.get_logprobs([np.concatenate(pair) for pair in pairs])
            return [score[len(prompt) - 1 :] for (prompt, _), score in zip(pairs, scores)]

        return wait_for(scored())

    def get_logits(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, top_k: int | None = None
    ) -> list[FloatArray] | list[list[TopLogits]]:
        """Return the next-token distribution at each response token, as log-probabilities (logits up to a constant).

        Args:
            top_k: None: the whole vocabulary, ``[tokens, vocabulary]`` per response, indexed by id; only the Hugging
                Face backend supports it. A number: a list of :class:`~gradwire.rl.inference.TopLogits`, one per token.

        Raises:
            ValueError: ``top_k`` is None on a backend that returns only the most probable tokens.
        """
        dense = top_k is None
        if dense and not isinstance(self.backend, HuggingFaceBackend):
            raise ValueError(
                f"{type(self.backend).__name__} returns only the most probable tokens: set their number, e.g. top_k=20"
            )
        size = self.backend.model.config.vocab_size if isinstance(self.backend, HuggingFaceBackend) else 0
        found = wait_for(self._logits(prompts, responses, size if top_k is None else top_k))
        return [_by_ids(each, size) for each in found] if dense else found

    async def _logits(self, prompts: Sequence[Prompt], responses: Sequence[str], top_k: int) -> list[list[TopLogits]]:
        pairs = await self._pairs(prompts, responses)
        prefixes = [
            np.concatenate([prompt, response[:at]]) for prompt, response in pairs for at in range(len(response))
        ]
        logits = iter(await self.backend.get_logits(prefixes, top_k=top_k) if prefixes else ())
        return [[next(logits) for _ in response] for _, response in pairs]

    def batch_generate_with_tools(
        self,
        prompts: Sequence[str],
        available_tools: Sequence[str | Tool | Callable[..., Any]] = (),
        *,
        max_new_tokens: int | None = None,
        max_turns: int = 8,
    ) -> tuple[list[str], list[list[ToolResult]]]:
        """Let the model call tools until it answers, for all prompts at once.

        Args:
            available_tools: Names of registered tools (see :func:`register_tool`), functions or tools.
            max_turns: The model's limit of turns per prompt.

        Returns:
            The last response to each prompt, and the tool calls with their results.
        """
        params = SamplingParams(max_tokens=max_new_tokens or self.max_new_tokens, temperature=self.temperature)
        generation = ToolGeneration.batch_generate_with_tools(
            self.backend, list(prompts), tools_of(available_tools), params=params, max_turns=max_turns
        )
        trajectories = wait_for(generation)
        for each in trajectories:
            if each.error:
                raise RuntimeError(f"{each.task.prompt!r:.100}: {each.error}")
        calls = [[result for step in each.steps for result in step.tool_results] for each in trajectories]
        return [each.response for each in trajectories], calls

    async def _ids(self, prompt: Prompt) -> IntArray:
        return await TokenHistory(self.backend.codec).prompt_ids(prompt)

    async def _pairs(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[tuple[IntArray, IntArray]]:
        if len(prompts) != len(responses):
            raise ValueError(
                f"there are {len(prompts)} prompts but {len(responses)} responses; each prompt needs one response"
            )
        pairs = []
        for prompt, response in zip(prompts, responses):
            ids = response.token_ids if isinstance(response, GeneratedText) else NO_TOKENS
            if not len(ids):
                (ids,) = await self.backend.codec.encode([str(response)], add_special_tokens=False)
            pairs.append((await self._ids(prompt), ids))
        return pairs

    def close(self) -> None:
        """Stop the server of ``backend="server"``."""
        if self.served is not None:
            self.served.close()


def _by_ids(tokens: list[TopLogits], size: int) -> FloatArray:
    result = np.full((len(tokens), size), -np.inf, np.float32)
    for row, each in zip(result, tokens):
        row[each.token_ids] = each.logits
    return result
