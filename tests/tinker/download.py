"""A model trained by the unmodified `tinker` SDK, and its weights downloaded by `tinker-cookbook`.

``python download.py MODEL FOLDER``, with TINKER_BASE_URL and TINKER_API_KEY set.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types
from tinker_cookbook import weights


def main(model: str, folder: str) -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client(base_model=model, rank=8, seed=7).result()
    ids = np.random.default_rng(3).integers(1, 99, 17).tolist()
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * 16}
    datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result()
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    logprobs = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    path = training.save_state("final").result().path
    weights.download(tinker_path=path, output_dir=folder)
    print(json.dumps({"path": path, "ids": ids, "logprobs": logprobs}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
