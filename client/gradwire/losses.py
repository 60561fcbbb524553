"""The server's losses, and the checks of a call against their declarations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gradwire.descriptions import LossInfo
from gradwire.errors import InvalidArgumentError, UnknownLossError, did_you_mean, type_of
from gradwire.results import Checkpoint

CALLED_ELSEWHERE = {
    **dict.fromkeys(("sft", "nll", "ce", "lm", "language_modeling", "clm"), "causal_lm"),
    **dict.fromkeys(("reward", "rm", "bradley_terry", "reward_model"), "reward_modeling"),
}
"""Names of losses in other trainers, and of recipes -> ours."""


class LossCatalogue:
    """Losses by name; refreshed whenever the server's list is fetched."""

    def __init__(self) -> None:
        self._losses: dict[str, LossInfo] = {}

    def update(self, losses: Iterable[LossInfo]) -> None:
        self._losses = {loss.name: loss for loss in losses}

    def get(self, name: str | None) -> LossInfo:
        """Return the loss of this name.

        Raises:
            UnknownLossError: No such loss; the message lists the available ones.
        """
        if not isinstance(name, str):
            custom = "; forward_backward_custom takes a loss of your own" if callable(name) else ""
            raise InvalidArgumentError(f"loss_fn is the name of a loss, not {type_of(name)}{custom}", field="loss_fn")
        if name not in self._losses:
            known, meant = ", ".join(sorted(self._losses)) or "none", CALLED_ELSEWHERE.get(name.lower(), name)
            raise UnknownLossError(
                f"there is no loss {name!r}{did_you_mean(meant, self._losses)}; the server has: {known}",
                field="loss_fn",
                rule="a registered loss",
            )
        return self._losses[name]


def kwargs_json(loss: LossInfo, loss_kwargs: Mapping[str, Any] | None) -> str:
    """Encode ``loss_kwargs`` as JSON after checking the names against the loss's schema; the server checks values.

    Raises:
        InvalidArgumentError: A name is unknown or missing, or a value cannot be encoded as JSON.
    """
    if not isinstance(loss_kwargs, Mapping | None):
        raise InvalidArgumentError(
            f"loss_kwargs is a mapping from argument to value, not {type_of(loss_kwargs)}",
            field="loss_kwargs",
            rule="a mapping",
        )
    kwargs = dict(loss_kwargs or {})
    known = loss.kwargs_schema.get("properties", {})
    for name in kwargs:
        if name not in known:
            raise InvalidArgumentError(
                f"{loss.name} has no argument {name!r}{did_you_mean(name, known)}; it takes"
                f" {', '.join(known) or 'none'}",
                field=str(name),
                rule="a declared argument",
            )
    for name in loss.kwargs_schema.get("required", []):
        if name not in kwargs:
            raise InvalidArgumentError(f"{loss.name} needs the argument {name!r}", field=name, rule="required")
    for name, value in kwargs.items():
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"{loss.name}: {name} = {value!r} cannot be sent: {error}", field=name, rule="a JSON value"
            ) from None
    return json.dumps(kwargs, default=_plain)


def model_path(model: str | Checkpoint | None) -> str:
    """Return the wire name of a model: a model's name, ``"base"``, ``"ema"``, or a checkpoint's path."""
    return model.path if isinstance(model, Checkpoint) else model or ""


def _plain(value: Any) -> Any:
    if isinstance(value, Checkpoint):
        return value.path
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type_of(value)} is not a JSON value")
