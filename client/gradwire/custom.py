"""Losses written on the client: receive scores from the server, send their gradients back.

The user's function maps scores to a loss. If the caller's process has imported torch, the scores are autograd leaves
and autograd computes the gradients; otherwise the function returns the gradients itself. This module never imports
torch; it uses the module that the caller imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gradwire_proto.codec import Column
from gradwire_proto.v1 import training_pb2 as pb

from gradwire.errors import InvalidArgumentError, type_of
from gradwire.results import Columns, LossResult, Timings
from gradwire.wire.entries import Request

Framework = Literal["torch", "numpy"]
CustomLoss = Callable[[Any, dict[str, Any]], Any]


def framework_in_use(framework: Framework | None) -> Framework:
    """Resolve the framework of the scores: the requested one, else torch if the caller imported it, else numpy."""
    if framework is None:
        return "torch" if "torch" in sys.modules else "numpy"
    if framework not in ("torch", "numpy"):
        raise InvalidArgumentError(f'framework is "torch" or "numpy", not {framework!r}', field="framework")
    if framework == "torch" and "torch" not in sys.modules:
        raise InvalidArgumentError('framework="torch" needs torch: import it first', field="framework")
    return framework


def check_loss(function: Any) -> None:
    """Check that a loss can be called with (batch, scores).

    Raises:
        InvalidArgumentError: It is no function, or takes other arguments.
    """
    if not callable(function):
        raise InvalidArgumentError(f"fn is the loss, a function, not {type_of(function)}", field="fn")
    try:
        taken = inspect.signature(function)
    except ValueError:  # a function in C need not tell its signature
        return
    try:
        taken.bind({}, {})
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise InvalidArgumentError(
            f"fn is called with two arguments, the batch and the scores; {name}{taken} cannot be: {error}",
            field="fn",
            rule="a function of (batch, scores)",
        ) from None


@dataclass
class CustomCall:
    """One ``forward_backward_custom`` call: from the scores to the gradients and the result.

    Attributes:
        batch: The batch as the user passed it.
        function: ``(batch, scores)`` -> loss, (loss, metrics), (loss, gradients) or (loss, gradients, metrics).
        weight: The number of rows or tokens that the loss averages over.
        framework: ``"torch"`` or ``"numpy"``: the type of the scores.
    """

    batch: Any
    function: CustomLoss
    weight: float
    framework: Framework
    loss: float = float("nan")
    forward: LossResult | None = None
    metrics: Mapping[str, float] | None = None

    def compute(self, result: pb.OperationResult, columns: Columns) -> Request:
        """Run the user's function on the scores."""
        self.forward = LossResult.from_wire(result, columns)
        torch = sys.modules["torch"] if self.framework == "torch" else None
        leaves: dict[str, Any] = {}
        for name, column in columns.items():
            leaves[name] = column.values.copy() if torch is None else torch.tensor(column.values, requires_grad=True)
        scores = {name: _rows(columns[name], leaf) for name, leaf in leaves.items()}
        loss, grads, metrics = self._parts(self.function(self.batch, scores), torch)
        if grads is None and torch is not None:
            names = list(leaves)
            of_leaves = torch.autograd.grad(loss, [leaves[name] for name in names], allow_unused=True)
            flat = {
                name: np.zeros_like(columns[name].values) if grad is None else grad.numpy()
                for name, grad in zip(names, of_leaves, strict=True)
            }
        else:
            flat = {name: _flat(name, columns[name], (grads or {}).get(name)) for name in leaves}
            for name in grads or {}:
                if name not in leaves:
                    raise ValueError(
                        f"got a gradient for {name!r}, which is not one of the requested scores {list(leaves)}"
                    )
        self.loss = float(loss.detach()) if hasattr(loss, "detach") else float(loss)
        self.metrics = {name: float(value) for name, value in (metrics or {}).items()}
        operation = pb.Operation(backward=pb.Backward(forward_seq=result.seq, weight=self.weight, loss=self.loss))
        gradients = {
            f"grad_{name}": Column(np.ascontiguousarray(values, np.float32), columns[name].levels)
            for name, values in flat.items()
        }
        return Request.of(operation, gradients)

    def _parts(self, given: Any, torch: Any) -> tuple[Any, Mapping[str, Any] | None, Mapping[str, Any] | None]:
        """Split the return value into loss, gradients (None: computed by autograd) and metrics."""
        loss, *rest = given if isinstance(given, tuple) else (given,)
        if torch is not None and isinstance(loss, torch.Tensor) and loss.requires_grad:
            if loss.numel() != 1:
                raise ValueError(f"a loss is one number; this one has the shape {tuple(loss.shape)}")
            if len(rest) > 1:
                raise ValueError("return the loss or (loss, metrics): torch's autograd gives the gradients")
            return loss, None, rest[0] if rest else None
        if not rest or not isinstance(rest[0], Mapping) or len(rest) > 2:
            raise ValueError(
                "return a torch loss that depends on the scores, or (loss, gradients) or (loss, gradients, metrics), "
                'where gradients maps the name of a score, e.g. "logprobs", to one array per row'
            )
        return loss, rest[0], rest[1] if len(rest) > 1 else None

    def result(self, result: pb.OperationResult, columns: Columns) -> LossResult:
        """Combine the user's loss and metrics with the counts and timings of both halves."""
        backward = LossResult.from_wire(result, columns)
        forward = self.forward or backward
        return LossResult(
            loss=self.loss,
            metrics={"loss": self.loss} | dict(self.metrics or {}),
            outputs=forward.outputs,
            num_sequences=forward.num_sequences,
            num_tokens=forward.num_tokens,
            num_loss_tokens=forward.num_loss_tokens,
            num_computed_tokens=forward.num_computed_tokens,
            timings=Timings(
                forward.timings.queue_s + backward.timings.queue_s, forward.timings.engine_s + backward.timings.engine_s
            ),
            num_microbatches=max(forward.num_microbatches, backward.num_microbatches),
            recomputed=forward.recomputed or backward.recomputed,
            warnings=(*forward.warnings, *backward.warnings),
            activations=forward.activations or backward.activations,
        )


def _rows(column: Column, values: Any) -> Any:
    """Split a column's values (array or tensor) into rows; a per-sequence score stays whole."""
    if not column.levels:
        return values
    ends = np.cumsum(column.levels[0], dtype=np.int64).tolist()
    return [values[end - length : end] for end, length in zip(ends, column.levels[0].tolist(), strict=True)]


def _flat(name: str, column: Column, grads: Any) -> np.ndarray[Any, Any]:
    """Flatten the gradient of one score to one array; a missing gradient is zero."""
    if grads is None:
        return np.zeros_like(column.values)
    if not column.levels:
        rows: Sequence[Any] = [grads]
        lengths = [len(column.values)]
    else:
        rows, lengths = list(grads), column.levels[0].tolist()
    arrays = [np.asarray(row.detach() if hasattr(row, "detach") else row, np.float32) for row in rows]
    got = [array.shape for array in arrays]
    dense = column.values.shape[1:]
    if got != [(length, *dense) for length in lengths]:
        each = f" of {'x'.join(map(str, dense))}" if dense else ""
        raise ValueError(f"the gradient of {name!r} has rows of shapes {got}, the scores have lengths {lengths}{each}")
    return np.concatenate(arrays) if arrays else np.zeros((0, *dense), np.float32)
