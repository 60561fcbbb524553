"""Log-probabilities of given tokens under a model or checkpoint, outside any run."""

from __future__ import annotations

import time

import numpy as np
from gradwire_proto.codec import Column
from gradwire_proto.v1 import engine_pb2

from gradwire_server.engine.errors import invalid
from gradwire_server.engine.operations.batches import evaluated, read_plain
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.operations.lifecycle import Answer, success
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.training import forward_only as evaluate


def score_outside(context: EngineContext, asked: engine_pb2.EngineScore, budget: Budget) -> Answer:
    """Compute the log-probability of each token of each row but its first.

    Raises:
        OperationError: The model, the checkpoint or a row cannot be used.
    """
    began = time.perf_counter()
    policy = context.references.resolve(asked.model, field="model").policy
    if not asked.rows:
        raise invalid("there are no rows to score", "rows")
    rows = [np.array(row.ids, np.int64) for row in asked.rows]
    with context.within(budget):
        batch = read_plain({"input_ids": Column.from_rows(rows)}, policy)
        found = evaluate.forward(policy, batch, outputs=["logprobs"], budget=budget)
    return success(evaluated(found), 0, time.perf_counter() - began)
