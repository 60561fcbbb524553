"""Check at load whether a model can take packed sequences, by comparing states and gradients with padded ones.

Then rows whose lengths lie around every boundary that the configuration names are compared, in the form chosen, with
each of them alone: a row's numbers may not depend on the rows beside it.

Most decoders can. Sequences stay padded for models with a recurrent state along the tokens (Mamba, linear attention),
with an attention implementation of their own, with biases from a mask, or with windows that their layers do not pass to
the attention function.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.attention import packed
from gradwire_server.engine.model.comparison import largest_difference, relative_tolerance
from gradwire_server.engine.model.packing import Packing, arrange, lay_out
from gradwire_server.engine.model.prefix_tree import MIN_SAVED
from gradwire_server.engine.model.split_model import SplitModel

logger = logging.getLogger(__name__)

BOUNDARIES = ("window", "chunk", "block_size", "local_attention", "original_max_position_embeddings", "index_topk")
"""Parts of the names by which configurations give lengths at which a model changes what it computes."""
MOST_TRIED, MOST_TRIED_ON_CPU = 4096, 1024
"""Longest boundary around which rows are tried: longer rows take gigabytes, and on a CPU minutes."""
MOST_ROUNDING = 0.3
"""Share of the largest number up to which a difference may be one of rounding."""
TRIED_IDS = 512
"""Token ids among which those are chosen that models are compared with."""


def choose_packing(split_model: SplitModel) -> Packing:
    """Choose the correct form that computes the fewest tokens, and set the attention implementation it needs."""
    config = split_model.model.config
    if config._attn_implementation != "sdpa":
        logger.info("%s is padded: its attention is %s", split_model.facts.name, config._attn_implementation)
        return Packing.PADDED
    config._attn_implementation = packed.NAME
    try:
        packing, reason = _compare(split_model)
    except Exception as error:  # whatever a model raises on an unpadded batch, padding is correct for it
        packing, reason = Packing.PADDED, f"{type(error).__name__}: {error}"
    if packing is Packing.PADDED:
        config._attn_implementation = "sdpa"
    if reason:
        logger.warning("%s is given %s sequences: %s", split_model.facts.name, packing.name.lower(), reason)
    return packing


@torch.no_grad()
def check_rows(split_model: SplitModel) -> None:
    """Check that rows around the boundaries of a model have the states together that each has alone."""
    facts, usable = split_model.facts, _usable_ids(split_model)
    bounds = boundaries(split_model.model.config.get_text_config().to_dict())
    most = MOST_TRIED_ON_CPU if split_model.device.type == "cpu" else MOST_TRIED
    bounds = {each for each in bounds if each <= most}
    lengths = sorted({length for each in bounds for length in (each - 1, each, each + 1)} | {3, 7})
    lengths = [length for length in lengths if 0 < length <= facts.context_length]
    rows = [usable[(torch.arange(length) * 5 + number) % len(usable)] for number, length in enumerate(lengths)]
    ones = torch.ones(len(rows), dtype=torch.long)
    arranged = arrange(split_model.packing, torch.cat(rows), torch.tensor(lengths), ones)
    together = split_model.states(arranged)[arranged.places.to(split_model.device)].float()
    tolerance = relative_tolerance(split_model.dtype)
    for row, mine in zip(rows, together.split(lengths), strict=True):
        alone = split_model.states(arrange(Packing.PADDED, row, torch.tensor([len(row)]), ones[:1])).float()
        error, size = largest_difference(mine, alone)
        if not error <= tolerance * size:
            raise OperationError(
                training_pb2.ERROR_CODE_UNSUPPORTED,
                f"model {facts.name!r} ({facts.architecture}) is not supported: a row of {len(row)} tokens has states"
                f" beside rows of up to {lengths[-1]} that differ by {error:.3g} from those that it has alone",
            )


@torch.no_grad()
def check_exact(split_model: SplitModel) -> None:
    """Check that the bits of a row's states depend on no other row."""
    facts, usable = split_model.facts, _usable_ids(split_model)
    lengths = [min(length, facts.context_length) for length in (40, 50, 1, 2, 5, 70, 131)]
    ids = torch.arange(max(lengths)) * 3
    rows = [usable[(ids[:length] + max(0, number - 1)) % len(usable)] for number, length in enumerate(lengths)]
    groups = torch.tensor([2, *[1] * (len(rows) - 2)])
    reason = "it takes padded sequences"
    if split_model.packing is not Packing.PADDED:
        arranged = arrange(split_model.packing, torch.cat(rows), torch.tensor(lengths), groups)
        together, reason = split_model.states(arranged)[arranged.places], ""
        for row, mine in zip(rows, together.split(lengths), strict=True):
            alone = split_model.states(arrange(split_model.packing, row, torch.tensor([len(row)]), groups[1:2]))
            if not (reason or torch.equal(mine, alone)):
                reason = f"a row of {len(row)} tokens has other bits beside others"
    if reason:
        raise OperationError(
            training_pb2.ERROR_CODE_UNSUPPORTED,
            f"model {facts.name!r} ({facts.architecture}) cannot be computed as a deterministic run: {reason}; leave"
            " that out, and log-probabilities are equal to rounding",
            field="deterministic",
        )


def boundaries(config: Mapping[str, Any]) -> set[int]:
    """Lengths that a configuration names as such, also those of its rotary embeddings."""
    numbers: set[int] = set()
    for name, value in config.items():
        if isinstance(value, Mapping):
            numbers |= boundaries(value)
        elif type(value) is int and value > 0 and any(part in name for part in BOUNDARIES):
            numbers.add(value)
    return numbers


def _compare(split_model: SplitModel) -> tuple[Packing, str]:
    facts = split_model.facts
    common = min(MIN_SAVED, facts.context_length // 2)
    if common < 1:
        return Packing.PADDED, "its context is too short to tell"
    deeper = max(0, min(MIN_SAVED, facts.context_length - common - 4))
    beginnings = [common + deeper, common + deeper, common]
    own = [min(length, facts.context_length - begun) for length, begun in zip((4, 1, 2), beginnings, strict=True)]
    parts = [
        torch.cat([torch.arange(begun), torch.arange(length) + 7 * (number + 1)])
        for number, (length, begun) in enumerate(zip(own, beginnings, strict=True))
    ]
    parts.append(torch.arange(min(3, facts.context_length)) + 5)
    lengths = torch.tensor([len(part) for part in parts])
    usable = _usable_ids(split_model)
    input_ids = usable[torch.cat(parts) % len(usable)]
    sharing = torch.tensor([len(own), 1])
    with packed.observing() as seen:
        expected = _states_and_gradient(split_model, Packing.PADDED, input_ids, lengths, sharing)
        masked, seen.mask_windows = seen.mask_windows, set()
        by_packing = _states_and_gradient(split_model, Packing.PACKED, input_ids, lengths, sharing)
    if seen.mask_functions or not masked or masked != seen.attention_windows:
        return Packing.PADDED, "its masks say more than its layers tell the attention function"
    noise = [0.0, 0.0]
    if split_model.dtype in (torch.bfloat16, torch.float16):
        noise = _rounding(split_model, input_ids, lengths, sharing)
    if not _alike(by_packing, expected, split_model.dtype, noise):
        return Packing.PADDED, "packed states or gradients differ"
    shared = _states_and_gradient(split_model, Packing.SHARED, input_ids, lengths, sharing)
    if not _alike(shared, expected, split_model.dtype, noise):
        return Packing.PACKED, "states or gradients differ where a prefix is shared"
    return Packing.SHARED, ""


@torch.no_grad()
def _usable_ids(split_model: SplitModel) -> Tensor:
    """Token ids whose embeddings are not much smaller than the others'.

    That of a padding token is often zero. Alone in front of a sequence it stays zero from layer to layer, and each norm
    multiplies the gradient in it by a thousand or so, until it is not finite however the sequences are arranged.
    """
    ids = torch.arange(min(split_model.facts.vocab_size, TRIED_IDS))
    sizes = split_model.model.get_input_embeddings()(ids.to(split_model.device)).float().norm(dim=-1).cpu()
    return ids[sizes >= sizes.quantile(0.9) / 2]


def _states_and_gradient(
    split_model: SplitModel, packing: Packing, input_ids: Tensor, lengths: Tensor, sharing: Tensor
) -> tuple[Tensor, Tensor]:
    """``[N, H]`` states, and the gradient in the embeddings ``[M, H]`` of their product with fixed numbers."""
    embedded: list[Tensor] = []

    def keep(module: nn.Module, arguments: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        hook = split_model.model.get_input_embeddings().register_forward_hook(keep)
        stack.callback(hook.remove)
        arranged = arrange(packing, input_ids, lengths, sharing)
        states = split_model.states(arranged)[arranged.places.to(split_model.device)]
        places = torch.cat([torch.arange(length) for length in lengths.tolist()])  # the same for a row alone
        width = states.shape[1]
        weights = torch.sin(places[:, None] * width + torch.arange(width)).to(states.device)
        (gradient,) = torch.autograd.grad((states.float() * weights).sum(), embedded)
    gradient = gradient.flatten(0, 1).float()
    if packing is not Packing.SHARED:
        gradient = _summed(gradient[arranged.places.to(gradient.device)], input_ids, lengths, sharing)
    return states.detach(), gradient


def _summed(copies: Tensor, input_ids: Tensor, lengths: Tensor, sharing: Tensor) -> Tensor:
    """``[N, H] -> [M, H]``: gradients, where a shared token receives the sum of those of its copies."""
    places = lay_out(input_ids, lengths, sharing).places.to(copies.device)
    return copies.new_zeros(int(places.max()) + 1, copies.shape[1]).index_add(0, places, copies)


def _rounding(split_model: SplitModel, input_ids: Tensor, lengths: Tensor, sharing: Tensor) -> list[float]:
    """By how much states and gradients change when each row is computed alone, where both forms are right.

    A rounding of bfloat16 grows from layer to layer, in deep models beyond any tolerance that could be fixed.
    """
    ones = torch.ones(len(lengths), dtype=torch.long)
    together = _states_and_gradient(split_model, Packing.PADDED, input_ids, lengths, ones)
    rows = [
        _states_and_gradient(split_model, Packing.PADDED, row, lengths[number : number + 1], ones[:1])
        for number, row in enumerate(input_ids.split(lengths.tolist()))
    ]
    alone = [torch.cat(each) for each in zip(*rows, strict=True)]
    mine, theirs = ((states, _summed(gradient, input_ids, lengths, sharing)) for states, gradient in (alone, together))
    return [largest_difference(*each)[0] for each in zip(mine, theirs, strict=True)]


def _alike(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: torch.dtype, noise: Sequence[float]
) -> bool:
    for mine, theirs, rounding in zip(found, expected, noise, strict=True):
        error, size = largest_difference(mine, theirs)
        tolerance = max(relative_tolerance(dtype), min(3 * rounding / size, MOST_ROUNDING))
        if not error <= tolerance * size:
            return False
    return True
