"""Forwards on a CPU, recorded to be computed again without the model's Python, which takes as long as a small layer.

A forward is a list of operations on tensors and of calls of kernels. Computing them again in the same memory gives the
forward of whatever numbers are in its inputs then, if no number in a tensor decided what was computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire_server.engine.model.layers.cpu_kernels import noting_calls
from gradwire_server.engine.threads import products

ALIGNMENT = 64
"""Bytes, as of torch's own tensors."""

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
_REFUSED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
"""Tags of what gives other than tensors of one shape, or something else each time."""
_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu.default
"""Has such a tag for its dropout, which pages do without."""


class Memory:
    """Memory of recorded forwards, where others take a tensor's place as soon as nobody holds it.

    Forwards share it: none is computed again before the states of another one were used.
    """

    def __init__(self) -> None:
        self._places: dict[int, Any] = {}
        self._lent: dict[int, weakref.ref[Any]] = {}
        self._unused: dict[int, list[int]] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """An uninitialised tensor of this one's shape and strides."""
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        nbytes = tensor.itemsize * (1 + sum((count - 1) * step for count, step in steps)) if tensor.numel() else 0
        step = max(ALIGNMENT, 1 << (nbytes.bit_length() - 3 if nbytes > 8 else 0))  # so that sizes are few
        size = (nbytes // step + 1) * step
        unused = self._unused.setdefault(size, [])
        if unused:
            address = unused.pop()
        else:
            whole = np.empty(size + ALIGNMENT, np.uint8)
            place = whole[-whole.ctypes.data % ALIGNMENT :][:size]
            address = place.ctypes.data
            self._places[address] = place
        lent = self._places[address][:]
        self._lent[address] = weakref.ref(lent, lambda _: unused.append(address))
        return torch.frombuffer(lent, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in this memory."""
        return tensor.untyped_storage().data_ptr() in self._places

    def kept(self, tensor: Tensor) -> Tensor:
        """The same numbers for as long as the memory is there; a tensor that is in it does not hold its place so."""
        place = self._places.get(tensor.untyped_storage().data_ptr())
        if place is None:
            return tensor
        own = torch.frombuffer(place, dtype=tensor.dtype)
        return own.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _Recorder(TorchDispatchMode):
    """Notes what is computed in its body.

    Attributes:
        calls: The calls that compute it again.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory, self._threads = memory, torch.get_num_threads()
        self._given: list[Tensor] = []
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_refused(func):
            raise RuntimeError(f"{func} depends on the numbers in a tensor")
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        if func.overloadpacket in _ALLOCATIONS:
            return self._memory.like(result)
        changes = func._schema.is_mutable
        if not changes and _storages(result) <= _storages((args, kwargs)):
            return result
        args, kwargs = _each(self._memory.kept, args), _each(self._memory.kept, kwargs)
        if changes:
            self._note(partial(func, *args, **kwargs))
            return result
        own = _each(self._memory.like, result)
        into = _each(self._memory.kept, own)
        _copy(result, into)
        fills = _filling(func) if isinstance(own, Tensor) else None
        if fills is None:
            self._note(lambda: _copy(func(*args, **kwargs), into))
        else:
            self._note(partial(fills, *args, **kwargs, out=into))
        return own

    def note_kernel(self, call: Callable[[], object], given: Sequence[object]) -> None:
        """Note a call of a kernel, which has addresses of these tensors."""
        self._given += [each for each in given if isinstance(each, Tensor) and not self._memory.has(each)]
        self.calls.append(call)

    def _note(self, call: Callable[[], object]) -> None:
        self.calls.append(call if torch.get_num_threads() == self._threads else partial(_by_all, call))


@cache
def _is_refused(func: Any) -> bool:
    return func is not _ATTENTION and bool(_REFUSED.intersection(func.tags))


def recorded(compute: Callable[[], Tensor], memory: Memory) -> Callable[[], Tensor]:
    """Record a computation without gradients; returns what computes it again.

    Raises:
        RuntimeError: Numbers in tensors decide what is computed.
    """
    recorder = _Recorder(memory)
    with recorder, noting_calls(recorder.note_kernel):
        states = compute()

    def again() -> Tensor:
        for call in recorder.calls:
            call()
        return states

    return again


def _each(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """The same with what a function makes of each tensor."""
    if isinstance(nested, Tensor):
        return function(nested)
    if isinstance(nested, tuple | list):
        return type(nested)(_each(function, part) for part in nested)
    if isinstance(nested, dict):
        return {name: _each(function, part) for name, part in nested.items()}
    return nested


def _tensors(nested: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _each(found.append, nested)
    return found


def _storages(nested: Any) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in _tensors(nested)}


def _copy(result: Any, into: Any) -> None:
    for own, each in zip(_tensors(into), _tensors(result), strict=True):
        own.copy_(each)


def _by_all(call: Callable[[], object]) -> None:
    with products():
        call()


@cache
def _filling(func: Any) -> Any:
    """The operation that writes what ``func`` gives into ``out``, if there is one with its arguments."""
    filling = getattr(func.overloadpacket, "out", None)
    if filling is None:
        return None
    own, of_filling = ([each.name for each in some._schema.arguments] for some in (func, filling))
    return filling if [*own, "out"] == of_filling else None
