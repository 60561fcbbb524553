"""The default backend: a run's own sampler on the server, with the weights of program order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradwire.errors import UnsupportedError
from gradwire.rl.inference.protocol import (
    Generation,
    SamplingParams,
    ServiceCodec,
    TextCodec,
    TokenizerCodec,
    TokenRow,
    ToolGeneration,
    TopLogits,
)
from gradwire.rl.types import FloatArray

MAX_CANDIDATES = 4096


class RunInference(ToolGeneration):
    """Samples with the current weights of a run.

    A sample that is asked for after ``optim_step`` sees that step; ``version`` counts the steps as their submitter
    tells (:meth:`stepped`), so that each response knows the policy that wrote it.

    Args:
        run: a ``TrainingClient``.
        codec: text to ids and back; :meth:`RunInference.of` makes one.
        vocab_size: of the model, for :meth:`get_logits`.
    """

    def __init__(self, run: Any, codec: TextCodec, *, vocab_size: int | None = None) -> None:
        self.run = run
        self.version = 0
        self._codec = codec
        self._vocab_size = vocab_size

    @staticmethod
    async def of(service: Any, run: Any, tokenizer: Any = None) -> RunInference:
        """For a run of a service; with the user's own tokenizer, or the server's."""
        info = await run.info()
        models = {model.name: model for model in await service.list_models()}
        model = models.get(info.base_model)
        codec = TokenizerCodec(tokenizer) if tokenizer is not None else ServiceCodec(service, info.base_model)
        inference = RunInference(run, codec, vocab_size=model.vocab_size if model else None)
        inference.version = info.step
        return inference

    @property
    def codec(self) -> TextCodec:
        return self._codec

    def stepped(self) -> None:
        """An ``optim_step`` was submitted: later samples are a newer policy's."""
        self.version += 1

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
                version,
            )
            for sample in samples
        ]

    async def get_logprobs(self, rows: Sequence[TokenRow], *, temperature: float = 1.0) -> list[FloatArray]:
        ids = [np.asarray(row, dtype=np.int64) for row in rows]
        return list(await self.run.compute_logprobs(ids, temperature=temperature))

    async def get_logits(
        self, prompts: Sequence[TokenRow], *, top_k: int = 5, candidates: Sequence[int] | None = None
    ) -> list[TopLogits]:
        """As in the protocol; the server scores given tokens, so each candidate is one scored row.

        Args:
            candidates: ids to choose from; by default the whole vocabulary, which may be no larger than 4096.
        """
        if candidates is None:
            if self._vocab_size is None or self._vocab_size > MAX_CANDIDATES:
                raise UnsupportedError(
                    f"get_logits scores each candidate, and the vocabulary ({self._vocab_size or 'unknown'}) exceeds "
                    f"{MAX_CANDIDATES}: give candidates=[...]",
                    field="candidates",
                )
            candidates = range(self._vocab_size)
        ids = np.asarray(list(candidates), dtype=np.int64)
        rows = [np.append(np.asarray(prompt, dtype=np.int64), token) for prompt in prompts for token in ids]
        scores = np.array([row[-1] for row in await self.get_logprobs(rows)], np.float32).reshape(
            len(prompts), len(ids)
        )
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        return [TopLogits(ids[order], row[order]) for order, row in zip(best, scores)]
