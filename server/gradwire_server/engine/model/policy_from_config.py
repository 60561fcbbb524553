"""The policy that a run's configuration asks for."""

from __future__ import annotations

from pathlib import Path

import torch
from gradwire_proto.v1 import training_pb2

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.head_files import load_head
from gradwire_server.engine.model.layers.heads import Head, make_head
from gradwire_server.engine.model.layers.routers import balance_coefficient
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import FullPolicy, LoraPolicy, Policy
from gradwire_server.engine.model.split_model import ModelFacts, SplitModel


def is_exact(pool: ModelPool, config: training_pb2.RunConfig) -> bool:
    """Whether a run is deterministic; one of an earlier version is as the server is."""
    return config.deterministic if config.HasField("deterministic") else pool.exact


def make_policy(pool: ModelPool, config: training_pb2.RunConfig, run_id: str) -> Policy:
    """Make the policy that a run's configuration asks for.

    Raises:
        OperationError: UNKNOWN_MODEL, or INVALID_ARGUMENT or UNSUPPORTED with the field.
    """
    facts, exact = pool.facts(config.base_model), is_exact(pool, config)
    if config.HasField("lora"):
        split_model = pool.get(config.base_model, exact=exact)
        _check_checkpointing(config, split_model)
        head = _start_head(config, facts, split_model.device)
        settings = training_pb2.LoraSettings()
        settings.CopyFrom(config.lora)
        settings.dropout = settings.dropout or config.dropout
        coefficient = balance_coefficient(split_model.model, config)
        policy: Policy = LoraPolicy(
            split_model,
            run_id,
            settings,
            seed=config.seed,
            head=head,
            gradient_checkpointing=config.gradient_checkpointing,
            dropout=config.dropout,
        )
        policy.router_aux_loss_coef, policy.noise_alpha = coefficient, config.neftune_noise_alpha
        return policy
    split_model = pool.load(config.base_model, exact=exact)
    _check_checkpointing(config, split_model)
    coefficient = balance_coefficient(split_model.model, config)
    head = _start_head(config, facts, split_model.device)
    if head is not None:
        pool.placement.place(head)
    policy = FullPolicy(
        split_model, head=head, gradient_checkpointing=config.gradient_checkpointing, dropout=config.dropout
    )
    policy.router_aux_loss_coef, policy.noise_alpha = coefficient, config.neftune_noise_alpha
    return policy


def _check_checkpointing(config: training_pb2.RunConfig, split_model: SplitModel) -> None:
    if config.gradient_checkpointing and not split_model.model.supports_gradient_checkpointing:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"{split_model.facts.architecture} has no gradient checkpointing in transformers: leave it out",
            field="gradient_checkpointing",
            rule="a model with gradient checkpointing",
        )


def _start_head(config: training_pb2.RunConfig, facts: ModelFacts, device: torch.device) -> Head | None:
    """The head that a run's configuration asks for, with the weights in the base model's folder if there are some."""
    head = make_head(config, facts.hidden_size, device)
    if head is not None:
        load_head(head, Path(facts.path))
    return head
