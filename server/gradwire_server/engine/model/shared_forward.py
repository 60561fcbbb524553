"""One forward of a base model for several LoRA runs at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gradwire_losses.batch import Batch, sent
from torch import Tensor

from gradwire_server.engine.model.adapters.products import Span
from gradwire_server.engine.model.packing import arrange
from gradwire_server.engine.model.policy import LoraPolicy


def can_go_together(policy: LoraPolicy, other: LoraPolicy) -> bool:
    """Whether two runs can share a forward in training mode with the same results as each alone."""
    adapters = policy.split_model.adapters
    return (
        policy.split_model is other.split_model
        and policy.adapter != other.adapter
        and policy.gradient_checkpointing == other.gradient_checkpointing
        and not (policy.has_dropout or other.has_dropout)
        and policy.split_model.routers is None  # whose figures are sums over one run's tokens
        and adapters is not None
        and all(adapters.computes_in_spans(each.adapter) for each in (policy, other))
    )


def hidden_together(
    policies: Sequence[LoraPolicy], batches: Sequence[Batch], positions: Sequence[Tensor]
) -> list[Tensor]:
    """Final hidden states of one batch per run, from one forward of the trunk in training mode.

    Args:
        policies: Policies that satisfy :func:`can_go_together`.
        batches: Their batches, each with at least one sequence.
        positions: ``[P]`` for each batch: indices into its tokens.

    Returns:
        ``[P, H]`` for each batch, as from ``policy.hidden``.
    """
    first = policies[0]
    split_model = first.split_model
    lengths = torch.cat([batch.lengths for batch in batches])
    arranged = arrange(
        first.packing(training=True),
        torch.cat([batch.input_ids for batch in batches]),
        lengths,
        torch.tensor([batch.num_sequences for batch in batches]),
    )
    begins, total = [], 0
    for batch in batches:
        begins.append(total)
        total += len(batch.input_ids)
    # A batch's first token is never shared with another batch, so its place is the start of the run's tokens.
    starts = arranged.places[begins].tolist()
    stops = [*starts[1:], arranged.input_ids.numel()]
    spans = [Span(policy.adapter, *ends) for policy, ends in zip(policies, zip(starts, stops), strict=True)]
    split_model.activate_spans(spans, training=True, checkpointing=first.gradient_checkpointing)
    states = split_model.states(arranged)
    wanted = arranged.places[torch.cat([own + begin for own, begin in zip(positions, begins, strict=True)])]
    found = states.index_select(0, sent(wanted, states.device))
    return list(found.split([len(own) for own in positions]))
