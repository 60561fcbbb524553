"""The memory of one micro-batch's forward and backward, found by computing them on meta tensors.

The engine's own code runs, without numbers, and every tensor that it allocates is counted until it is freed. So the
result has what autograd saves, what scoring keeps of the logits, and what exists for a moment only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from gradwire_losses.batch import Batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gradwire_server.engine.model.layers.activations import Activations
from gradwire_server.engine.model.meta_device import DeviceKind, estimating
from gradwire_server.engine.model.placement import storage_address
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.forward import Scoring
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.training.accumulation import GradientCollector

KEY = ("loss", "token")


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a micro-batch's forward and backward, beside weights and gradients.

    Attributes:
        activations: Tensors of the trunk that autograd keeps.
        logits: Tensors that scoring keeps besides for the backward.
        passing: Temporary tensors at the peak.
    """

    activations: float
    logits: float
    passing: float

    @property
    def peak(self) -> float:
        return self.activations + self.logits + self.passing


class TooManyOperationsError(Exception):
    """A step has more operations than are computed one by one here, as the model's own code loops over the tokens."""


class AllocationMeter(TorchDispatchMode):
    """Count the bytes of tensors allocated in the context and not freed yet.

    Args:
        known: Tensors that were there before and do not count.
        most_operations: How many operations the context may have; None for any number.

    Raises:
        TooManyOperationsError: In the context, at the first operation beyond.

    Attributes:
        bytes: Bytes at present.
        peak: Largest number of bytes so far.
    """

    def __init__(self, known: Iterable[Tensor], most_operations: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._left = most_operations
        self._seen = {storage_address(tensor) for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left is not None:
            if not self._left:
                raise TooManyOperationsError
            self._left -= 1
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.is_meta:
                self._count(value)
        self.peak = max(self.peak, self.bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        address, storage = storage_address(tensor), tensor.untyped_storage()
        if address not in self._seen:
            self._seen.add(address)
            self.bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, address, storage.nbytes())

    def _freed(self, address: int, count: int) -> None:
        self._seen.discard(address)
        self.bytes -= count


def step_bytes(
    policy: Policy,
    rows: int,
    tokens: int,
    names: set[str],
    budget: Budget,
    activations: Activations = Activations.KEEP,
    kind: DeviceKind = "cpu",
    most_operations: int | None = None,
    shared_tokens: int = 0,
) -> StepBytes:
    """Count a micro-batch of rows of one length.

    Args:
        policy: On meta tensors.
        tokens: Tokens of each row.
        names: Scores that the loss reads.
        budget: Limits for the logits.
        activations: How activations are handled, besides the policy's own setting.
        most_operations: How many operations are computed at most; None for any number.
        shared_tokens: First tokens that the rows have in common.

    Raises:
        TooManyOperationsError: The step has more.
    """
    lengths = torch.full((rows,), tokens)
    scored = torch.ones(rows, tokens, dtype=torch.bool)
    scored[:, 0] = False
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    ids[:, shared_tokens:] = torch.arange(rows)[:, None] % (policy.facts.vocab_size - 1) + 1
    batch = Batch(ids.flatten(), lengths, scored.flatten(), torch.ones_like(lengths))
    scoring, arranged = Scoring(policy, batch, names, 1.0, None, budget).arranged(training=True)
    parameters = policy.trainable_parameters()
    with GradientCollector(parameters) as collector:
        # As in every micro-batch but a step's first, gradients to add to exist already.
        collector.by_key[KEY] = {
            name: torch.empty_like(parameter, dtype=max_precision(parameter.dtype), requires_grad=False)
            for name, parameter in parameters.items()
        }
        model = policy.model
        known = [*model.parameters(), *model.buffers(), *parameters.values(), *collector.by_key[KEY].values()]
        meter = AllocationMeter(known, most_operations)
        kept: dict[str, int] = {}

        def compute() -> dict[str, Tensor]:
            hidden = policy.hidden(
                batch.input_ids, lengths, scoring.positions, training=True, activations=activations, arranged=arranged
            )
            kept["trunk"] = meter.bytes
            return scoring.scores(hidden, None)

        with meter, estimating(kind):
            scores = scoring.with_weights(compute)
            kept["scores"] = meter.bytes
            outputs = [score for score in scores.values() if score.requires_grad]
            policy.activate(training=True, activations=activations)
            collector.backward(KEY, outputs, [torch.empty_like(score) for score in outputs])
    return StepBytes(kept["trunk"], kept["scores"] - kept["trunk"], meter.peak - kept["scores"])


def max_precision(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the gradients of weights in this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
