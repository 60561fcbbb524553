"""Continuous batching on the engine's own weights: nothing is copied, and training continues between two tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from weakref import WeakKeyDictionary

from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.sampling.batch import Batch
from gradwire_server.engine.sampling.draw import Uniforms
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.key_values import KeyValues, Together
from gradwire_server.engine.sampling.pages import Pages, fits_pages
from gradwire_server.engine.sampling.sampler import SamplingParams

KEPT_POLICIES = 4
"""Policies whose keys and values are kept at a time."""


class LocalSampler:
    """Sample on the engine's own weights. Each policy has its own batch; the batches take turns.

    Args:
        cache_tokens: Maximum tokens of a batch's key-value cache, including room for tokens to come.
        logits_elements: Maximum entries of ``[R, V]`` at a time.
        kept_bytes: Maximum bytes of keys and values to keep of a policy whose requests are done, for prompts that begin
            like theirs: the next turns of conversations. They are dropped when the weights change. A request that is
            computed alone neither keeps nor finds any.
    """

    def __init__(
        self, cache_tokens: int = 1 << 16, logits_elements: int = 1 << 25, kept_bytes: int = 128 << 20
    ) -> None:
        self._cache_tokens = cache_tokens
        self._logits_elements = logits_elements
        self._uniforms = Uniforms()
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._kept_bytes = kept_bytes
        self._kept: WeakKeyDictionary[Policy, tuple[tuple[tuple[int, int], ...], Pages]] = WeakKeyDictionary()
        self._fits: WeakKeyDictionary[SplitModel, bool] = WeakKeyDictionary()

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
            values = self._values(policy, alone=alone)
            self._batches[key] = Batch(policy, values, self._cache_tokens, rows, self._uniforms)
        self._batches[key].add(job)
        return job

    def cancel(self, job: LocalJob) -> None:
        """See :class:`.sampler.Sampler`."""
        for key, batch in list(self._batches.items()):
            if job in batch.jobs:
                batch.remove(job)
                if not batch.jobs:
                    del self._batches[key]
                    self._keep(key, batch)

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
        else:
            self._keep(key, batch)

    def _values(self, policy: Policy, *, alone: bool) -> Callable[[], KeyValues]:
        """What makes the keys and values of a batch: at first those that were kept of the same weights."""
        if policy.split_model not in self._fits:
            policy.activate()
            self._fits[policy.split_model] = policy.compute(lambda: fits_pages(policy))
        if not self._fits[policy.split_model]:
            return Together
        if alone:
            return Pages
        version, kept = self._kept.pop(policy, (None, None))
        found = [kept] if kept is not None and version == _version(policy) else []
        return lambda: found.pop() if found else Pages(self._kept_bytes)

    def _keep(self, key: tuple[object, ...], batch: Batch) -> None:
        """Keep the known pages of a batch whose requests are done."""
        alone = key[-1] is not None
        if not alone and isinstance(batch.values, Pages):
            batch.values.end()
            while len(self._kept) >= KEPT_POLICIES:
                self._kept.pop(next(iter(self._kept)))
            self._kept[batch.policy] = _version(batch.policy), batch.values


def _version(policy: Policy) -> tuple[tuple[int, int], ...]:
    """Numbers that change whenever a weight is replaced or changed in place, for each weight that may change."""
    return tuple((id(tensor), tensor._version) for tensor in policy.masters().values())
