"""Gradient accumulation that averages each loss over its own count, across any number of calls.

Buffers hold sums of unnormalised gradients, one set per key (loss name, unit of its terms), together with the count to
divide each by. Division happens once, at the step, so two halves of a batch and one step equal the whole batch and one
step. An operation collects into its own buffers and merges them once it has succeeded, so a failed operation leaves the
accumulation unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

import torch
from gradwire_losses import host
from torch import Tensor, nn

from gradwire_server.engine.executor import Executor
from gradwire_server.engine.lanes import Gradients, Key, LaneTree, Sums
from gradwire_server.engine.model.placement import is_sharded, placed_like, total_norm, total_norms
from gradwire_server.engine.training.columns import BatchParts, is_part


class GradientCollector:
    """Float32 gradients of one operation by key; a context manager around its backward passes.

    Args:
        parameters: The trained parameters by name.
        executor: Computes the passes; by default this process alone.

    Attributes:
        by_key: Key -> parameter name -> summed gradient of this process; valid once the context has ended without an
            error, and that of all processes after :meth:`share`.
        divided: Whether weights are divided among the processes, whose gradients each backward adds then: in the order
            of the steps, not of the lanes.
        counts: Whether this process's gradients are not those of another one, too, that are added to them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], executor: Executor | None = None) -> None:
        self.by_key: Sums = {}
        self._parameters, self._executor = parameters, executor or Executor()
        self.divided = any(map(is_sharded, parameters.values()))
        self.counts = self._executor.counts or not self.divided
        self._key: Key | None = None
        self._lane = self._executor.own.start
        self._tree = LaneTree(self._lane)

    def __enter__(self) -> Self:
        for parameter in self._parameters.values():
            parameter.grad = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(_Widen(self, name))
            for name, parameter in self._parameters.items()
            if parameter.dtype not in (torch.float32, torch.float64)
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._park()
        for hook in self._hooks:
            hook.remove()
        if kind is not None:
            self.by_key.clear()
        else:
            self._tree.add(self._lane, self.by_key)
            self.by_key = self._tree.total(self._executor.own.stop)

    def share(self, device: torch.device) -> None:
        """Add the gradients of all processes, which are on this device."""
        if not self.divided:
            self.by_key = self._executor.reduce(self.by_key, device)
            return
        whole = {
            key: {name: each for name, each in own.items() if not is_sharded(each)} for key, own in self.by_key.items()
        }
        if any(whole.values()):
            for key, own in self._executor.reduce(whole, device, of_all=True).items():
                self.by_key[key] |= own

    def backward(
        self, key: Key, outputs: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool = False
    ) -> None:
        """Add the gradient of ``sum(outputs . gradients)`` to the buffers of a key."""
        self.collect(key)
        torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)

    def collect(self, key: Key, lane: int | None = None) -> None:
        """Direct the following backward passes to the buffers of this key, in a lane: by default the same as before."""
        if lane is not None and lane != self._lane and not self.divided:
            self._park()
            self._tree.add(self._lane, self.by_key)
            self._key, self.by_key, self._lane = None, {}, lane
        if key == self._key:
            return
        self._park()
        for name, gradient in self.by_key.setdefault(key, {}).items():
            parameter = self._parameters[name]
            if parameter.dtype == gradient.dtype:
                parameter.grad = gradient
        self._key = key

    def drop(self) -> None:
        """Direct the following backward passes to no buffers: their gradients are lost."""
        self._park()
        self._key = None

    def add(self, name: str, gradient: Tensor) -> None:
        """Add a gradient of lower precision to the current key's buffer."""
        if self._key is None:
            return
        buffers = self.by_key[self._key]
        if name in buffers:
            buffers[name].add_(gradient)
        else:
            buffers[name] = gradient.float()

    def norm(self) -> Tensor:
        """Norm of all gradients, 0-d. It may overflow; :meth:`finite` then tells whether the gradients are finite."""
        return total_norm(self.gradients)

    def finite(self) -> bool:
        """Whether all gradients are finite; waits for the device."""
        (largest,) = host.fetched([total_norm(self.gradients, norm_type=float("inf"))])
        return bool(largest.isfinite())

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients of all keys, in the parameters' order, as that of a step."""
        buffers = self.by_key.values()
        return [own[name] for own in buffers for name in self._parameters if name in own]

    def _park(self) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                if self._key is not None:
                    self.by_key[self._key][name] = parameter.grad
                parameter.grad = None


def shared_norms(collectors: Sequence[GradientCollector], device: torch.device) -> list[Tensor]:
    """Add the gradients of all processes, which are on this device; return each one's norm, 0-d."""
    for collector in collectors:
        collector.share(device)
    return total_norms([collector.gradients for collector in collectors])


class _Widen:
    """Hook that moves a parameter's low-precision gradient into the float32 buffer as soon as it is complete."""

    def __init__(self, collector: GradientCollector, name: str) -> None:
        self.collector = collector
        self.name = name

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.collector.add(self.name, parameter.grad)
        parameter.grad = None


class GradientAccumulator:
    """Gradients accumulated since the last step.

    Attributes:
        num_operations: Number of merged operations.
        parts: Parts of a batch that wait for the last one: no gradient of them is here yet. None if there are none.
    """

    def __init__(self) -> None:
        self.num_operations = 0
        self.parts: BatchParts | None = None
        self._sums: dict[Key, Gradients] = {}
        self._counts: dict[Key, float] = {}
        self._norm: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing has been merged since the last step."""
        return not self._counts

    @property
    def counts(self) -> Mapping[Key, float]:
        """Key -> divisor of its sum."""
        return self._counts

    def merge(
        self,
        gradients: Mapping[Key, Gradients],
        counts: Mapping[Key, float],
        *,
        scale: float = 1.0,
        norm: Tensor | None = None,
    ) -> None:
        """Add an operation's gradients, times ``scale``, and its counts; takes ownership of the given buffers.

        A sum stays a sum: the count of unit ``"sum"`` does not grow.

        Args:
            norm: Norm of the gradients without ``scale``, 0-d, if it is known.
        """
        self.num_operations += 1
        alone = self.num_operations == 1 and len(gradients) == 1 and scale == 1.0
        self._norm = norm if alone else None
        for key, buffers in gradients.items():
            if scale != 1.0 and buffers:
                torch._foreach_mul_(list(buffers.values()), scale)
            held = self._sums.setdefault(key, {})
            shared = [name for name in buffers if name in held]
            if shared:
                torch._foreach_add_([held[name] for name in shared], [buffers[name] for name in shared])
            held |= {name: gradient for name, gradient in buffers.items() if name not in held}
        for key, count in counts.items():
            self._counts[key] = count if key[1] == "sum" else self._counts.get(key, 0.0) + count

    def normalised(self) -> tuple[Gradients, float]:
        """Gradients by parameter name, and the factor still to multiply them by.

        With one key these are the accumulator's own buffers, and the factor is one over its count. With several keys
        they are new tensors: the total of each key's sum divided by its count. A key with count 0 contributes nothing.
        """
        keys = [key for key, count in sorted(self._counts.items()) if count and self._sums.get(key)]
        if not keys:
            return {}, 1.0
        if len(keys) == 1:
            return self._sums[keys[0]], 1.0 / self._counts[keys[0]]
        total: Gradients = {}
        for key in keys:
            for name, gradient in self._sums[key].items():
                part = gradient / self._counts[key]
                total[name] = total[name].add_(part) if name in total else part
        return total, 1.0

    @property
    def norm(self) -> Tensor | None:
        """Norm of the gradients of :meth:`normalised` without the factor, 0-d; None if it is not known."""
        return self._norm

    def clear(self) -> None:
        self.num_operations = 0
        self.parts = None
        self._sums.clear()
        self._counts.clear()
        self._norm = None

    @property
    def num_sums(self) -> int:
        """Number of tensors in :meth:`sums`."""
        return sum(map(len, self._sums.values()))

    def sums(self) -> dict[str, Tensor]:
        """``"loss|unit|parameter"`` -> the sum itself, not a copy."""
        return {"|".join((*key, name)): value for key, sums in self._sums.items() for name, value in sums.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of :meth:`sums`, and the parts of a batch, which are copied."""
        return self.sums() | (self.parts.state_tensors() if self.parts else {})

    def release_tensors(self) -> None:
        """Give up the tensors of :meth:`tensors`, which somebody else keeps until :meth:`put_tensors`."""
        self._sums.clear()
        if self.parts:
            self.parts.release()

    def put_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors, as of :meth:`tensors`, as this accumulation's own, without a copy of the sums."""
        if self.parts:
            self.parts.put(tensors)
        for path, tensor in tensors.items():
            if is_part(path):
                continue
            loss, unit, name = path.rsplit("|", 2)
            self._sums.setdefault((loss, unit), {})[name] = tensor

    def state_tensors(self) -> dict[str, Tensor]:
        """The accumulation as tensors.

        ``"loss|unit|parameter"`` -> the sum itself, not a copy; ``"loss|unit|"`` -> its count, float64; ``"||"`` -> the
        number of operations. Empty if nothing is accumulated. Parts of a batch are as of
        :meth:`.columns.BatchParts.state_tensors`.
        """
        state = self.tensors()
        if self.empty:
            return state
        state |= {"|".join((*key, "")): torch.tensor(n, dtype=torch.float64) for key, n in self._counts.items()}
        return state | {"||": torch.tensor(self.num_operations, dtype=torch.float64)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
        """Replace the accumulation; each sum goes to the place of its parameter in ``masters``."""
        self.clear()
        self.parts = BatchParts.of_state_tensors(tensors) or None
        for path, tensor in tensors.items():
            if is_part(path):
                continue
            loss, unit, name = path.rsplit("|", 2)
            if not loss:
                self.num_operations = int(tensor.item())
            elif name:
                self._sums.setdefault((loss, unit), {})[name] = placed_like(tensor.clone(), masters[name])
            else:
                self._counts[loss, unit] = tensor.item()
