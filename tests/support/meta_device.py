"""A device without numbers: what would wait for a GPU, or fail on one, raises on a machine that has none.

Tensors on torch's device "meta" have shapes and no numbers. Beside what that device itself refuses, the mode here
refuses every use of a tensor whose result would have to come to the host, and every operation that mixes a tensor of
the host with one of the device. Copies to the host through ``gradwire_losses.host.fetched`` are counted, and give
numbers that a test chooses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gradwire_losses import host
from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.split_model import SplitModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

META = torch.device("meta")
WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2",
    "aten::unique_consecutive", "aten::is_nonzero", "aten::equal", "aten::bincount", "aten::repeat_interleave",
}  # fmt: skip
"""Operations whose result, or its shape, depends on numbers."""
COPIES = {"aten::_to_copy", "aten::copy_"}


class WaitsForDevice(AssertionError):
    """Something would wait for a GPU, or fail on one."""


class Numberless(TorchDispatchMode):
    """Refuse what would wait for the device or mixes it with the host.

    Attributes:
        calls: Name of each operation on the device -> how often it was called.
        sizes: Elements of each float32 tensor that an operation made on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_device = [each for each in tensors if each.is_meta]
        name = func._schema.name
        if on_device:
            self._check(name, args, kwargs, tensors, on_device)
            self.calls[name] = self.calls.get(name, 0) + 1
        result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.is_meta]
        if on_device and not func._schema.is_mutable:
            fresh = [each for each in made if each.dtype == torch.float32 and not each._is_view()]
            self.sizes += [each.numel() for each in fresh]
        return result

    @property
    def largest(self) -> int:
        """Elements of the largest of these tensors."""
        return max(self.sizes, default=0)

    def _check(self, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], on_device: Sequence[Tensor]) -> None:
        if name in WAITS and not (name == "aten::repeat_interleave" and kwargs.get("output_size")):
            raise WaitsForDevice(f"{name} waits for the device")
        if name in COPIES:
            target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
            if target.type != "meta":
                raise WaitsForDevice(f"{name} copies to the host")
            return
        if any(not each.is_meta and each.ndim for each in tensors):
            raise WaitsForDevice(f"{name} mixes a tensor of the host with one of the device")
        indices = tree_leaves(args[1]) if name in ("aten::index", "aten::index_put", "aten::index_put_") else []
        if any(isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool for index in indices):
            raise WaitsForDevice(f"{name} by a mask on the device waits for it")


Numbers = Callable[[Tensor], Tensor]


@contextmanager
def counted_copies(monkeypatch: pytest.MonkeyPatch, numbers: Numbers = torch.ones_like) -> Iterator[list[int]]:
    """Replace ``host.fetched``: one entry a copy, the number of tensors in it.

    Args:
        numbers: Makes the host's copy of a tensor, given zeros of its shape and dtype.
    """
    counts: list[int] = []

    def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
        if any(each.is_meta for each in tensors):
            counts.append(len(tensors))
        zeros = (torch.zeros(each.shape, dtype=each.dtype) if each.is_meta else each for each in tensors)
        return [numbers(copy) if each.is_meta else copy for each, copy in zip(tensors, zeros, strict=True)]

    with monkeypatch.context() as patch:
        patch.setattr(host, "fetched", fetched)
        yield counts


def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put every model that is loaded from now on, and so its adapters, on the device without numbers."""
    load = ModelPool.load

    def loaded(self: ModelPool, *args: Any, **kwargs: Any) -> SplitModel:
        split_model = load(self, *args, **kwargs)
        split_model.model.to(META)
        split_model.replays = False  # a CPU's forwards are not recorded there
        return split_model

    # The fused step itself computes with shapes; only its list of devices leaves this one out.
    optimizer = importlib.import_module("torch.optim.optimizer")
    devices = [*optimizer._get_fused_kernels_supported_devices(), "meta"]
    autocast = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": kind != "meta" and autocast(kind))
    monkeypatch.setattr(ModelPool, "load", loaded)
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: devices)
