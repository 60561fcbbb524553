"""LoRA on the experts of a mixture of experts and on the layers beside them, by products of its factors.

The layers are peft's, which add ``scale * B_e A_e`` to the weights of every expert and compute with the sum: as large
as the experts themselves, made again in each forward, and kept for the backward. Here each token's products with the
factors of its experts are added to the product with their weights, ``x W_e^T + scale * (x A_e^T) B_e^T``, in groups as
transformers computes the experts, so that what an adapter adds is proportional to the tokens. The result is peft's, up
to rounding.

Legend: ``E`` experts; ``S`` pairs of a token and an expert, sorted by expert; ``I``, ``O`` features in and out;
``R`` rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_server.engine.model.adapters.layers import LoraPair, grouped_products_run
from gradwire_server.engine.model.meta_device import computes_as_cpu

GROUPED = "grouped_mm"
"""Name that transformers gives to experts computed by grouped products."""


def add_products(layer: ParamWrapper) -> None:
    """Let one of peft's wrappers of a parameter add products instead of weights.

    Its class stays, by whose name peft knows it.
    """
    vars(layer)["_activate_lora"] = partial(_with_adapter, layer)


@contextmanager
def _with_adapter(layer: ParamWrapper, active_adapters: list[str]) -> Iterator[None]:
    """Context in which a module computes with the active adapter; in the place of peft's own."""
    adapters = [name for name in active_adapters if name in layer.lora_A]
    module, weight = layer.get_base_layer(), layer.get_param()
    adapted: Any = None
    if len(adapters) == 1 and not torch.compiler.is_compiling():
        adapted = _adapted(layer, adapters[0], module, weight)
    if adapted is None:
        with ParamWrapper._activate_lora(layer, active_adapters):
            yield
        return
    vars(module)[layer.parameter_name] = adapted  # found before the module's parameter of this name
    try:
        yield
    finally:
        del vars(module)[layer.parameter_name]


def _adapted(layer: ParamWrapper, adapter: str, module: nn.Module, weight: Tensor) -> AdaptedWeight | Tensor | None:
    """The weight that the module computes with instead of its own; None to leave it to peft."""
    if weight.dim() == 2:
        pair = LoraPair.of(layer, adapter)
        return AdaptedWeight(weight, pair.b, pair.a, pair.scale) if type(module) is nn.Linear else None
    left, right, scale = layer.get_delta_factors(adapter)
    left, right = _with_rows(left), _with_rows(right)
    if _grouped(module, weight, left, right):
        return AdaptedWeight(weight, left, right, scale)
    # peft's own asks for an autocast that there is not on this device
    return torch.baddbmm(weight, left, right, alpha=scale) if weight.is_meta else None


class AdaptedWeight:
    """A weight and an adapter's factors, in the place of ``weight + scale * left @ right``.

    It can be the weight of a linear layer, or, transposed or not, the second factor of a grouped product.

    Args:
        weight: ``[O, I]`` of a layer, or ``[E, O, I]`` of experts.
        left: ``[O, R]`` or ``[E, O, R]``.
        right: ``[R, I]`` or ``[E, R, I]``.
        scale: Scale of the factors' product.
    """

    def __init__(self, weight: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        self._weight, self._left, self._right, self._scale = weight, left, right, scale

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        return self._weight.device

    def transpose(self, first: int, second: int) -> AdaptedWeight:
        """Exchange the features in and out, the last two dimensions."""
        weight, left, right = (each.transpose(first, second) for each in (self._weight, self._left, self._right))
        return AdaptedWeight(weight, right, left, self._scale)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Tensor],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Compute one of torch's products of tokens ``[S, I]`` and weights."""
        tokens, adapted, *bias = args
        if not isinstance(adapted, cls):
            raise TypeError(f"{func} of an adapter's weights must have them as its second argument")
        with_kwargs = partial(func, **(kwargs or {}))
        first, second = adapted._left, adapted._right  # tokens are multiplied from the left, but by linear layers
        if func is F.linear:
            first, second = second, first
        added = with_kwargs(with_kwargs(tokens, first), second)
        return with_kwargs(tokens, adapted._weight, *bias).add_(added, alpha=adapted._scale)


def _with_rows(factor: Tensor) -> Tensor:
    """The tensor itself if its rows or its columns are contiguous, as grouped products need it, or a copy."""
    return factor if 1 in factor.stride()[-2:] else factor.contiguous()


def _grouped(experts: Any, *weights: Tensor) -> bool:
    """Whether transformers computes experts by grouped products, and these run with an adapter's factors."""
    config = getattr(experts, "config", None)
    if getattr(config, "_experts_implementation", None) != GROUPED or not hasattr(experts, "_apply_gate"):
        return False
    device, dtype = weights[0].device, weights[0].dtype
    # The kernels, also those of a CPU, take rows and columns of whole 16 bytes only.
    aligned = all(size * each.itemsize % 16 == 0 for each in weights for size in each.shape[-2:])
    return aligned and (device.type == "meta" or computes_as_cpu(device) or grouped_products_run(device, dtype))
