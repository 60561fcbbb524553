"""peft's configuration of an adapter, from a run's settings."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from gradwire_proto.v1 import training_pb2
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.errors import OperationError

if TYPE_CHECKING:
    from peft import LoraConfig

ALL_LINEAR, OUTPUT_HEAD = "all-linear", "lm_head"
"""Names of target modules with a meaning of their own; see :func:`lora_config`."""
ROUTER_PARAMETER = "gate.weight"
"""The router's weight in peft's targets of a mixture of experts."""


def lora_config(model: PreTrainedModel, settings: training_pb2.LoraSettings) -> LoraConfig:
    """peft's configuration of an adapter on a model.

    Target modules are names of layers, or ends of names. ``"all-linear"`` stands for every linear layer but the output
    head and the routers of experts, and is the default; ``"lm_head"`` for the output head, whatever the model calls it.

    Raises:
        OperationError: INVALID_ARGUMENT, with the field.
    """
    from peft import LoraConfig

    def refuse(field: str, message: str, rule: str) -> OperationError:
        return OperationError(training_pb2.ERROR_CODE_INVALID_ARGUMENT, message, field=f"lora.{field}", rule=rule)

    if settings.rank < 1:
        raise refuse("rank", f"lora rank is {settings.rank}; it is at least 1", "rank >= 1")
    if settings.alpha < 0:
        raise refuse("alpha", f"lora alpha is {settings.alpha}; it is positive, or 0 for twice the rank", "alpha >= 0")
    if not 0 <= settings.dropout < 1:
        raise refuse("dropout", f"lora dropout is {settings.dropout}; it is in [0, 1)", "0 <= dropout < 1")
    named = _named(model, settings.target_modules)
    every = not settings.target_modules or ALL_LINEAR in settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha or 2.0 * settings.rank),
        lora_dropout=settings.dropout,
        target_modules=ALL_LINEAR if every else named,
        bias="none",
        task_type="CAUSAL_LM",
    )
    if every:
        experts = _leave_routers_out(config, model)
        if named:  # peft knows "all-linear" only alone
            found = config.target_modules if experts else _linear_layers(model)
            config.target_modules = sorted({*cast(Iterable[str], found), *named})
    return config


def _named(model: PreTrainedModel, given: Sequence[str]) -> list[str]:
    """The given names of layers, with the model's own name of the output head."""
    targets = [target for target in dict.fromkeys(given) if target != ALL_LINEAR]
    if OUTPUT_HEAD in targets and not any(name.rpartition(".")[2] == OUTPUT_HEAD for name, _ in model.named_modules()):
        targets[targets.index(OUTPUT_HEAD)] = _head_name(model)
    return targets


def _head_name(model: PreTrainedModel) -> str:
    found: Iterable[tuple[str, nn.Module]] = model.named_modules()
    return next(name for name, module in found if module is model.get_output_embeddings())


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers but the output head, adapters' own left out."""
    named, head = dict(model.named_modules()), _head_name(model)
    wrapped = {name for name, module in named.items() if hasattr(module, "base_layer")}
    return [
        name
        for name, module in named.items()
        if name != head
        and isinstance(getattr(module, "base_layer", module), (nn.Linear, Conv1D))
        and not any(name.startswith(layer + ".") for layer in wrapped)
    ]


def _leave_routers_out(config: LoraConfig, model: PreTrainedModel) -> bool:
    """Resolve "all-linear" on a mixture of experts, where it would put an adapter on the routers as well.

    A router has few weights, which decide what every expert is trained on; who wants to train it names it.

    Returns:
        Whether the model has fused experts, and the settings are resolved.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model, None)
    if config.target_parameters:
        config.target_parameters = sorted(set(config.target_parameters) - {ROUTER_PARAMETER})
    return bool(config.target_parameters)


@contextmanager
def only_the_head_of_tied() -> Iterator[None]:
    """Keep peft from warning that an adapter is on one of two tied layers.

    It is meant so: the adapter changes the output head and not the embedding, and exports do not merge it into the
    weight that they share.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        yield
