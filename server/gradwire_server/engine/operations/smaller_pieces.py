"""Repetition of operations that run out of memory, with half the budget each time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from gradwire_proto.codec import Column

from gradwire_server.engine.failures import unless_out_of_memory
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.state.engine_run import EngineRun

logger = logging.getLogger(__name__)

T = TypeVar("T")


def in_smaller_pieces(
    context: EngineContext, run: EngineRun, columns: Mapping[str, Column], attempt: Callable[[], T]
) -> T:
    """Run the attempt within the run's budget; when memory runs out, repeat it with half the budget.

    Repetition ends when micro-batches are as small as the longest row; running out of memory then raises.

    Args:
        columns: The batch; its longest row and its size determine when halving makes a difference.
        attempt: Must leave everything unchanged if it raises.
    """
    lengths = [column.levels[-1] for column in columns.values() if column.levels and len(column.levels[-1])]
    longest = max((int(each.max()) for each in lengths), default=0)
    total = max((int(each.max()) * len(each) for each in lengths), default=0)
    whole = context.budget
    context.budget = context.memory.budget(run)
    try:
        while True:
            tokens = min(context.budget.microbatch_tokens, total)
            outcome = unless_out_of_memory(attempt, alone=tokens <= longest)
            if outcome is not None:
                return outcome
            context.memory.ran_out(run)
            logger.warning("out of memory with micro-batches of %d tokens: trying half of that", tokens)
            context.budget = replace(
                context.budget,
                microbatch_tokens=max(tokens // 2, 1),
                activation_bytes=context.budget.activation_bytes // 2,
                logits_elements=max(context.budget.logits_elements // 2, 1),
                kept_logits=context.budget.kept_logits // 2,
            )
    finally:
        context.budget = whole
