"""A program on an old `tinker` SDK, run in an environment of its own; prints what it saw as JSON."""

from __future__ import annotations

import json
import sys

import numpy as np
import tinker
from tinker import types


def datum(seed: int) -> types.Datum:
    ids = np.random.default_rng(seed).integers(1, 99, 17).tolist()
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * 16}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main(model: str) -> None:
    training = tinker.ServiceClient().create_lora_training_client(base_model=model, rank=8, seed=7)
    data, losses = [datum(seed) for seed in range(4)], []
    for _ in range(3):
        loss = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(loss.result().metrics["loss:sum"])
        step.result()
    after = training.forward(data, "cross_entropy").result().metrics["loss:sum"]
    training.load_state(training.save_state("a").result().path).result()
    sampler, prompt = training.save_weights_and_get_sampling_client(), types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
    samples = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    found = {
        "losses": losses,
        "after": after,
        "tokens": [list(sequence.tokens) for sequence in samples.sequences],
        "prompt_logprobs": sampler.compute_logprobs(prompt).result(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
