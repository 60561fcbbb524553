"""Linear layers whose weight a model reads itself, so that an adapter on the layer would be passed over.

State-space layers multiply with the weight of a projection, and others clamp one in training mode. A layer counts once
its weight or bias is used in any computation outside of the layer's own call; its dtype or shape may be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

_TRIED_TOKENS = 4
_READ: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()


def layers_read(model: PreTrainedModel) -> frozenset[str]:
    """Names of the layers that :func:`observe_reads` has found; a model on meta tensors is tried here."""
    if model not in _READ and model.device.type == "meta":
        try:
            with observe_reads(model), torch.no_grad():
                ids = torch.zeros(1, _TRIED_TOKENS, dtype=torch.long, device="meta")
                for training in (True, False):
                    model.train(training)(input_ids=ids, use_cache=False)
        except Exception:  # many models branch on values, which meta tensors do not have
            model.eval()
            _READ[model] = frozenset()
    return _READ.get(model, frozenset())


@contextmanager
def observe_reads(model: PreTrainedModel) -> Iterator[None]:
    """Find the layers whose weights the model reads in the forwards within, which use no adapter."""
    read: set[str] = set()
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not model.get_output_embeddings()
    }
    own = {name: type(layer) for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.__class__ = _observed(own[name])  # type: ignore[arg-type]  # types are hashable
            vars(layer)["read_by"] = read, name
        yield
    finally:
        for name, layer in layers.items():
            layer.__class__ = own[name]
            vars(layer).pop("read_by", None)
    _READ[model] = frozenset(read)


class _Weight(Tensor):
    """A weight that notes when a computation uses it."""

    read_by: tuple[set[str], str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ != "__get__" or func in (Tensor.data.__get__, Tensor.T.__get__, Tensor.mT.__get__):  # type: ignore[attr-defined]
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, _Weight) and hasattr(each, "read_by"):
                    found, name = each.read_by
                    found.add(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@cache
def _observed(kind: type) -> type:
    """A kind of layer that hands its weights out as :class:`_Weight`, except within its own call."""

    class Observed(kind):  # type: ignore[misc]
        read_by: tuple[set[str], str] | None = None

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            kept, self.read_by = self.read_by, None
            try:
                return super().__call__(*args, **kwargs)
            finally:
                self.read_by = kept

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if self.read_by is None or not isinstance(value, nn.Parameter):
                return value
            weight = value.detach().as_subclass(_Weight)
            weight.read_by = self.read_by
            return weight

    return Observed
