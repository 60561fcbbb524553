"""Build requests from the arguments of calls: check the arguments, build the message and its columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.batches import SCORING_FIELDS, maybe_padded, to_columns
from gradwire.errors import InvalidArgumentError
from gradwire.losses import LossCatalogue, kwargs_json, model_path
from gradwire.results import Checkpoint
from gradwire.wire.entries import Request

M = TypeVar("M", bound=Message)
Batch = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Columns or rows: see :mod:`gradwire.batches`."""
Output = Literal[
    "logprobs",
    "candidate_logprobs",
    "entropy",
    "mean_logprobs",
    "collision",
    "divergence",
    "values",
    "rewards",
    "token_rewards",
    "class_logits",
    "token_class_logits",
]
OnNonFinite = Literal["error", "skip"]

SHOWN_CHARS = 200
_NUMBERS_AND_TEXTS = {
    FieldDescriptor.CPPTYPE_INT32: ("a whole number below 2**31", "whole numbers below 2**31"),
    FieldDescriptor.CPPTYPE_INT64: ("a whole number below 2**63", "whole numbers below 2**63"),
    FieldDescriptor.CPPTYPE_UINT32: ("a whole number from 0 to 2**32 - 1", "whole numbers from 0 to 2**32 - 1"),
    FieldDescriptor.CPPTYPE_UINT64: ("a whole number from 0 to 2**64 - 1", "whole numbers from 0 to 2**64 - 1"),
    FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_FLOAT: ("a number", "numbers"),
    FieldDescriptor.CPPTYPE_BOOL: ("True or False", "True or False"),
    FieldDescriptor.CPPTYPE_STRING: ("text", "texts"),
}
"""Words for the values that a field takes, by its type: for one value, and for several."""


class OptimizerOptions(TypedDict, total=False):
    """How weights are updated: the keyword arguments of ``optim_step`` and ``train_step``.

    Attributes:
        betas: Decay of the first and second moment, each ``0 <= beta < 1``; (0.9, 0.999) by default.
        eps: Added to the root of the second moment; 1e-8 by default.
        weight_decay: Decoupled weight decay (Loshchilov & Hutter, 2019); for ``"sgd"`` added to the gradient. 0 by
            default.
        max_grad_norm: Scale the gradient down to this Euclidean norm; 0 disables clipping. 1 by default.
        optimizer: ``"adamw"``, the default; ``"adamw8bit"``, whose moments take 2 bytes a weight instead of 8 (the
            server needs ``gradwire[quantize]``); ``"sgd"`` or ``"muon"`` (Jordan et al. 2024), which updates
            embeddings, heads, norms and biases by AdamW. Each keeps moments of its own.
        momentum: For ``"sgd"`` (0.9 by default) and ``"muon"`` (0.95); refused with the others.
        head_learning_rate: Step size of the run's own head; by default the same. A run without one refuses it.
        decay: The weights that decay: ``"all"``, the default, or ``"matrices"`` only (no norms and
            biases).
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    optimizer: Literal["adamw", "adamw8bit", "sgd", "muon"]
    momentum: float | None
    head_learning_rate: float | None
    decay: Literal["all", "matrices"]


OPTIMIZER: OptimizerOptions = {"betas": (0.9, 0.999), "eps": 1e-8, "max_grad_norm": 1.0, "optimizer": "adamw"}
"""Options that are not off by default."""


def optim_step(learning_rate: float | None, on_nonfinite: OnNonFinite, options: OptimizerOptions) -> pb.OptimStep:
    """Build the message of an optimizer step."""
    arguments: dict[str, Any] = {**OPTIMIZER, **options}
    betas, decay = arguments.pop("betas"), arguments.pop("decay", "all")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise InvalidArgumentError(f"betas are two numbers, not {betas!r}", field="betas", rule="two numbers")
    if decay not in ("all", "matrices"):
        raise InvalidArgumentError(
            f'decay is "all" or "matrices", not {decay!r}', field="decay", rule='"all" or "matrices"'
        )
    return message(
        pb.OptimStep,
        learning_rate=learning_rate or 0.0,
        default_learning_rate=learning_rate is None,
        beta1=betas[0],
        beta2=betas[1],
        decay_matrices_only=decay == "matrices",
        skip_nonfinite=skips(on_nonfinite),
        **arguments,
    )


def loss_call(
    losses: LossCatalogue,
    batch: Batch,
    loss_fn: str,
    loss_kwargs: Mapping[str, Any] | None,
    outputs: Sequence[Output],
    **others: Any,
) -> tuple[pb.LossCall, dict[str, Column]]:
    """Build the message of a loss, and the columns of its batch; ``others`` are further fields of the message."""
    loss = losses.get(loss_fn)
    kwargs = kwargs_json(loss, loss_kwargs)
    columns = to_columns(loss.name, loss.fields, batch)
    padded = maybe_padded(loss.fields, batch, columns)
    call = message(
        pb.LossCall,
        loss_fn=loss.name,
        loss_kwargs_json=kwargs,
        outputs=_listed(outputs),
        maybe_padded=padded,
        **others,
    )
    return call, columns


def forward_scores(
    batch: Batch, outputs: Sequence[Output], model: str | Checkpoint | None, temperature: float
) -> Request:
    """Build the request for token scores without a loss."""
    _check_temperature(temperature)
    columns = to_columns("forward", SCORING_FIELDS, batch)
    call = message(
        pb.LossCall,
        outputs=_listed(outputs),
        model=model_path(model),
        temperature=temperature,
        maybe_padded=maybe_padded(SCORING_FIELDS, batch, columns),
    )
    return Request.of(pb.Operation(forward=call), columns)


def kept_forward(batch: Batch, scores: Sequence[Output], weight: float, temperature: float) -> Request:
    """Build the first half of a client-side loss; checks the arguments of the second half as well."""
    _check_temperature(temperature)
    message(pb.Backward, weight=weight)
    columns = to_columns("forward_backward_custom", SCORING_FIELDS, batch)
    padded = maybe_padded(SCORING_FIELDS, batch, columns)
    call = message(pb.KeptForward, scores=_listed(scores), temperature=temperature, maybe_padded=padded)
    return Request.of(pb.Operation(kept_forward=call), columns)


def as_rows(batch: Batch | Sequence[Any]) -> Batch:
    """Return a batch unchanged; wrap plain rows of token ids into a batch."""
    if isinstance(batch, Mapping) or (isinstance(batch, Sequence) and batch and isinstance(batch[0], Mapping)):
        return batch
    return {"input_ids": batch}


def message(kind: type[M], /, **values: Any) -> M:
    """Build a protobuf message from values.

    Raises:
        InvalidArgumentError: A value does not fit its field; names the argument.
    """
    try:
        return kind(**values)
    except (TypeError, ValueError):
        for name, value in values.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError):
                rule = _accepted(kind.DESCRIPTOR.fields_by_name[name])
                raise InvalidArgumentError(
                    f"{name} is {repr(value)[:SHOWN_CHARS]}; it must be {rule}", field=name, rule=rule
                ) from None
        raise


def _accepted(field: Any) -> str:
    """Say in words what a field of a message takes."""
    one, many = _NUMBERS_AND_TEXTS.get(field.cpp_type, ("another value", "other values"))
    if not field.is_repeated:
        return one
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_accepted(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        return f"a mapping from {key} to {value}"
    return f"a list of {many}"


def skips(on_nonfinite: str) -> bool:
    if on_nonfinite not in ("error", "skip"):
        raise InvalidArgumentError(
            f'on_nonfinite is "error" or "skip", not {on_nonfinite!r}', field="on_nonfinite", rule="error or skip"
        )
    return on_nonfinite == "skip"


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:  # the wire would take 0 for its default
        raise InvalidArgumentError(
            f"temperature is {temperature}; it divides the logits and must be positive", field="temperature", rule="> 0"
        )


def _listed(names: Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names
