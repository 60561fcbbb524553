"""What an operation that does not fit into memory is given: another attempt, in smaller pieces."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch
from gradwire_proto.codec import Column

from gradwire_server.engine.failures import is_out_of_memory

if TYPE_CHECKING:
    from gradwire_server.engine.engine import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")


def in_smaller_pieces(engine: Engine, columns: Mapping[str, Column], attempt: Callable[[], T]) -> T:
    """The attempt's outcome. One that runs out of memory is repeated with half the budget, until every example has
    been alone; it must leave everything as it was when it raises.

    Args:
        columns: the batch, whose longest row and whose size say when halving makes a difference.
    """
    lengths = [column.levels[-1] for column in columns.values() if column.levels and len(column.levels[-1])]
    longest = max((int(each.max()) for each in lengths), default=0)
    total = max((int(each.max()) * len(each) for each in lengths), default=0)
    whole = engine.budget
    try:
        while True:
            try:
                return attempt()
            except Exception as error:
                tokens = min(engine.budget.microbatch_tokens, total)
                if not is_out_of_memory(error) or tokens <= longest:
                    raise
                logger.warning("out of memory with micro-batches of %d tokens: trying half of that", tokens)
            # Outside the handler: the error's traceback keeps what was computed alive.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            budget = engine.budget
            engine.budget = replace(
                budget,
                microbatch_tokens=max(tokens // 2, 1),
                activation_bytes=budget.activation_bytes // 2,
                logits_elements=max(budget.logits_elements // 2, 1),
            )
    finally:
        engine.budget = whole
