"""The check, at load, that a split model computes what the model itself does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from gradwire_proto.v1 import training_pb2
from torch import Tensor, nn

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.comparison import forward_by, largest_difference, ordinary_ids, relative_tolerance
from gradwire_server.engine.model.layers.read_weights import observe_reads
from gradwire_server.engine.model.split_model import ModelFacts, OutputHead, SplitModel


@contextmanager
def explained_failures(split_model: SplitModel) -> Iterator[None]:
    """Refuse a model whose own code raises whatever it may in the forwards within, with a sentence.

    Raises:
        OperationError: UNSUPPORTED; names a weight that is not finite, whatever failed with it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        weights = split_model.model.named_parameters()
        if name := next((name for name, weight in weights if not bool(weight.isfinite().all())), ""):
            raise _unsupported(split_model.facts, f"its weights are not finite: {name}") from error
        if isinstance(error, OperationError):
            raise
        sentence = str(error).partition("\n")[0].strip()
        raise _unsupported(
            split_model.facts, f"its forward fails in {split_model.dtype}: {type(error).__name__}: {sentence}"
        ) from error


@torch.no_grad()
def check_split(split_model: SplitModel) -> None:
    """Check that trunk and output head reproduce the model's logits, alone and beside a longer sequence.

    Also checks that the logits are finite and that nothing is drawn in training mode without dropout, and finds the
    layers whose weights the model reads itself.
    """
    facts = split_model.facts
    length = min(6, facts.context_length)
    ids = ordinary_ids(2 * length, facts.vocab_size).view(2, length).to(split_model.device)

    def split_logits() -> Tensor:
        head = split_model.output_head()
        hidden = split_model.trunk(input_ids=ids, use_cache=False).last_hidden_state
        bias = 0.0 if head.bias is None else head.bias.float()
        return head.transform(hidden.float() @ head.weight.float().T + bias)

    tolerance = relative_tolerance(split_model.dtype)
    with observe_reads(split_model.model):
        ours = split_model.compute(split_logits)
        if not bool(ours.isfinite().all()):
            raise _unsupported(facts, f"its logits are not finite in {split_model.dtype}")
        _check_training_mode(split_model, ordinary_ids(min(32, facts.context_length), facts.vocab_size)[None].to(ids))
    for row, width in enumerate((length, max(1, length // 2))):
        theirs = split_model.model(input_ids=ids[row : row + 1, :width], use_cache=False).logits[0].float()
        error, size = largest_difference(ours[row, :width], theirs)
        if not error <= tolerance * size:
            raise _unsupported(
                facts, f"its logits differ by {error:.3g} from those of its output head on its causal hidden states"
            )
    _check_around_head(split_model, ids[:1])


def _check_around_head(split_model: SplitModel, ids: Tensor) -> None:
    """Check in float32, whatever the model's dtype, all that the model does before and after the head's product.

    The model's own forward runs with other numbers in two places: its trunk's states, and a product of few factors
    for its head's, so large that a bound of the logits shows.
    """
    model, facts, head = split_model.model, split_model.facts, split_model.model.get_output_embeddings()
    hidden = _numbers((*ids.shape, facts.hidden_size), ids.device).to(split_model.weight_dtype).float()
    into, out = _numbers((facts.hidden_size, 4), ids.device), _numbers((4, head.weight.shape[0]), ids.device)
    into = into * 20.0 / (hidden @ into @ out).abs().max()

    def put_states(module: nn.Module, arguments: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (hidden, *output[1:])
        output.last_hidden_state = hidden
        return output

    hook = split_model.trunk.register_forward_hook(put_states)
    with forward_by(head, lambda states: states.float() @ into @ out):
        try:
            theirs = model(input_ids=ids, use_cache=False).logits.float()
        finally:
            hook.remove()
    ours = OutputHead(head.weight, None, split_model._logit_scale, split_model._softcap).transform(hidden @ into @ out)
    error, size = largest_difference(ours, theirs)
    if not error <= 1e-4 * size:
        raise _unsupported(facts, f"what it does around its output head changes logits of up to 20 by {error:.3g}")


def _numbers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    count = int(torch.tensor(shape).prod())
    return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7).float().view(shape).to(device)


def _unsupported(facts: ModelFacts, reason: str) -> OperationError:
    return OperationError(
        training_pb2.ERROR_CODE_UNSUPPORTED, f"model {facts.name!r} ({facts.architecture}) is not supported: {reason}"
    )


def _check_training_mode(split_model: SplitModel, ids: Tensor) -> None:
    """Check that two forwards in training mode agree up to the order in which a GPU may add."""
    tolerance = 1e-2 if split_model.dtype in (torch.bfloat16, torch.float16) else 1e-5
    split_model.activate(training=True)
    try:
        first, second = (
            split_model.compute(lambda: split_model.trunk(input_ids=ids, use_cache=False).last_hidden_state)
            for _ in range(2)
        )
    finally:
        split_model.activate()
    error, size = largest_difference(second, first)
    if not error <= tolerance * size:
        raise _unsupported(
            split_model.facts,
            "it draws random numbers in training mode also without dropout, so that a loss would compare two different"
            " policies",
        )
