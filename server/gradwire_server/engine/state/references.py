"""Frozen models that runs are compared with, scored or sampled by: name resolution and caching.

A name is ``"base"`` (the run's base model without adapter), ``"ema"`` (the run's moving average), a model of the
server, or a checkpoint ``"RUN_ID/NAME"``. Loaded models are kept in an LRU cache bounded in bytes; checkpoints of
adapters share their base's weights and need few bytes. Log-probabilities are cached too
(:mod:`gradwire_server.engine.scoring.logprob_cache`).
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from gradwire_losses import host
from gradwire_losses.batch import Batch, segment_ids
from gradwire_proto.v1 import engine_pb2, training_pb2
from safetensors.torch import load_file
from torch import Tensor

from gradwire_server.checkpoint_files import Manifest
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.heads import Head, make_head
from gradwire_server.engine.model.loading.offload import num_layer_bytes
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.loading.quantization import QUANTIZATIONS, Quantization
from gradwire_server.engine.model.placement import assign
from gradwire_server.engine.model.policy import HEAD_PREFIX, LoraPolicy, Policy
from gradwire_server.engine.model.policy_from_config import is_exact
from gradwire_server.engine.model.split_model import SplitModel
from gradwire_server.engine.scoring.forward import Scoring, score_batch
from gradwire_server.engine.scoring.logprob_cache import LogprobCache, keys_in_batch, sequence_keys
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.sizing.parts import weight_bytes
from gradwire_server.engine.state.checkpoints import CheckpointStore
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.state.snapshot import WEIGHTS

logger = logging.getLogger(__name__)

OFFLOADED: Literal["offload"] = "offload"
"""A copy with its layers in host memory."""
Held = Quantization | Literal["offload"]
Form = torch.dtype | Held | None
"""How a copy of a model is held: a dtype, a quantization, offloaded, or as the server holds base models."""


@dataclass(frozen=True)
class Reference:
    """A frozen policy and its identity; references with equal identities give equal log-probabilities."""

    identity: str
    policy: Policy


@dataclass
class _Loaded:
    reference: Reference
    own_bytes: int
    shared_model: str = ""
    exact: bool = False
    host_bytes: int = 0
    run_id: str = ""


class References:
    """Resolve names of reference models and cache the models.

    Args:
        cache_bytes: Maximum bytes of cached weights beside those that runs hold; the reference in use is always kept.
        logprob_bytes: Maximum bytes of cached log-probabilities.
        in_use: Whether a policy is being sampled from; such a policy is not evicted.
        agreement: This process's agreement with the others of the engine; by default it is alone.

    Attributes:
        same_bits: Whether a batch's log-probabilities are bit-identical whatever is cached, as a replay of the journal
            requires, which starts with an empty cache; true on a CPU.
        computed_sequences: Number of sequences computed with a reference model.
        found_sequences: Number of sequences whose log-probabilities were cached.
        used_models: Number of uses of a model or checkpoint.
        loaded_models: Number of uses that had to load it.
    """

    def __init__(
        self,
        pool: ModelPool,
        store: CheckpointStore,
        *,
        cache_bytes: int = 8 << 30,
        logprob_bytes: int = 256 << 20,
        in_use: Callable[[Policy], bool] = lambda policy: False,
        agreement: Agreement | None = None,
    ) -> None:
        self._pool = pool
        self._store = store
        self._cache_bytes = cache_bytes
        self._in_use, self._agreement = in_use, agreement
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        self._logprobs = LogprobCache(logprob_bytes)
        self.same_bits = pool.device.type == "cpu"
        self._new: tuple[list[bytes], list[int], Tensor] | None = None
        self._adapter_names = (f"reference-{number}" for number in itertools.count())
        self.computed_sequences = self.found_sequences = 0
        self.used_models = self.loaded_models = 0

    @property
    def loaded(self) -> list[str]:
        """Identities of the cached references, least recently used first."""
        return list(self._loaded)

    @property
    def held_bytes(self) -> int:
        """Bytes on the device of cached weights that are not a shared base model's."""
        held = [entry for entry in list(self._loaded.values()) if not entry.shared_model]
        return sum(entry.own_bytes - entry.host_bytes for entry in held)

    @property
    def cached_bytes(self) -> int:
        """Bytes of cached log-probabilities."""
        return self._logprobs.held_bytes

    def resolve(
        self,
        name: str,
        run: EngineRun | None = None,
        *,
        field: str = "reference_model",
        dtype: str | None = None,
        held: Held | None = None,
    ) -> Reference:
        """Resolve a reference by name.

        Args:
            run: The run that "base" and "ema" refer to; without it they are unknown.
            field: Argument to name in errors.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None for the server's.
            held: Quantization of its linear layers, or :data:`OFFLOADED`; None as the server holds base models.

        Raises:
            OperationError: UNKNOWN_MODEL, UNKNOWN_CHECKPOINT, CHECKPOINT_CORRUPT, UNSUPPORTED without bitsandbytes, or
                INVALID_ARGUMENT for a dtype, quantization or checkpoint to be offloaded.
        """
        other = self._form(dtype, held)
        if run is not None and name == "base":
            return self._model(run.config.base_model, other, exact=run.policy.split_model.exact)
        if run is not None and name == "ema":
            if other is not None:
                raise OperationError(
                    training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    f'"ema" follows the run\'s weights, on their device and of their dtype, not {held or dtype}',
                    field="reference_model" if held else "reference_dtype",
                    rule='not with "ema"',
                )
            return Reference(f"ema {run.run_id} {run.ema_version}", run.ensure_ema())
        if (base := self._pool.known(name)) is not None:
            return self._model(base, other)
        if name.startswith("run-") or (name.count("/") == 1 and self._store.has(name)):
            try:
                return self._store.read(name, lambda manifest: self._checkpoint(manifest, other))
            except OperationError as error:
                error.field = field
                raise
        kinds = '"base", "ema", ' if run is not None else ""
        raise OperationError(
            training_pb2.ERROR_CODE_UNKNOWN_MODEL,
            f"there is no model {name!r} here; give {kinds}a checkpoint 'RUN_ID/NAME', or one of: "
            f"{', '.join(self._pool.names) or 'none'}",
            field=field,
            rule="a model reference",
        )

    def shared(self, weights: engine_pb2.EngineSharedWeights) -> Reference:
        """The weights of a run that another engine holds, from the file that it has written of them.

        New weights of a run go into the place of its former ones, if nobody samples from these any more.

        Raises:
            OSError, SafetensorError, StoreError: The file cannot be read.
        """
        identity, config = f"shared {weights.file}", weights.config
        if identity in self._loaded:
            return self._use(identity)
        tensors = self._store.passed(weights.file) if weights.in_store else load_file(weights.file)
        former = [name for name, entry in self._loaded.items() if entry.run_id == weights.run_id]
        idle = [name for name in former if not self._in_use(self._loaded[name].reference.policy)]
        if idle:
            entry = self._loaded.pop(idle[0])
            for name in idle[1:]:
                self._loaded.pop(name).reference.policy.close()
            policy = entry.reference.policy
            if isinstance(policy, LoraPolicy):
                policy.load_state_tensors(tensors)
            else:
                policy = self._full(policy.split_model, None, tensors)  # another, which has kept nothing of its samples
            self._loaded[identity] = replace(entry, reference=Reference(identity, policy))
        elif config.HasField("lora"):
            split_model = self._pool.get(config.base_model, exact=is_exact(self._pool, config))
            policy = self._adapter(split_model, config.lora, None, tensors)
            size = sum(parameter.nbytes for parameter in policy.trainable_parameters().values())
            self._loaded[identity] = _Loaded(Reference(identity, policy), size, run_id=weights.run_id)
        else:
            size = self._model_bytes(config.base_model, self._pool.dtype)
            self._make_room(size)
            exact = is_exact(self._pool, config)
            policy = self._full(self._frozen_copy(config.base_model, self._pool.dtype, exact), None, tensors)
            self._loaded[identity] = _Loaded(Reference(identity, policy), size, run_id=weights.run_id)
        self.loaded_models += 1
        return self._use(identity)

    def _form(self, dtype: str | None, held: Held | None) -> Form:
        """How a copy is to be held; None if the server's own will do."""
        if held is not None and dtype is not None:
            setting = OFFLOADED if held == OFFLOADED else "quantize"
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"reference_dtype is {dtype}, and a reference with {setting!r} has the server's dtype: leave out one of"
                " them",
                field="reference_dtype",
                rule=f"not with {setting}",
            )
        if held is not None:
            return None if held == self._pool.quantize else held
        wanted: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        return None if wanted is self._pool.dtype and self._pool.quantize is None else wanted

    def logprobs(self, reference: Reference, batch: Batch, temperature: float, budget: Budget) -> Tensor:
        """Log-probabilities ``[T]`` of the batch's scored tokens, float32, computed only where not cached.

        On a GPU, a result without cached sequences stays there and is not waited for; any other result is on the CPU.

        Raises:
            OperationError: INVALID_ARGUMENT if the reference's vocabulary or context is too small for the batch.
        """
        _check_fits(reference, batch)
        self._keep_new()
        keys = sequence_keys(reference.identity, temperature, batch)
        if self.same_bits:
            keys = keys_in_batch(keys, batch, budget)
        of_rows = [self._logprobs.get(key) for key in keys]
        missing = [index for index, known in enumerate(of_rows) if known is None]
        if missing and self.same_bits:
            missing = list(range(len(keys)))
        self.computed_sequences += len(missing)
        self.found_sequences += len(keys) - len(missing)
        if missing:
            wanted = _only(batch, torch.tensor(missing))
            scoring = Scoring(reference.policy, wanted, {"logprobs"}, temperature, None, budget)
            scores = score_batch(scoring, self._agreement)
            self._new = [keys[index] for index in missing], wanted.row_lengths.tolist(), scores["logprobs"]
            if len(missing) == len(keys):
                return scores["logprobs"]
            for index, values in zip(missing, self._keep_new(), strict=True):
                of_rows[index] = values
        return torch.cat([values for values in of_rows if values is not None])

    def _keep_new(self) -> Sequence[Tensor]:
        """Cache the previous result by sequence; deferred until now, because it requires waiting for the device."""
        if self._new is None:
            return ()
        keys, lengths, logprobs = self._new
        self._new = None
        (copied,) = host.fetched([logprobs])
        by_sequence = [values.clone() for values in copied.split(lengths)]
        for key, values in zip(keys, by_sequence, strict=True):
            self._logprobs.put(key, values)
        return by_sequence

    def keep_model(self, split_model: SplitModel) -> None:
        """Keep the shared copy of a model that no run uses any more, while the cache has room."""
        if self._pool.is_loaded(split_model.facts.name, exact=split_model.exact):
            self._model(split_model.facts.name, exact=split_model.exact)

    def _model(self, name: str, form: Form = None, *, exact: bool | None = None) -> Reference:
        exact = self._pool.exact if exact is None else exact
        identity = f"model {name}{f' {form}' if form else ''}{' exact' if exact else ''}"
        if identity not in self._loaded and form:
            size = self._model_bytes(name, form)
            self._make_room(size)
            policy = Policy(self._frozen_copy(name, form, exact))
            on_host = num_layer_bytes(policy.model) if form == OFFLOADED and self._pool.device.type != "cpu" else 0
            self._loaded[identity] = _Loaded(Reference(identity, policy), size, host_bytes=on_host)
            self.loaded_models += 1
        elif identity not in self._loaded:
            if not self._pool.is_loaded(name, exact=exact):
                self._make_room(self._model_bytes(name))
            reference = Reference(identity, Policy(self._pool.get(name, exact=exact)))
            self._loaded[identity] = _Loaded(reference, self._model_bytes(name), shared_model=name, exact=exact)
            self.loaded_models += 1
        return self._use(identity)

    def _checkpoint(self, manifest: Manifest, form: Form) -> Reference:
        weights = manifest.files.get(WEIGHTS)
        identity = f"checkpoint {manifest.path} {weights.blake2b if weights else ''} {form or ''}"
        if form == OFFLOADED:
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"{manifest.path} is a checkpoint, and only models can be offloaded: export it, and serve the export as"
                " a model",
                field="reference_model",
                rule='"base", or a model name',
            )
        if identity not in self._loaded:
            config, exact = manifest.config, is_exact(self._pool, manifest.config)
            tensors = self._store.load(manifest.path, WEIGHTS, manifest)
            facts = self._pool.facts(config.base_model)
            head = make_head(config, facts.hidden_size, self._pool.device)
            if head is not None:
                head.requires_grad_(False)
            if config.HasField("lora"):
                size = self._model_bytes(config.base_model, form) if form else 0
                self._make_room(size)
                if form:
                    split_model = self._frozen_copy(config.base_model, form, exact)
                else:
                    split_model = self._pool.get(config.base_model, exact=exact)
                policy = self._adapter(split_model, config.lora, head, tensors)
                size += sum(parameter.nbytes for parameter in policy.trainable_parameters().values())
            else:
                if isinstance(form, str):
                    raise OperationError(
                        training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                        f"{manifest.path} has all weights of a model, and only adapters and models on disk can be held"
                        f" as {form}: export it, and serve the export as a model",
                        field="reference_model",
                        rule="a model, or a checkpoint of an adapter",
                    )
                size = self._model_bytes(config.base_model, form or self._pool.dtype)
                self._make_room(size)
                copy = self._frozen_copy(config.base_model, form or self._pool.dtype, exact)
                policy = self._full(copy, head, tensors)
            self._loaded[identity] = _Loaded(Reference(identity, policy), size)
            self.loaded_models += 1
        return self._use(identity)

    def _adapter(
        self, model: SplitModel, settings: training_pb2.LoraSettings, head: Head | None, tensors: dict[str, Tensor]
    ) -> Policy:
        policy = LoraPolicy(model, next(self._adapter_names), settings, seed=0, head=head)
        try:
            policy.load_state_tensors(tensors)
        except OperationError:
            policy.close()
            raise
        return policy

    def _full(self, split_model: SplitModel, head: Head | None, tensors: dict[str, Tensor]) -> Policy:
        """Make a policy with these weights in a copy of the model, in its dtype, without float32 masters."""
        for name, parameter in split_model.model.named_parameters():
            assign(parameter, tensors[name])
        if head is not None:
            for name, parameter in head.named_parameters():
                assign(parameter, tensors[HEAD_PREFIX + name])
        return Policy(split_model, head=head)

    def _use(self, identity: str) -> Reference:
        self.used_models += 1
        self._loaded.move_to_end(identity)
        self._make_room(0, keep=identity)
        return self._loaded[identity].reference

    def _make_room(self, needed: int, keep: str = "") -> None:
        """Evict the least recently used references until ``needed`` more bytes fit, as far as possible."""
        for identity in list(self._loaded):
            if sum(map(self._bytes, self._loaded.values())) + needed <= self._cache_bytes:
                return
            entry = self._loaded[identity]
            if identity == keep or not self._bytes(entry) or self._in_use(entry.reference.policy):
                continue
            logger.info("dropping reference %s from the cache", identity)
            del self._loaded[identity]
            if entry.shared_model:
                self._pool.release(entry.shared_model, exact=entry.exact)
            else:
                entry.reference.policy.close()

    def _frozen_copy(self, name: str, form: Form, exact: bool) -> SplitModel:
        if form == OFFLOADED:
            split_model = self._pool.load(name, offload=True)
        elif isinstance(form, str):
            split_model = self._pool.load(name, quantize=form)
        else:
            split_model = self._pool.load(name, None if form is self._pool.dtype else form, exact=exact)
        split_model.model.requires_grad_(False)
        return split_model

    def _model_bytes(self, name: str, form: Form = None) -> int:
        quantize = self._pool.quantize if form is None else form if form in QUANTIZATIONS else None
        if quantize is None:
            dtype = form if isinstance(form, torch.dtype) else self._pool.dtype
            return self._pool.facts(name).num_parameters * dtype.itemsize
        return weight_bytes(self._pool.meta_model(name), self._pool.dtype, quantize)

    def _bytes(self, entry: _Loaded) -> int:
        """Bytes that evicting an entry would free; 0 for a model with adapters."""
        in_use = entry.shared_model and entry.reference.policy.split_model.adapters is not None
        return 0 if in_use else entry.own_bytes


def _only(batch: Batch, sequences: Tensor) -> Batch:
    """Select sequences of a batch without its fields; sequences of one example stay grouped to share prefixes."""
    ones = torch.ones_like(batch.lengths)
    alone = Batch(
        batch.input_ids, batch.lengths, batch.scored, ones, target_tokens=batch.target_tokens, images=batch.images
    )
    sizes = segment_ids(batch.group_sizes)[sequences].bincount(minlength=batch.num_examples)
    return replace(alone.select(sequences), group_sizes=sizes[sizes > 0])


def _check_fits(reference: Reference, batch: Batch) -> None:
    facts = reference.policy.facts
    if batch.num_sequences and int(batch.input_ids.max()) >= facts.vocab_size:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"the reference model {facts.name!r} knows {facts.vocab_size} token ids and the batch has "
            f"{int(batch.input_ids.max())}: its tokenizer is another",
            field="reference_model",
            rule="same tokenizer",
        )
    if batch.num_sequences and int(batch.lengths.max()) > facts.context_length:
        raise OperationError(
            training_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"the reference model {facts.name!r} has a context of {facts.context_length} tokens and the batch has a "
            f"sequence of {int(batch.lengths.max())}",
            field="reference_model",
            rule=f"tokens <= {facts.context_length}",
        )
