"""The LoRA adapters of one copy of a model, kept apart from the model.

peft chooses an adapter's layers, wraps them and draws its weights. It walks all of the model to do so, adapters
included, and its layers then hold every adapter. Here a layer that computes in spans (:mod:`.adapters`) keeps only two
parameters per adapter, outside the tree of modules, and any other layer holds an adapter only while it is in use. So
creating, using and deleting an adapter takes time that does not depend on how many others there are. Adapters on the
same layers as an earlier one (*alike*) are made by those layers alone, without a walk.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gradwire_losses.batch import sent
from peft import LoraConfig, PeftModel
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from transformers import PreTrainedModel

from gradwire_server.engine.model.adapters.expert_products import add_products
from gradwire_server.engine.model.adapters.layers import Active, LoraPair, SpanLinear
from gradwire_server.engine.model.adapters.products import Span

_SCALE = ("r", "lora_alpha", "lora_dropout")


@dataclass(frozen=True)
class _Layer:
    """A wrapped layer and its name in the model."""

    path: str
    layer: Any


@dataclass(frozen=True)
class _Alike:
    """Adapters on the same layers: the settings that peft has resolved, and the layers in the model's order.

    ``repeatable``: whether the layers can make another adapter in this order; those on fused experts are nested.
    """

    config: LoraConfig
    layers: Sequence[_Layer]
    repeatable: bool


@dataclass(frozen=True)
class _Adapter:
    """An adapter. ``held``: what its layers hold while they compute as peft does; empty if it computes in spans."""

    config: LoraConfig
    layers: Sequence[_Layer]
    held: Sequence[tuple[Any, Any]]

    @property
    def in_spans(self) -> bool:
        return not self.held


class AdapterSet:
    """Create, activate and remove adapters.

    Args:
        model: The model, whose layers are wrapped as adapters need them.
        exact: Whether a row's bits depend on that row alone (:mod:`..layers.exact_products`).
    """

    def __init__(self, model: PreTrainedModel, *, exact: bool = False) -> None:
        self._model = model
        self._peft: PeftModel | None = None
        self._layers: list[Any] = []
        self._alike: dict[object, _Alike] = {}
        self._adapters: dict[str, _Adapter] = {}
        self._active = Active(exact=exact)
        self._attached: str | None = None

    def __len__(self) -> int:
        return len(self._adapters)

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def config(self, name: str) -> LoraConfig:
        """An adapter's settings, with its target modules resolved."""
        return self._adapters[name].config

    def add(self, name: str, config: LoraConfig) -> Mapping[str, nn.Parameter]:
        """Add an adapter with the weights that peft draws for it from torch's global generator.

        Args:
            name: Name of letters, digits and hyphens, unique in this set.

        Returns:
            Name in the model, without the adapter's -> parameter, in the model's order.

        Raises:
            ValueError: peft refuses the settings.
        """
        self.use(None)
        alike = self._alike.get(_targets(config))
        if alike is None or not alike.repeatable:
            alike = self._inject(name, config)
        else:
            config = _with_scale(alike.config, config)
            for place in alike.layers:
                place.layer.update_layer(
                    name, config.r, lora_alpha=config.lora_alpha, target_name=place.path, config=config
                )
        parameters = {
            f"{place.path}.{_without(inner, name)}": parameter
            for place in alike.layers
            for inner, parameter in place.layer.named_parameters()
            if name in inner.split(".")
        }
        in_spans = not config.lora_dropout and all(type(place.layer) is SpanLinear for place in alike.layers)
        held: list[tuple[Any, Any]] = []
        for place in alike.layers:
            if type(place.layer) is SpanLinear:
                place.layer.pairs[name] = LoraPair.of(place.layer, name)
            held += _taken_out(place.layer, name)
        self._adapters[name] = _Adapter(config, alike.layers, () if in_spans else held)
        return parameters

    def remove(self, name: str) -> None:
        """Remove an adapter; unwrap the model's layers after the last one."""
        self.use(None)
        for place in self._adapters.pop(name).layers:
            if type(place.layer) is SpanLinear:
                del place.layer.pairs[name]
        if not self._adapters and self._peft is not None:
            self._peft.unload()
            self._peft, self._layers, self._alike = None, [], {}

    def use(self, name: str | None) -> None:
        """Compute all tokens with one adapter, or with none."""
        if name is None or self._adapters[name].in_spans:
            self.use_spans(() if name is None else (Span(name),))
        elif name != self._attached:
            self._detach()
            for holder, value in self._adapters[name].held:
                holder[name] = value.train(self._model.training) if isinstance(value, nn.Module) else value
            for layer in self._layers:
                layer.set_adapter(name)
                layer.enable_adapters(True)
            self._active.peft, self._attached = True, name

    def computes_in_spans(self, name: str) -> bool:
        """Whether an adapter can share a forward with others: it has no dropout and is only on linear layers."""
        return self._adapters[name].in_spans

    def use_spans(self, spans: Sequence[Span], device: torch.device | None = None) -> None:
        """Compute the tokens of each span with its adapter.

        Args:
            spans: Contiguous spans, starting at place 0.
            device: The model's device; given CUDA and several spans, grouped kernels may be used, and each span must
                have its ``stop``.
        """
        self._detach()
        ends = None
        if device is not None and device.type == "cuda" and len(spans) > 1:
            ends = sent(torch.tensor([span.stop for span in spans], dtype=torch.int32), device)
        self._active.set_spans(spans, ends)

    def _detach(self) -> None:
        if self._attached is None:
            return
        for place in self._adapters[self._attached].layers:
            _taken_out(place.layer, self._attached)
        for layer in self._layers:
            layer.enable_adapters(False)
        self._active.peft, self._attached = False, None

    def _inject(self, name: str, config: LoraConfig) -> _Alike:
        """Let peft add an adapter to layers that hold no other; they are left holding it."""
        targets = _targets(config)
        try:
            if self._peft is None:
                self._peft = PeftModel(self._model, config, adapter_name=name, autocast_adapter_dtype=False)
            else:
                self._peft.add_adapter(name, config, autocast_adapter_dtype=False)
        except Exception:  # whatever the error: peft has wrapped some layers already
            for module in self._model.modules():
                if isinstance(module, LoraLayer):
                    _taken_out(module, name)
            raise
        # For peft's own checks of further adapters, one configuration stands for all that are alike.
        kept = f"alike-{len(self._alike)}"
        self._peft.peft_config[kept] = self._peft.peft_config.pop(name)
        tuner: Any = self._peft.base_model
        tuner.active_adapter = kept
        found: Iterable[tuple[str, Any]] = self._model.named_modules()
        wrapped = [_Layer(path, module) for path, module in found if isinstance(module, LoraLayer)]
        self._layers = [place.layer for place in wrapped]
        for layer in self._layers:
            if type(layer) is LoraLinear:
                SpanLinear.replace(layer, self._active)
            elif type(layer) is ParamWrapper:
                add_products(layer)
            layer.train(self._model.training)
            layer.enable_adapters(False)
        layers = [place for place in wrapped if name in place.layer.lora_A or name in place.layer.lora_embedding_A]
        repeatable = not (config.rank_pattern or config.alpha_pattern) and not any(
            isinstance(place.layer, ParamWrapper) for place in layers
        )
        self._alike[targets] = _Alike(config, layers, repeatable)
        return self._alike[targets]


def _targets(config: LoraConfig) -> str:
    """Key of settings that choose the same layers: everything but rank, alpha and dropout."""
    settings = {key: value for key, value in config.to_dict().items() if key not in _SCALE}
    return repr({key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()})


def _with_scale(resolved: LoraConfig, config: LoraConfig) -> LoraConfig:
    """Settings resolved by peft, with the rank, alpha and dropout of others."""
    result = copy.copy(resolved)
    for key in _SCALE:
        setattr(result, key, getattr(config, key))
    return result


def _taken_out(layer: Any, name: str) -> list[tuple[Any, Any]]:
    """Remove an adapter from one of peft's layers: each of its dictionaries that had an entry, and the entry."""
    holders = [getattr(layer, attribute) for attribute in (*layer.adapter_layer_names, *layer.other_param_names)]
    return [(holder, holder.pop(name)) for holder in holders if name in holder]


def _without(path: str, name: str) -> str:
    return ".".join(part for part in path.split(".") if part != name)
