"""Batches that the unmodified `tinker` SDK cuts into many requests, in parallel or one after another.

``python chunks.py MODEL``, with TINKER_BASE_URL and TINKER_API_KEY set. The server's own settings make one request of
a batch, so they are changed in the client here: two rows a request. In parallel the SDK awaits the promises of all but
the first request before it sends the first.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

STEPS, ROWS, CLIENTS = 3, 9, 4


def datum(seed: int) -> types.Datum:
    ids = np.random.default_rng(seed).integers(1, 99, 17).tolist()
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * 16}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def trained(service: Any, model: str, parallel: bool, rows_each: int) -> dict[str, Any]:
    """Train some models at once, each with its steps sent ahead of their results."""
    clients = [service.create_lora_training_client(base_model=model, rank=8, seed=7).result() for _ in range(CLIENTS)]
    for client in clients:
        changed = {"parallel_fwdbwd_chunks": parallel, "fwdbwd_max_chunk_len": rows_each}
        client.holder._client_config = client.holder._client_config.model_copy(update=changed)
    data, adam = [datum(seed) for seed in range(ROWS)], types.AdamParams(learning_rate=1e-2)
    sent = [[(client.forward_backward(data, "cross_entropy"), client.optim_step(adam)) for client in clients]
            for _ in range(STEPS)]  # fmt: skip
    losses = [[loss.result().metrics["loss:sum"] for loss, _ in step] for step in sent]
    return {"losses": losses, "operations": clients[0]._get_request_id()}


def main(model: str) -> None:
    service = tinker.ServiceClient()
    found = {
        "whole": trained(service, model, False, 1024),
        "in turn": trained(service, model, False, 2),
        "parallel": trained(service, model, True, 2),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
