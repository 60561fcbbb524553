"""Continuous batching on the engine's own weights: nothing is copied, and training continues between two tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from weakref import WeakKeyDictionary

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.batch import Batch
from gradwire_server.engine.sampling.draw import Uniforms
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.key_values import fits_slots
from gradwire_server.engine.sampling.sampler import SamplingParams


class LocalSampler:
    """Sample on the engine's own weights. Each policy has its own batch; the batches take turns.

    Args:
        cache_tokens: Maximum tokens of a batch's key-value cache, including room for tokens to come.
        logits_elements: Maximum entries of ``[R, V]`` at a time.
    """

    def __init__(self, cache_tokens: int = 1 << 16, logits_elements: int = 1 << 25) -> None:
        self._cache_tokens = cache_tokens
        self._logits_elements = logits_elements
        self._uniforms = Uniforms()
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._slots: WeakKeyDictionary[SplitModel, bool] = WeakKeyDictionary()

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        alone: bool = False,
    ) -> LocalJob:
        """See :class:`.sampler.Sampler`."""
        job = LocalJob(policy, prompts, params, tokenizer)
        if job.done:
            return job
        key = (policy.split_model, policy.adapter, job if alone else None)
        if key not in self._batches:
            rows = max(1, self._logits_elements // policy.facts.vocab_size)
            self._batches[key] = Batch(policy, self._fits_slots(policy), self._cache_tokens, rows, self._uniforms)
        self._batches[key].add(job)
        return job

    def cancel(self, job: LocalJob) -> None:
        """See :class:`.sampler.Sampler`."""
        for key, batch in list(self._batches.items()):
            if job in batch.jobs:
                batch.remove(job)
                if not batch.jobs:
                    del self._batches[key]

    def uses(self, policy: Policy) -> bool:
        """See :class:`.sampler.Sampler`."""
        return any(batch.policy is policy for batch in self._batches.values())

    def turn(self) -> Collection[LocalJob]:
        """See :class:`.sampler.Sampler`."""
        return next(iter(self._batches.values())).jobs if self._batches else ()

    def step(self) -> None:
        """See :class:`.sampler.Sampler`."""
        key = next(iter(self._batches))
        batch = self._batches.pop(key)
        batch.step()
        if batch.jobs:
            self._batches[key] = batch

    def _fits_slots(self, policy: Policy) -> bool:
        if policy.split_model not in self._slots:
            policy.activate()
            self._slots[policy.split_model] = policy.compute(lambda: fits_slots(policy))
        return self._slots[policy.split_model]
