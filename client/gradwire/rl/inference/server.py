"""The default backend: a run's own sampler on the server, with the weights at that point of the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.rl.generation import (
    Generation,
    SamplingParams,
    ServiceCodec,
    TextCodec,
    TokenizerCodec,
    TokenRow,
    TopLogits,
)
from gradwire.rl.inference.tools import ToolGeneration
from gradwire.rl.types import FloatArray, IntArray
from gradwire.sessions import RolloutSession, SessionOptions

HOT = 1024.0
"""A temperature that makes all tokens nearly equally likely; a power of two, so that division by it is exact."""
ROUNDS = 16


class RunInference(ToolGeneration):
    """Samples with the current weights of a run.

    A sample requested after ``optim_step`` sees that step without any transfer of weights; the server says of each how
    many steps the policy that wrote it had taken.

    Its log-probabilities are of the whole distribution at the sampling temperature, whatever ``top_p`` and ``top_k``
    cut.

    Args:
        run: A ``TrainingClient``.
        codec: Converts text to ids and back; :meth:`RunInference.of` makes one.
        vocab_size: The model's vocabulary size, for :meth:`get_logits`.
    """

    whole_logprobs = True

    def __init__(self, run: Any, codec: TextCodec, *, vocab_size: int | None = None) -> None:
        self.run = run
        self.version = 0
        self._codec = codec
        self._vocab_size = vocab_size

    @staticmethod
    async def of(service: Any, run: Any, tokenizer: Any = None, **template_kwargs: Any) -> RunInference:
        """Create the backend for a run of a service, with the user's own tokenizer or the server's.

        Args:
            template_kwargs: Further variables of the chat template, e.g. ``enable_thinking=False``.
        """
        info = await run.info()
        models = {model.name: model for model in await service.list_models()}
        model = models.get(info.base_model)
        codec: TextCodec = ServiceCodec(service, info.base_model, **template_kwargs)
        if tokenizer is not None:
            codec = TokenizerCodec(tokenizer, **template_kwargs)
        inference = RunInference(run, codec, vocab_size=model.vocab_size if model else None)
        inference.version = info.step
        return inference

    @property
    def codec(self) -> TextCodec:
        return self._codec

    def can_update(self, run: Any) -> bool:
        return run is self.run or getattr(run, "run_id", None) == getattr(self.run, "run_id", "")

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version

    async def rollout_session(self, **options: Unpack[SessionOptions]) -> RolloutSession:
        """Create a session in which an agent samples from the run's current weights."""
        session: RolloutSession = await self.run.rollout_session(**options)
        return session

    async def generate(self, prompts: Sequence[TokenRow], params: SamplingParams) -> list[Generation]:
        version = self.version
        result = await self.run.sample(
            [np.asarray(prompt, dtype=np.int64) for prompt in prompts],
            n=1,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop=params.stop,
            stop_token_ids=params.stop_token_ids,
            seed=params.seed,
            ignore_eos=params.ignore_eos,
        )
        samples = [row[0] for row in result.samples]
        unread = [sample.token_ids for sample in samples if sample.text is None]
        texts = iter(await self._codec.decode(unread) if unread else ())
        return [
            Generation(
                next(texts) if sample.text is None else sample.text,
                np.asarray(sample.token_ids, dtype=np.int64),
                np.asarray(sample.logprobs, dtype=np.float32),
                sample.stop_reason,
                version if result.step is None else result.step,
            )
            for sample in samples
        ]

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        ids = [np.asarray(row, dtype=np.int64) for row in rows]
        return list(await self.run.compute_logprobs(ids, temperature=temperature))

    async def get_logits(self, prompts: Sequence[TokenRow], *, top_k: int = 5) -> list[TopLogits]:
        """Return the most probable next tokens: one-token samples restricted to them find them, then they are
        scored."""
        rows = [np.asarray(prompt, dtype=np.int64) for prompt in prompts]
        likeliest = await self._likeliest(rows, min(top_k, self._vocab_size or top_k))
        continued = [np.append(row, token) for row, tokens in zip(rows, likeliest) for token in tokens]
        scores = iter([row[-1] for row in await self.get_logprobs(continued)])
        result = []
        for tokens in likeliest:
            logits = np.array([next(scores) for _ in tokens], np.float32)
            order = np.argsort(-logits, kind="stable")
            result.append(TopLogits(np.array(tokens, np.int64)[order], logits[order]))
        return result

    async def _likeliest(self, rows: Sequence[IntArray], top_k: int) -> list[list[int]]:
        """Find the ``top_k`` most probable next tokens of each row, in order of their ids."""
        likeliest: list[set[int]] = [set() for _ in rows]
        for seed in range(ROUNDS):
            left = [index for index, tokens in enumerate(likeliest) if len(tokens) < top_k]
            if not left:
                return [sorted(tokens) for tokens in likeliest]
            # 8 k samples miss one of k equally likely tokens about once in three thousand times.
            result = await self.run.sample(
                [rows[index] for index in left],
                n=8 * top_k, max_tokens=1, temperature=HOT, top_k=top_k, seed=seed, ignore_eos=True,
            )  # fmt: skip
            for index, samples in zip(left, result.samples):
                likeliest[index].update(int(sample.token_ids[0]) for sample in samples)
        raise UnsupportedError(f"the sampler found fewer than {top_k} tokens: is top_k larger than the vocabulary?")
