"""Several LoRA runs through their common base model at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gradwire_losses.batch import Batch
from torch import Tensor

from gradwire_server.engine.grouped_lora import Span
from gradwire_server.engine.packing import arrange
from gradwire_server.engine.policy import LoraPolicy


def can_go_together(policy: LoraPolicy, other: LoraPolicy) -> bool:
    """Whether two runs may go through the model at once, in training mode, and get what each gets alone."""
    layers = policy.hosted.adapter_layers
    return (
        policy.hosted is other.hosted
        and policy.adapter != other.adapter
        and policy.gradient_checkpointing == other.gradient_checkpointing
        and not policy.hosted.has_dropout
        and layers is not None
        and all(layers.computes_in_spans(each.adapter) for each in (policy, other))
    )


def hidden_together(
    policies: Sequence[LoraPolicy], batches: Sequence[Batch], positions: Sequence[Tensor]
) -> list[Tensor]:
    """Final hidden states of one batch a run, in one forward of the trunk in training mode.

    Args:
        policies: that :func:`can_go_together`.
        batches: theirs, each with at least one sequence.
        positions: ``[P]`` of each batch, indices into its tokens.

    Returns:
        ``[P, H]`` of each batch, as ``policy.hidden`` gives them.
    """
    first = policies[0]
    hosted = first.hosted
    lengths = torch.cat([batch.lengths for batch in batches])
    arranged = arrange(
        first.packing(training=True),
        torch.cat([batch.input_ids for batch in batches]),
        lengths,
        torch.cat([batch.group_sizes for batch in batches]),
    )
    begins, total = [], 0
    for batch in batches:
        begins.append(total)
        total += len(batch.input_ids)
    # The first token of a batch is no other's, in any form, so its place is where the run's tokens begin.
    starts = arranged.places[begins].tolist()
    stops = [*starts[1:], arranged.input_ids.numel()]
    spans = [Span(policy.adapter, *ends) for policy, ends in zip(policies, zip(starts, stops), strict=True)]
    hosted.activate_spans(spans, checkpointing=first.gradient_checkpointing)
    states = hosted.states(arranged)
    wanted = arranged.places[torch.cat([own + begin for own, begin in zip(positions, begins, strict=True)])]
    found = states.index_select(0, wanted.to(states.device, non_blocking=True))
    return list(found.split([len(own) for own in positions]))
