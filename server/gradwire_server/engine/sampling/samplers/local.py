"""Continuous batching on the engine's own weights: nothing is copied, and training continues between two tokens.

Requests of one policy share a batch, and so do those of several policies on one copy of a model where that is asked
for: each token of a batch is computed with its own policy's adapter.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.packed_linear import PackedWeights
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.model.tokenizers import TextTokenizer
from gradwire_server.engine.model.vision.row_images import ImagePrompt
from gradwire_server.engine.sampling.batch import Batch
from gradwire_server.engine.sampling.division import Division
from gradwire_server.engine.sampling.drawing.draw import Uniforms
from gradwire_server.engine.sampling.drawing.grammars import Grammars
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.pace import Pace
from gradwire_server.engine.sampling.pages.key_values import KeyValues, Together
from gradwire_server.engine.sampling.pages.page_cache import PageCache
from gradwire_server.engine.sampling.pages.pages import Pages, paged_token_bytes
from gradwire_server.engine.sampling.pages.recomputed import Recomputed, keeps_cache
from gradwire_server.engine.sampling.samplers.sampler import PromptTokens, SamplingParams
from gradwire_server.engine.sampling.several_policies import can_share
from gradwire_server.engine.sampling.speculation import Mode, Speculation

_Version = tuple[tuple[int, int], ...]


class _Key(NamedTuple):
    """The properties that all requests of a batch share.

    Attributes:
        adapter: Name of the adapter, or "" for the model itself; None if each row has its own.
        alone: The only request of a batch that no other joins; else None.
    """

    split_model: SplitModel
    adapter: str | None
    alone: LocalJob | None


class LocalSampler:
    """Sample on the engine's own weights. Batches take turns.

    Args:
        agreement: This process's agreement with the others of the engine, which share the samples.
        cache_bytes: Maximum bytes of a batch's keys and values; one sample alone may have what it needs. What rows in
            progress leave of it is for known ones, for prompts that begin like earlier ones: the next turns of
            conversations, for example. They are forgotten when the weights change, and the least recently used when
            there is no room; those of another model first. A request that is computed alone neither keeps nor finds
            any.
        logits_elements: Maximum entries of ``[R, V]`` at a time.
        speculate: See :class:`.speculation.Speculation`; ``"auto"`` drafts nothing where models are divided among
            ranks.
        keeps: Whether keys and values are known to later requests.

    Attributes:
        prompt_tokens: See :class:`.sampler.Sampler`.
    """

    beside_batches = True

    def __init__(
        self,
        agreement: Agreement | None = None,
        *,
        cache_bytes: int = 1 << 30,
        logits_elements: int = 1 << 25,
        speculate: Mode = "auto",
        keeps: bool = True,
    ) -> None:
        self._agreement = agreement or Agreement()
        # In lock step, a trial whose memory runs out on one rank would leave the others waiting within a forward.
        untried = speculate == "auto" and self._agreement.lock_step
        self._speculation = Speculation("off" if untried else speculate)
        self._division = Division(self._agreement)
        self._cache_bytes = cache_bytes
        self._logits_elements = logits_elements
        self._uniforms = Uniforms()
        self._batches: dict[_Key, Batch] = {}
        self._keeps_known = keeps
        self._caches: WeakKeyDictionary[SplitModel, PageCache] = WeakKeyDictionary()
        self._names: WeakKeyDictionary[Policy, dict[_Version, bytes]] = WeakKeyDictionary()
        self._serial = itertools.count()
        self._gone: list[bytes] = []
        self._pace = Pace()
        self.prompt_tokens = PromptTokens()
        self._token_bytes: WeakKeyDictionary[SplitModel, int] = WeakKeyDictionary()
        self._keeps: WeakKeyDictionary[SplitModel, bool] = WeakKeyDictionary()
        self._grammars: Grammars[LocalJob] = Grammars(waits=self._agreement.ranks > 1)
        self._to_join: dict[LocalJob, _Key] = {}
        self._packed: WeakKeyDictionary[SplitModel, PackedWeights] = WeakKeyDictionary()

    def begin(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        tokenizer: TextTokenizer | None = None,
        *,
        owner: str = "",
        alone: bool = False,
        mixed: bool = False,
        salt: str | None = None,
    ) -> LocalJob:
        """See :class:`.sampler.Sampler`."""
        tree = b"" if alone else self._weights(policy) + _digest(owner if salt is None else salt)
        job = LocalJob(policy, prompts, params, tokenizer, owner, tree)
        if job.done:
            return job
        self._division.divide(job)
        split_model = policy.split_model
        if split_model.exact and not self._fits_pages(policy):
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {policy.facts.name!r} has a cache of its own when it samples, which a deterministic run does"
                " not know; leave that out",
                field="deterministic",
            )
        has_images = any(isinstance(prompt, ImagePrompt) for prompt in prompts)
        if has_images and not self._fits_pages(policy) and not self._keeps_cache(policy):
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {policy.facts.name!r} keeps no cache when it samples, and takes no images then; it can be"
                " trained with them",
                field="images",
            )
        mixed = mixed and not alone and not has_images and can_share(policy) and self._fits_pages(policy)
        key = _Key(split_model, None if mixed else policy.adapter or "", job if alone else None)
        if job.has_grammar:
            self._to_join[job] = key
            self._grammars.add(job)
        else:
            self._join(job, key)
        return job

    def _join(self, job: LocalJob, key: _Key) -> None:
        policy = job.policy
        while self._gone:
            weights = self._gone.pop()
            for cache in self._caches.values():
                cache.table.forget_weights(weights)
        if key not in self._batches:
            rows = max(1, self._logits_elements // policy.facts.vocab_size)
            tokens = self._cache_bytes // self._bytes_of_token(policy)
            values = self._values(policy, key, tokens)
            packed = self._packed_weights(key.split_model)
            pace = None if key.alone is not None else self._pace
            self._batches[key] = Batch(
                key.split_model, values, tokens, rows, self._uniforms, self._division, packed, self._speculation, pace
            )
        self._batches[key].add(job)

    def cancel(self, job: LocalJob) -> int:
        """See :class:`.sampler.Sampler`."""
        tokens = job.num_ended_tokens
        self._to_join.pop(job, None)
        self._grammars.remove(job)
        for key, batch in list(self._batches.items()):
            if job in batch.jobs:
                tokens += batch.remove(job)
                if not batch.jobs:
                    del self._batches[key]
                    self._end(key, batch)
        return tokens

    def uses(self, policy: Policy) -> bool:
        """See :class:`.sampler.Sampler`."""
        joined = (job for batch in self._batches.values() for job in batch.jobs)
        return any(job.policy is policy for job in (*joined, *self._to_join) if not job.done)

    def make_room(self) -> bool:
        """See :class:`.sampler.Sampler`: nothing, as caches are within their own share of the memory."""
        return False

    def turn(self) -> Collection[LocalJob]:
        """See :class:`.sampler.Sampler`."""
        jobs = next(iter(self._batches.values())).jobs if self._batches else ()
        return {*jobs, *self._grammars.compiling}

    def step(self) -> None:
        """See :class:`.sampler.Sampler`."""
        self._join_compiled()
        if not self._batches:
            self._grammars.wait()
            return
        key = next(iter(self._batches))
        batch = self._batches.pop(key)
        jobs = list(batch.jobs)
        batch.step()
        if batch.jobs:
            self._batches[key] = batch
        else:
            self._end(key, batch)
        for job in (job for job in jobs if job.done):
            self.prompt_tokens.count(job.prompts, job.num_cached_tokens)

    def close(self) -> None:
        """See :class:`.sampler.Sampler`: nothing, as all of it is this process's own."""

    def _join_compiled(self) -> None:
        while (job := self._grammars.take()) is not None:
            key = self._to_join.pop(job, None)
            if key is None:  # it was cancelled
                continue
            try:
                with self._agreement.together("a grammar"):  # which may take one rank too long, and not another
                    if job.error is not None:
                        raise job.error
                self._join(job, key)
            except Exception as error:  # as of begin(); whoever waits for the samples receives it
                job.error = error

    def _fits_pages(self, policy: Policy) -> bool:
        split_model = policy.split_model
        if split_model.vision is not None and split_model.vision.bidirectional:
            return False
        if split_model not in self._token_bytes:
            policy.activate()
            self._token_bytes[split_model] = policy.compute(lambda: paged_token_bytes(policy, self._agreement))
        return self._token_bytes[split_model] > 0

    def _bytes_of_token(self, policy: Policy) -> int:
        """Bytes of a token's keys and values; of a model with a cache of its own, what plain attention would take."""
        if self._fits_pages(policy):
            return self._token_bytes[policy.split_model]
        facts = policy.facts
        return 2 * facts.num_layers * facts.hidden_size * policy.split_model.dtype.itemsize

    def _keeps_cache(self, policy: Policy) -> bool:
        if policy.split_model not in self._keeps:
            self._keeps[policy.split_model] = policy.compute(lambda: keeps_cache(policy, self._agreement))
        return self._keeps[policy.split_model]

    def _values(self, policy: Policy, key: _Key, tokens: int) -> Callable[[], KeyValues]:
        """Return the maker of a batch's keys and values, of so many tokens."""
        if not self._fits_pages(policy):
            return Together if self._keeps_cache(policy) else Recomputed
        if key.alone is not None or not self._keeps_known:
            return lambda: Pages(PageCache(most=tokens))
        caches = self._caches
        if key.split_model not in caches:
            caches[key.split_model] = PageCache(tokens, most=tokens)
        cache = caches[key.split_model]
        caches[key.split_model] = caches.pop(key.split_model)  # to the end of the order
        return lambda: Pages(cache)

    def _packed_weights(self, split_model: SplitModel) -> PackedWeights | None:
        """The copies of a model's weights that its batches share: those of a frozen model for as long as it is there,
        others for as long as there are batches."""
        if not split_model.packs:
            return None
        return self._packed.setdefault(split_model, PackedWeights(split_model.model))

    def _end(self, key: _Key, batch: Batch) -> None:
        """Give back what a batch whose requests are done does not need, and the pages of other models beyond the
        limit."""
        packed = self._packed.get(key.split_model)
        shared = any(other.split_model is key.split_model for other in self._batches)
        if packed is not None and not packed.frozen and not shared:
            del self._packed[key.split_model]
        batch.values.end()
        self._pace.forget(batch)
        for cache in list(self._caches.values())[:-1]:
            if sum(each.nbytes for each in self._caches.values()) > self._cache_bytes:
                cache.clear()

    def _weights(self, policy: Policy) -> bytes:
        """A name of a policy's weights as they are now, which no other weights have."""
        if policy not in self._names:
            names: dict[_Version, bytes] = {}
            self._names[policy] = names
            weakref.finalize(policy, _move, names, self._gone)
        names = self._names[policy]
        if policy.version not in names:
            _move(names, self._gone)
            names[policy.version] = _digest(str(next(self._serial)))
        return names[policy.version]


def _move(names: dict[_Version, bytes], gone: list[bytes]) -> None:
    gone += names.values()
    names.clear()


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=16).digest()
