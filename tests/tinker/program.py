"""A program on the unmodified `tinker` SDK, run in an environment of its own; prints what it saw as JSON.

``python program.py MODEL``, with TINKER_BASE_URL and TINKER_API_KEY set.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from datetime import UTC, datetime, timedelta

import numpy as np
import tinker
import torch
from tinker import types

STEPS = 4


def datum(seed: int) -> types.Datum:
    ids = np.random.default_rng(seed).integers(1, 99, 17).tolist()
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * 16}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def custom(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The cross entropy, as a loss of the caller's own."""
    loss = -torch.stack([row.sum() for row in logprobs]).sum()
    return loss, {"custom": float(loss)}


def traced(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of one datum, for ``create_custom_loss``."""
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss}


def synchronous(service: tinker.ServiceClient, model: str) -> dict[str, object]:
    training = service.create_lora_training_client(base_model=model, rank=8, seed=7).result()
    data = [datum(seed) for seed in range(4)]
    adam = types.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_clip_norm=5.0)
    losses = []
    for _ in range(STEPS):
        loss, step = training.forward_backward(data, "cross_entropy"), training.optim_step(adam)
        losses.append(loss.result().metrics["loss:sum"])
        step.result()
    saved = training.save_state("state").result().path
    before = training.forward(data, "cross_entropy").result()
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    after = []
    for client in (training, resumed):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(adam).result()
        after.append(client.forward(data, "cross_entropy").result().metrics["loss:sum"])
    handle = service.create_custom_loss(traced, {"logprobs": 1, "weights": 1}).result()
    own: dict[str, list[float]] = {"custom": [], "custom/nll:sum": []}
    for name, loss_fn in (("custom", custom), ("custom/nll:sum", handle)):
        tailored = service.create_lora_training_client(base_model=model, rank=8, seed=7).result()
        for _ in range(STEPS):
            own[name].append(tailored.forward_backward_custom(data, loss_fn).result().metrics[name])
            tailored.optim_step(adam).result()
    sampler = training.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    prompt = types.ModelInput.from_ints([5, 6, 7])
    params = types.SamplingParams(max_tokens=6, seed=1, temperature=0.7)
    samples = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    training.forward_backward(data, "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    again = sampler.sample(prompt, num_samples=2, sampling_params=params).result()
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    drawn = sampler.sample(prompt, num_samples=1, sampling_params=greedy, prompt_alt_tokens_k=4).result()
    return {
        "losses": losses,
        "before": before.metrics["loss:sum"],
        "after": after,
        "custom_losses": own["custom"],
        "traced_losses": own["custom/nll:sum"],
        "alternatives": drawn.prompt_alt_tokens.tokens.to_torch().tolist(),
        "tokens": [[list(sequence.tokens) for sequence in each.sequences] for each in (samples, again)],
        "prompt_logprobs": list(sampler.compute_logprobs(prompt).result()),
        "shape": list(before.loss_fn_outputs[0]["logprobs"].shape),
        "path": saved,
    }


async def asynchronous(service: tinker.ServiceClient, model: str) -> dict[str, object]:
    training = await service.create_lora_training_client_async(base_model=model, rank=8, seed=7)
    data = [datum(seed) for seed in range(4)]
    losses = []
    for _ in range(STEPS):
        loss = await training.forward_backward_async(data, "cross_entropy")
        step = await training.optim_step_async(types.AdamParams(learning_rate=1e-2))
        losses.append((await loss).metrics["loss:sum"])
        await step
    rest = service.create_rest_client()
    runs = await rest.list_training_runs_async(limit=10)
    return {"losses": losses, "runs": [run.training_run_id for run in runs.training_runs]}


def told(service: tinker.ServiceClient, path: str) -> dict[str, object]:
    """What the server tells of the session that trained."""
    admin, rest = tinker.AdminClient(), service.create_rest_client()
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    usage = admin.get_billing_usage(hour - timedelta(hours=1), hour + timedelta(hours=1)).result()
    session_id = path.split("/")[2].partition(":")[0]
    counts: dict[str, int] = {}
    for event in usage.data:
        if event.session_id == session_id and event.event_info.type != "storage":
            info = event.event_info
            count = info.count if info.type == "checkpoint" else info.token_count
            counts[info.type] = counts.get(info.type, 0) + count
    with urllib.request.urlopen(rest.export_session_trace(session_id).result()) as response:
        trace = json.load(response)["traceEvents"]
    return {
        "usage": counts,
        "stored": sum(each.checkpoint_count for each in admin.get_current_checkpoint_storage_usage().result().data),
        "audited": [each.tinker_path for each in admin.get_audit_log().result().entries],
        "traced": sorted({each["name"] for each in trace if each["ph"] == "X"}),
    }


def main(model: str) -> None:
    service = tinker.ServiceClient()
    found = {"sync": synchronous(service, model), "async": asyncio.run(asynchronous(service, model))}
    found["told"] = told(service, str(found["sync"]["path"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
