"""peft's configuration of an adapter, from a run's settings."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from gradwire_proto.v1 import training_pb2
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.model.layers.read_weights import layers_read
from gradwire_server.engine.model.loading.quantization import QuantizedLinear
from gradwire_server.engine.model.trunk import trunk_of
from gradwire_server.engine.model.vision.image_tokens import takes_images

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

ALL_LINEAR, OUTPUT_HEAD, VISION = "all-linear", "lm_head", "vision"
"""Names of target modules with a meaning of their own; see :func:`lora_config`."""
MAMBA = frozenset({"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"})
"""Models on whose ``out_proj`` peft refuses an adapter, because their kernels read its weight."""
ROUTER_PARAMETER = "gate.weight"
"""The router's weight in peft's targets of a mixture of experts."""


def lora_config(model: PreTrainedModel, settings: training_pb2.LoraSettings) -> LoraConfig:
    """peft's configuration of an adapter on a model.

    Target modules are names of layers, or ends of names. ``"all-linear"`` stands for every linear layer but the output
    head, the routers of experts and, in a model that takes images, its vision part, and is the default; ``"lm_head"``
    for the output head, whatever the model calls it; ``"vision"`` for every linear layer of the vision part, with those
    that lead from it into the language model.

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
    if unknown := _unknown(model, named):
        known = ", ".join(sorted({name.rpartition(".")[2] for name in _linear_layers(model)}))
        message = f"the model has no layer {unknown[0]!r}; its linear layers are {known}"
        raise refuse("target_modules", message, f"of {known}, {ALL_LINEAR}, {OUTPUT_HEAD}")
    if passed_over := [name for name in sorted(layers_read(model)) if _matches(name, named)]:
        raise refuse(
            "target_modules",
            f"the model reads the weight of {passed_over[0]!r} itself and does not call the layer for it, so that an"
            " adapter there would be passed over: leave it out of target_modules",
            "layers that the model calls",
        )
    every = not settings.target_modules or ALL_LINEAR in settings.target_modules
    targets: str | list[str] = ALL_LINEAR if every else named
    if takes_images(model.config):
        targets = sorted({*named, *_parts(model, language=every, vision=VISION in settings.target_modules)})
        every = False
    elif VISION in settings.target_modules:
        raise refuse("target_modules", f'the model takes no images, so no layer is its "{VISION}"', "no vision")
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=cast(int, settings.alpha or 2.0 * settings.rank),
        lora_dropout=settings.dropout,
        target_modules=targets,
        bias="none",
        task_type="CAUSAL_LM",
    )
    if every:
        config.exclude_modules = _left_out(model)
        experts = _resolve_experts(config, model)
        if named:  # peft knows "all-linear" only alone
            found = config.target_modules if experts else _linear_layers(model)
            config.target_modules = sorted({*cast(Iterable[str], found), *named})
    return config


def _left_out(model: PreTrainedModel) -> list[str] | None:
    """Names of linear layers that "all-linear" leaves out, because models read their weights or their tuples.

    They are those of which :func:`.layers_read` tells, projections of state-space layers whose kernels do so on a GPU
    alone, routers that return more than a product, and subclasses of Linear that compute something else.
    """
    names = {"dt_proj"} | ({"out_proj"} if model.config.model_type in MAMBA else set())
    read = layers_read(model)
    left_out = [
        name
        for name, module in model.named_modules()
        if _is_no_product(module) or name in read or name.rpartition(".")[2] in names
    ]
    return left_out or None


def _is_no_product(layer: nn.Module) -> bool:
    """Whether a linear layer is no mere product: a router that returns more, or a model's own subclass of Linear whose
    output has another shape than an adapter's product, as DeepSeek-V4's of groups, but not Falcon's."""
    router = type(getattr(layer, "base_layer", layer))
    if issubclass(router, nn.Linear) and "Router" in router.__name__:
        return True
    own = isinstance(layer, nn.Linear) and type(layer).__module__.startswith("transformers.models.")
    return own and type(layer).forward is not nn.Linear.forward and not _has_its_shape(cast(nn.Linear, layer))


@torch.no_grad()
def _has_its_shape(layer: nn.Linear) -> bool:
    """Whether the layer makes ``[1, 2, out_features]`` of ``[1, 2, in_features]``, without computing it."""
    weights = {name: each.to("meta") for name, each in (*layer.named_parameters(), *layer.named_buffers())}
    states = torch.empty(1, 2, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        output = torch.func.functional_call(layer, weights, (states,))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, 2, layer.out_features)


def _named(model: PreTrainedModel, given: Sequence[str]) -> list[str]:
    """The given names of layers, with the model's own name of the output head."""
    targets = [target for target in dict.fromkeys(given) if target not in (ALL_LINEAR, VISION)]
    if OUTPUT_HEAD in targets and not any(name.rpartition(".")[2] == OUTPUT_HEAD for name, _ in model.named_modules()):
        targets[targets.index(OUTPUT_HEAD)] = _head_name(model)
    return targets


def _unknown(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """The targets that name neither a layer nor, as peft reads them, weights of fused experts."""
    layers = [name for name, _ in model.named_modules()]
    missing = [target for target in targets if not any(_matches(name, [target]) for name in layers)]
    if not missing:
        return []
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=list(missing))
    convert_peft_config_for_transformers(config, model, None)
    return [target for target in missing if target in (config.target_modules or ())]


def _head_name(model: PreTrainedModel) -> str:
    found: Iterable[tuple[str, nn.Module]] = model.named_modules()
    return next(name for name, module in found if module is model.get_output_embeddings())


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers but the output head, adapters' own left out."""
    named, head = dict(model.named_modules()), _head_name(model)
    read = layers_read(model)
    wrapped = {name for name, module in named.items() if hasattr(module, "base_layer")}
    return [
        name
        for name, module in named.items()
        if name != head
        and name not in read
        and not _is_no_product(module)
        and isinstance(getattr(module, "base_layer", module), (nn.Linear, Conv1D))
        and not any(name.startswith(layer + ".") for layer in wrapped)
    ]


def _parts(model: PreTrainedModel, *, language: bool, vision: bool) -> list[str]:
    """Names of the linear layers of the language model, and of the vision part of the same model."""
    language_model: nn.Module = trunk_of(model)
    own = {id(module) for module in language_model.modules()}
    named = dict(model.named_modules())
    return [name for name in _linear_layers(model) if (language if id(named[name]) in own else vision)]


def _resolve_experts(config: LoraConfig, model: PreTrainedModel) -> bool:
    """Resolve "all-linear" on a mixture of experts.

    peft takes the names of an expert's layers for the fused experts alone, also where layers outside of them have these
    names: shared experts, and the MLPs of layers without experts. Those are targeted by the names of their weights. It
    would put an adapter on the routers as well. A router has few weights, which decide what every expert is trained on;
    who wants to train it names it.

    Returns:
        Whether the model has fused experts, and the settings are resolved.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(config, model, None)
    if config.target_parameters:
        targets = cast(Iterable[str], config.target_modules)
        left_out = [name for name in _linear_layers(model) if not _matches(name, targets)]
        held = {f"{_in_layer(name)}.weight" for name in left_out if not _is_quantized(model.get_submodule(name))}
        if len(left_out) > len(held) == 0:
            logger.warning("peft has no adapter for quantized layers beside the experts, first %s", left_out[0])
        config.target_parameters = sorted((set(config.target_parameters) | held) - {ROUTER_PARAMETER})
    return bool(config.target_parameters)


def _is_quantized(layer: nn.Module) -> bool:
    return isinstance(getattr(layer, "base_layer", layer), QuantizedLinear)


def _matches(name: str, targets: Iterable[str]) -> bool:
    """Whether peft takes a layer for one of its targets."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _in_layer(name: str) -> str:
    """A module's name without that of its layer, which all layers with such a module then share."""
    return re.sub(r"^.*\.layers\.\d+\.", "", name)


@contextmanager
def only_the_head_of_tied() -> Iterator[None]:
    """Keep peft from warning that an adapter is on one of two tied layers.

    It is meant so: the adapter changes the output head and not the embedding, and exports do not merge it into the
    weight that they share.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
        yield
