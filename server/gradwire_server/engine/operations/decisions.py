"""Decisions: which requests are executed next, and within which limits.

What depends on free memory, on the clock, on chance, or on which requests have arrived or were withdrawn is decided
here. Executing a decision depends on none of them: the plan of micro-batches follows from a batch and its budget, and
whether batches fit into one group from the batches and the decision. So one process may decide, and others execute the
same; what can only be known while they do is agreed on (:mod:`gradwire_server.engine.agreement`). The limits of an
operation are in its result, too, and a repetition from the journal is executed within them again.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from gradwire_proto.codec import IMAGE_BYTES
from gradwire_proto.v1 import engine_pb2
from numpy.typing import NDArray

from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.errors import OperationError
from gradwire_server.engine.machine import free_memory
from gradwire_server.engine.model.policy import LoraPolicy
from gradwire_server.engine.model.shared_forward import can_go_together
from gradwire_server.engine.operations import limits
from gradwire_server.engine.operations.request import Columns, Request
from gradwire_server.engine.scoring.memory import Memory, may_recompute
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.operation_kinds import kind_of, training_call

logger = logging.getLogger(__name__)

GROUP_TOKENS = {"cpu": 1024, "cuda": 1 << 14}
"""Maximum tokens of a group by device type; above it, grouping is not faster."""
SMALL_TOKENS = 512
"""Tokens up to which an operation may go between two micro-batches of another one."""
MOST_STEPS = 64
"""Maximum optimizer steps at once, whose runs are all on the device meanwhile."""
FRESH_S = 1.0
"""Seconds for which a measurement of a GPU's free memory is used."""


@dataclass(frozen=True)
class Decision:
    """The work that the engine executes next.

    Attributes:
        samples: Requests for samples that begin; one without a seed was given one.
        steps_samples: Whether the samples in progress then advance by a token.
        stopped: Ids of requests that end instead, also samples in progress -> the error that they end with.
        requests: Other requests to execute; several may share one forward.
        withdrawn: Ids of those requests that the front has withdrawn, so that they do not begin.
        budgets: Memory limits of each of ``requests``.
        group_tokens: Maximum tokens of a shared forward.
    """

    samples: Sequence[Request] = ()
    steps_samples: bool = False
    stopped: Mapping[int, OperationError] = field(default_factory=dict)
    requests: Sequence[Request] = ()
    withdrawn: Collection[int] = frozenset()
    budgets: Sequence[Budget] = ()
    group_tokens: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.samples or self.steps_samples or self.requests)


class Decisions:
    """Make decisions.

    Args:
        agreement: Marks the requests that begin.
        make_room: Frees memory of the device for a batch; returns whether any was freed.
        light_bytes: Bytes that a run takes which is made in no time, or 0.

    Attributes:
        group_tokens: Maximum tokens of operations of several runs in one forward; 0 executes each alone.
    """

    def __init__(
        self,
        memory: Memory,
        runs: Mapping[str, EngineRun],
        agreement: Agreement,
        make_room: Callable[[], bool] = bool,
        light_bytes: Callable[[engine_pb2.EngineCreateRun], int] = lambda create: 0,
    ) -> None:
        self._memory, self._runs, self._agreement, self._make_room = memory, runs, agreement, make_room
        self._light_bytes = light_bytes
        self._free_bytes, self._free_until = 0, 0.0
        self.group_tokens = 0

    def sample(self, request: Request) -> Decision:
        """Decide to begin a ready request for samples."""
        outside = request.message.sample
        if request.message.HasField("sample") and not outside.call.HasField("seed"):
            outside.call.seed = secrets.randbits(62)
        _, withdrawn = self._begun([request])
        return Decision(samples=[request], withdrawn=withdrawn)

    def step_samples(self, in_progress: Iterable[engine_pb2.EngineRequest]) -> Decision:
        """Decide to advance the samples in progress by a token, but for those that are cancelled or late."""
        return Decision(steps_samples=True, stopped=self._ended(in_progress))

    def execute(self, ready: Sequence[Request]) -> Decision:
        """Decide which of the ready requests of different runs, samples aside, to execute: the first, or several.

        If the first one is a batch that could be grouped, ready steps go before it, because the next
        ``forward_backward`` of a step's run may then join the group. Steps of LoRA runs are executed at once.
        """
        ready = [request for request in ready if not request.samples]
        requests, withdrawn = self._begun(self._grouped(ready) if self.group_tokens else ready[:1])
        return Decision(
            requests=requests,
            withdrawn=withdrawn,
            stopped=self._ended(request.message for request in requests),
            budgets=[self._budget(request) for request in requests],
            group_tokens=self.group_tokens,
        )

    def is_small(self, request: Request) -> bool:
        """Whether a request may go between two micro-batches of another run's: it takes no longer than some."""
        if request.message.HasField("create_run"):
            return self._is_light(request.message.create_run)
        operation = request.message.operation
        kind, run = kind_of(operation.operation), self._runs.get(operation.run_id)
        computes = (kind.divisible or kind.ends_accumulation) and run is not None and not run.accumulator.parts
        return computes and request.tokens <= SMALL_TOKENS and IMAGE_BYTES not in request.columns

    def _is_light(self, create: engine_pb2.EngineCreateRun) -> bool:
        """Whether a run is made in no time, and what is computed meanwhile leaves enough memory for it."""
        other, needed = next(iter(self._runs.values()), None), self._light_bytes(create)
        return other is not None and 0 < needed <= free_memory(other.policy.device) // 8

    def after_out_of_memory(self, run: EngineRun, columns: Columns, budget: Budget) -> Budget | None:
        """Decide the limits within which to repeat an operation that ran out of memory: half as many tokens at a time.

        Once micro-batches are as small as the longest row and no graphs are kept, activations are recomputed, and then
        feed-forward layers computed in chunks.

        Returns:
            The limits, or None if the operation fails, because nothing is left to give up.
        """
        lengths = _row_lengths(run, columns)
        longest = _longest(lengths)
        total = max((int(each.max()) * len(each) for each in lengths), default=0)
        tokens = min(budget.microbatch_tokens, total)
        smaller = replace(
            budget,
            activation_bytes=0,
            logits_elements=max(budget.logits_elements // 2, 1),
            kept_logits=budget.kept_logits // 2,
        )
        if tokens > longest or (tokens < total and budget.activation_bytes):
            logger.warning("out of memory with micro-batches of %d tokens: trying half of that", tokens)
            smaller = replace(smaller, microbatch_tokens=max(tokens // 2, 1))
        elif budget.kept_tokens and may_recompute(run):
            logger.warning("out of memory with a micro-batch of one row: trying to recompute its activations")
            smaller = replace(smaller, kept_tokens=0)
        elif budget.whole_tokens and may_recompute(run):
            logger.warning("out of memory with a recomputed micro-batch of one row: trying chunks of its tokens")
            smaller = replace(smaller, whole_tokens=0)
        else:
            return None
        self._memory.ran_out(run)
        return smaller

    def _begun(self, requests: Sequence[Request]) -> tuple[Sequence[Request], Collection[int]]:
        """Mark requests as begun, as many as can be marked; returns these, and the ids of those that were withdrawn."""
        begin = self._agreement.begin([request.message.id for request in requests])
        marked = requests[: len(begin)]
        return marked, {request.message.id for request, begins in zip(marked, begin, strict=True) if not begins}

    def _ended(self, requests: Iterable[engine_pb2.EngineRequest]) -> Mapping[int, OperationError]:
        """The errors that requests end with, of those that are not to be executed further, by id."""
        ended = ((request.id, self._agreement.ended(request)) for request in requests)
        return {number: error for number, error in ended if error is not None}

    def _budget(self, request: Request) -> Budget:
        operation = request.message.operation
        run = self._runs.get(operation.run_id)
        if run is None or not kind_of(operation.operation).divisible:
            return self._memory.most
        if self._make_room():
            self._free_until = 0.0
        if operation.HasField("limits"):
            return self._memory.again(limits.from_wire(operation.limits))
        longest = _longest(_row_lengths(run, request.columns))
        budget = self._memory.budget(run, longest, self._free_memory(run.policy.device))
        return budget if budget.lanes == run.lanes else replace(budget, lanes=run.lanes)

    def _free_memory(self, device: torch.device) -> int:
        """Free bytes of a GPU, measured at most once in ``FRESH_S``; 0 on a CPU, where nothing depends on it."""
        if device.type != "cpu" and time.monotonic() >= self._free_until:
            self._free_bytes, self._free_until = free_memory(device), time.monotonic() + FRESH_S
        return self._free_bytes

    def _grouped(self, ready: Sequence[Request]) -> Sequence[Request]:
        steps = [request for request in ready if kind_of(request.message.operation.operation).only_steps]
        first = self._trained(ready[0]) if ready else None
        if steps and (first is not None or steps[0] is ready[0]):
            together = [step for step in steps if self._lora(step) is not None][:MOST_STEPS]
            return together if steps[0] in together else steps[:1]
        if first is None:
            return ready[:1]
        chosen, tokens = [ready[0]], ready[0].tokens
        for request in ready[1:]:
            other, more = self._trained(request), request.tokens
            if other is not None and tokens + more <= self.group_tokens and can_go_together(first, other):
                chosen.append(request)
                tokens += more
        return chosen

    def _trained(self, request: Request) -> LoraPolicy | None:
        """The policy of a request on a batch that may be grouped, in one part without images; else None."""
        operation = request.message.operation
        call, run = training_call(operation.operation), self._runs.get(operation.run_id)
        if call is None or call.accumulate or IMAGE_BYTES in request.columns:
            return None
        if run is not None and (run.accumulator.parts or run.lanes > 1):
            return None
        return self._lora(request)

    def _lora(self, request: Request) -> LoraPolicy | None:
        """The policy of a request of a LoRA run that can be executed; None for any other request."""
        run = self._runs.get(request.message.operation.run_id)
        if run is None or request.error is not None:
            return None
        return run.policy if isinstance(run.policy, LoraPolicy) else None


def _row_lengths(run: EngineRun, columns: Columns) -> list[NDArray[np.uint32]]:
    """Lengths of the rows of each column that has any, with parts that came before; images' bytes are no rows."""
    parts = run.accumulator.parts
    by_field = [
        np.concatenate([*(parts.row_lengths(name) if parts is not None else ()), column.levels[-1]])
        for name, column in columns.items()
        if column.levels and name != IMAGE_BYTES
    ]
    return [lengths for lengths in by_field if len(lengths)]


def _longest(lengths: Sequence[NDArray[np.uint32]]) -> int:
    return max((int(each.max()) for each in lengths), default=0)
