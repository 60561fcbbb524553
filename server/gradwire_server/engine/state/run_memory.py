"""The memory that a run will take, computed from its configuration before anything is allocated.

A trained parameter takes 16 bytes: a float32 weight, its gradient, and two moments; 18 where the model computes in
less than float32. An adapter on a linear layer of
``I`` features in and ``O`` out has ``rank * (I + O)`` parameters, a head ``outputs * (H + 1)``. An adapter or a head
that takes more than training all of the model's own weights is a mistake and is refused, whatever memory there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.config import TRAINED_BYTES
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.generators import preserved_rng
from gradwire_server.engine.machine import total_memory
from gradwire_server.engine.model.adapters.lora_settings import lora_config, only_the_head_of_tied
from gradwire_server.engine.model.layers.exact_products import panel_bytes
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy_from_config import is_exact
from gradwire_server.engine.sizing.parts import master_bytes, readable, trained_bytes, weight_bytes

SCORE_BYTES = 8
"""Bytes of one output of a head for one token: the score and its gradient."""
SCORED_TOKENS = 2048
"""Tokens of a micro-batch, for each of which a head has its outputs."""
FLOOR_BYTES = 64 << 20
"""Memory that an adapter or a head may take whatever the model's size."""
LIGHT_BYTES = 1 << 30
"""What an adapter takes at most that is made between two micro-batches of a batch."""


def check_memory(pool: ModelPool, create: engine_pb2.EngineCreateRun, agreement: Agreement) -> None:
    """Check that a new run fits, before it is made.

    Raises:
        OperationError: LIMIT_EXCEEDED for an adapter or a head that no memory would justify, or one that does not fit
            into its owner's part; OUT_OF_MEMORY if there is too little at present.
    """
    if not create.share_percent:
        return
    config = create.config
    facts = pool.facts(config.base_model)
    trained = trained_bytes(pool.dtype)
    own_bytes = trained * facts.num_parameters
    most, needs = max(FLOOR_BYTES, own_bytes), []
    if config.HasField("lora") and config.lora.rank:
        of_rank = trained * _parameters_of_rank(pool, config)
        needs.append(("lora.rank", config.lora.rank, of_rank, "an adapter of this rank", "leave lora out"))
    if config.head == "classification":
        of_label = TRAINED_BYTES * facts.hidden_size + SCORE_BYTES * SCORED_TOKENS
        needs.append(("num_labels", config.num_labels, of_label, "a head with so many labels", "use fewer labels"))
    for field, value, each, what, instead in needs:
        if value * each > most:
            raise OperationError(
                training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
                f"{field} is {value:,}: {what} takes {readable(value * each)} to train, and all of the"
                f" {facts.num_parameters:,} weights of {config.base_model!r} take {readable(own_bytes)}; {field} is at"
                f" most {most // each:,} here, or {instead}",
                field=field,
                rule=f"{field} <= {most // each}",
            )
    needed = sum(value * each for _, value, each, _, _ in needs)
    if not config.HasField("lora"):
        needed += own_bytes // pool.placement.parts
    fields = ", ".join(field for field, *_ in needs) or "base_model"
    _check_share(pool, create, needed, fields)
    free = agreement.free_memory(pool.device)
    at_once = needed
    if not config.HasField("lora"):  # gradients and moments come with the first step, which some runs never take
        later = facts.num_parameters * (trained - pool.dtype.itemsize - master_bytes(pool.dtype))
        at_once -= later // pool.placement.parts
    loaded = {exact: pool.is_loaded(config.base_model, exact=exact) for exact in (True, False)}
    base = 0 if any(loaded.values()) or not config.HasField("lora") else _weights(pool, config.base_model)
    if is_exact(pool, config) and not (loaded[True] and config.HasField("lora")):
        base += panel_bytes(pool.meta_model(config.base_model))
    if at_once + base > free:
        model = f" and its base model {readable(base)}" if base else ""
        raise OperationError(
            training_pb2.ERROR_CODE_OUT_OF_MEMORY,
            f"this run needs {readable(at_once)} of memory{model}, and {readable(free)} are free on {pool.device}; "
            f"delete a run that is not needed any more, or ask for less ({fields}); `gradwire estimate` computes what"
            " fits",
            field=fields.partition(",")[0],
        )


def light_bytes(pool: ModelPool, create: engine_pb2.EngineCreateRun) -> int:
    """Bytes of a run that is made in no time: of an adapter on a model that is there, from no checkpoint; else 0."""
    config = create.config
    if create.checkpoint or config.head == "classification" or not config.HasField("lora"):
        return 0
    if not pool.is_loaded(config.base_model, exact=is_exact(pool, config)):
        return 0
    needed = trained_bytes(pool.dtype) * config.lora.rank * _parameters_of_rank(pool, config)
    return needed if needed <= LIGHT_BYTES else 0


def check_models(pool: ModelPool, names: Sequence[str]) -> None:
    """Check that each of these models could be loaded, before one is.

    Raises:
        OperationError: UNSUPPORTED if its files cannot be read or do not fit its configuration; INVALID_ARGUMENT if the
            weights of one alone are more than the memory.
    """
    total = total_memory(pool.device)
    for name in names:
        needed = _weights(pool, name)
        if needed > total:
            facts = pool.facts(name)
            raise OperationError(
                training_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"--model {name}: its {facts.num_parameters:,} weights take {readable(needed)}"
                f" ({pool.quantize or facts.dtype}), and {pool.device} has {readable(total)};"
                f" `gradwire estimate --model {facts.path}` computes what fits",
                field="models",
            )
        pool.check(name)


def _weights(pool: ModelPool, name: str) -> int:
    """Bytes that this process holds of the shared copy of a model."""
    if pool.quantize is None:
        return pool.facts(name).num_parameters * pool.dtype.itemsize // pool.placement.parts
    return weight_bytes(pool.meta_model(name), pool.dtype, pool.quantize)


def _check_share(pool: ModelPool, create: engine_pb2.EngineCreateRun, needed: int, fields: str) -> None:
    if create.share_percent == 100:
        return
    total = total_memory(pool.device)
    share = total * create.share_percent // 100
    if create.held_bytes + needed > share:
        raise OperationError(
            training_pb2.ERROR_CODE_LIMIT_EXCEEDED,
            f"this run takes {readable(needed)} to train, and the other runs of this key"
            f" {readable(create.held_bytes)}; this key may take {readable(share)}, {create.share_percent} % of the"
            f" memory of {pool.device} (--memory-percent of `gradwire keys create`, --limit key_memory_percent=N)."
            f" Delete a run that is not needed any more, or ask"
            f" for less ({fields})",
            field=fields.partition(",")[0],
            rule=f"key_memory_percent = {create.share_percent}",
        )


def _parameters_of_rank(pool: ModelPool, config: training_pb2.RunConfig) -> int:
    return _counted(pool, config.base_model, tuple(config.lora.target_modules))


@lru_cache(maxsize=256)
def _counted(pool: ModelPool, name: str, target_modules: tuple[str, ...]) -> int:
    """Parameters of an adapter of rank 1; 0 if peft refuses it, as it will when the run is made."""
    from peft import get_peft_model

    model = pool.meta_model(name)
    settings = training_pb2.LoraSettings(rank=1, target_modules=target_modules)
    try:
        with preserved_rng(), only_the_head_of_tied(), torch.device("meta"):  # peft makes them on the default device
            adapted = get_peft_model(model, lora_config(model, settings), autocast_adapter_dtype=False)
    except ValueError:
        return 0
    return sum(each.numel() for part, each in adapted.named_parameters() if "lora_" in part)
