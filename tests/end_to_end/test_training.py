"""What a training loop relies on: the seven losses, accumulation, order, the custom loss."""

from __future__ import annotations

import asyncio
from typing import Any

import gradwire
import numpy as np
import pytest
from support.batches import SEVEN, VOCAB, causal_lm, halves, preferences
from support.server import Server

REQUIRED_METRICS = {
    "causal_lm": "loss perplexity num_tokens token_accuracy",
    "dpo": "implicit_reward chosen_reward rejected_reward reward_margin preference_accuracy",
    "enhanced_ppo": "policy_loss value_loss entropy kl_divergence approx_kl clip_fraction advantage_mean "
    "advantage_std explained_variance value_mean return_mean reward_mean",
    "grpo": "policy_loss kl_divergence approx_kl clip_fraction advantage_mean advantage_std reward_mean "
    "group_reward_mean group_reward_std zero_spread_groups",
    "importance_sampling": "is_ratio_mean is_ratio_max is_ratio_min clipped_fraction",
    "conservative_ppo": "kl_violation kl_penalty max_kl_threshold policy_loss value_loss",
    "reward_modeling": "preference_accuracy reward_margin chosen_reward_mean rejected_reward_mean "
    "chosen_reward_std rejected_reward_std",
}

MEANS = sorted(set(SEVEN) - {"conservative_ppo"})  # its penalty is on the batch's KL: no mean over rows


async def weights(run: gradwire.TrainingClient, probe: list[list[int]]) -> np.ndarray:
    """What a step did to the weights, seen as log-probabilities of fixed tokens."""
    return np.concatenate(await run.compute_logprobs(probe))


PROBE = [[5, 9, 11, 30, 7], [40, 41, 42], list(range(3, 23))]


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("loss_fn", SEVEN)
async def test_every_loss_returns_its_metrics_and_lowers_itself(
    service: gradwire.ServiceClient, rng: np.random.Generator, loss_fn: str, lora: dict[str, Any] | None
) -> None:
    make, loss_kwargs, head = SEVEN[loss_fn]
    run = await service.create_run("tiny", lora=lora, head=head, seed=1)
    batch = make(rng, 6, VOCAB)
    first = await run.forward_backward(batch, loss_fn, loss_kwargs)
    assert set(REQUIRED_METRICS[loss_fn].split()) <= set(first.metrics)
    assert first.loss is not None and np.isfinite(first.loss)
    await run.optim_step(learning_rate=3e-4)
    for _ in range(3):
        run.forward_backward(batch, loss_fn, loss_kwargs)
        run.optim_step(learning_rate=3e-4)
    last = await run.forward(batch, loss_fn, loss_kwargs)
    assert last.loss is not None and last.loss < first.loss
    await service.delete_run(run.run_id)


@pytest.mark.parametrize("loss_fn", MEANS)
async def test_two_half_batches_and_a_step_are_one_whole_and_a_step(
    service: gradwire.ServiceClient, rng: np.random.Generator, loss_fn: str
) -> None:
    make, loss_kwargs, head = SEVEN[loss_fn]
    if loss_fn == "enhanced_ppo":
        loss_kwargs = loss_kwargs | {"whiten_advantages": False}  # which is over the batch of a call
    batch = make(rng, 8, VOCAB)
    whole = await service.create_run("tiny", head=head, seed=3)
    parts = await service.create_run("tiny", head=head, seed=3)
    whole.forward_backward(batch, loss_fn, loss_kwargs)
    for half in halves(batch):
        parts.forward_backward(half, loss_fn, loss_kwargs)
    # AdamW's first step is lr * sign(g) for all but tiny g: eps this large makes it follow the gradient's size.
    a = await whole.optim_step(learning_rate=1e-2, eps=1e-2, max_grad_norm=0.0)
    b = await parts.optim_step(learning_rate=1e-2, eps=1e-2, max_grad_norm=0.0)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
    np.testing.assert_allclose(await weights(whole, PROBE), await weights(parts, PROBE), atol=1e-5)


@pytest.fixture(scope="module")
def small_server(tiny_model_path: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that computes a few rows at a time and keeps no graph."""
    running = Server(
        tiny_model_path,
        tmp_path_factory.mktemp("small-state"),
        *("--microbatch-tokens", "24", "--activation-budget-gib", "0.0001"),
    ).start()
    yield running
    assert running.end() == 0


@pytest.mark.long
@pytest.mark.parametrize("loss_fn", SEVEN)
async def test_micro_batches_do_not_change_a_result(
    service: gradwire.ServiceClient, small_server: Server, rng: np.random.Generator, loss_fn: str
) -> None:
    make, loss_kwargs, head = SEVEN[loss_fn]
    batch = make(rng, 10, VOCAB)
    seen = []
    async with gradwire.connect(small_server.address) as small:
        for client in (service, small):
            run = await client.create_run("tiny", head=head, seed=5)
            run.forward_backward({"input_ids": PROBE[:1]}, "causal_lm")
            run.optim_step(learning_rate=1e-2)  # away from the reference, where margins are ties
            fb = run.forward_backward(batch, loss_fn, loss_kwargs, outputs=["logprobs"])
            step = run.optim_step(learning_rate=1e-2, eps=1e-2, max_grad_norm=0.0)
            seen.append((await fb, await step, await weights(run, PROBE)))
    (one, step_one, after_one), (many, step_many, after_many) = seen
    assert one.num_microbatches < many.num_microbatches
    assert one.loss == pytest.approx(many.loss, abs=1e-5)
    for name, value in one.metrics.items():
        assert many.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True), name
    assert step_one.grad_norm == pytest.approx(step_many.grad_norm, rel=1e-4)
    for a, b in zip(one.outputs["logprobs"], many.outputs["logprobs"], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(after_one, after_many, atol=1e-5)


async def test_a_result_carries_outputs_counts_and_timings(service: gradwire.ServiceClient) -> None:
    run = await service.create_run("tiny")
    batch = {"input_ids": [[4, 5, 6, 7], [8], [9, 10, 11]], "loss_mask": [[0, 0, 1, 1], [1], [0, 1, 0]]}
    result = await run.forward_backward(batch, "causal_lm", outputs=["logprobs", "entropy"])
    assert [len(row) for row in result.outputs["logprobs"]] == [2, 0, 1]
    assert [len(row) for row in result.outputs["entropy"]] == [2, 0, 1]
    assert (result.num_sequences, result.num_tokens, result.num_loss_tokens) == (3, 8, 3)
    assert result.timings.engine_s > 0 and result.timings.queue_s >= 0
    mean = np.concatenate(result.outputs["logprobs"]).mean()
    assert result.loss == pytest.approx(-mean, abs=1e-6)
    assert result.metrics["loss"] == result.loss


async def test_one_hundred_pipelined_operations_come_back_in_order(
    service: gradwire.ServiceClient, rng: np.random.Generator
) -> None:
    run = await service.create_run("tiny", lora={"rank": 2})
    finished: list[int] = []
    futures: list[gradwire.Future[Any]] = []
    batch = causal_lm(rng, 2, VOCAB)
    for _ in range(50):
        futures += [run.forward_backward(batch, "causal_lm"), run.optim_step(learning_rate=1e-3)]

    async def note(index: int) -> None:
        await futures[index]
        finished.append(index)

    await asyncio.gather(*(note(index) for index in range(100)))
    assert finished == list(range(100))
    assert [(await futures[index]).step for index in range(1, 100, 2)] == list(range(1, 51))


async def test_a_custom_dpo_has_the_builtin_gradients(
    service: gradwire.ServiceClient, rng: np.random.Generator
) -> None:
    import torch

    batch, beta = preferences(rng, 5, VOCAB), 0.3
    rows: list[list[int]] = []
    mask: list[list[int]] = []
    for index in range(5):
        for side in ("chosen", "rejected"):
            length = int(batch[f"{side}_attention_mask"][index].sum())
            prompt = min(int(batch["prompt_lengths"][index]), length)
            rows.append(batch[f"{side}_input_ids"][index][:length].tolist())
            mask.append([0] * prompt + [1] * (length - prompt))
    plain = {"input_ids": rows, "loss_mask": mask}

    builtin = await service.create_run("tiny", seed=2)
    expected = await builtin.forward_backward(batch, "dpo", {"beta": beta, "reference_model": "base"})
    expected_step = await builtin.optim_step(learning_rate=1e-2, eps=1e-2)

    custom = await service.create_run("tiny", seed=2)
    reference = await custom.forward(plain, model="base")
    ref = [torch.tensor(row).sum() for row in reference.outputs["logprobs"]]

    def dpo(batch: Any, scores: dict[str, list[torch.Tensor]]) -> tuple[torch.Tensor, dict[str, float]]:
        ratios = [row.sum() - ref_sum for row, ref_sum in zip(scores["logprobs"], ref, strict=True)]
        margins = torch.stack([c - r for c, r in zip(ratios[::2], ratios[1::2], strict=True)])
        return -torch.nn.functional.logsigmoid(beta * margins).mean(), {"margin": margins.mean().item()}

    fb = custom.forward_backward_custom(plain, dpo)
    step = custom.optim_step(learning_rate=1e-2, eps=1e-2)  # queued behind it at once
    result = await fb
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    assert "margin" in result.metrics and not result.recomputed
    assert (await step).grad_norm == pytest.approx(expected_step.grad_norm, rel=1e-4)
    np.testing.assert_allclose(await weights(custom, PROBE), await weights(builtin, PROBE), atol=1e-5)


async def test_the_calls_of_the_issue_run_as_written(service: gradwire.ServiceClient, rng: np.random.Generator) -> None:
    client = service
    training_client = await client.create_run("tiny", head="value")
    make, _, _ = SEVEN["enhanced_ppo"]
    result = await training_client.forward_backward(
        batch_data=make(rng, 4, VOCAB),
        loss_fn="enhanced_ppo",
        loss_kwargs={
            "use_gae": True,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "clip_epsilon": 0.2,
            "value_loss_coef": 0.5,
            "entropy_coef": 0.01,
            "beta": 0.01,
            "clip_value_loss": True,
            "reference_model": "base",
        },
    )
    assert result["policy_loss"] == result.metrics["policy_loss"]
    await training_client.optim_step()
    reward_run_id = (await client.create_run("tiny", head="reward")).run_id
    reward_client = client.get_training_client(reward_run_id)
    rewards = await reward_client.compute_rewards({"input_ids": [[4, 5, 6], [7, 8]]})
    assert rewards.shape == (2,) and np.isfinite(rewards).all()


async def test_sampling_sees_the_step_before_it_and_its_logprobs_are_the_models(
    service: gradwire.ServiceClient,
) -> None:
    run = await service.create_run("tiny", seed=4)
    prompts = [[4, 5, 6], [7, 8, 9, 10, 11]]
    before = run.sample(prompts, n=3, max_tokens=6, seed=1, ignore_eos=True)
    for _ in range(20):
        run.forward_backward({"input_ids": [[4, 5, 6, 20, 21, 22, 23, 24, 25]]}, "causal_lm")
        run.optim_step(learning_rate=1e-2)
    after = await run.sample(prompts[:1], max_tokens=6, temperature=0.0, ignore_eos=True)
    assert after.samples[0][0].token_ids.tolist() == [20, 21, 22, 23, 24, 25]
    drawn = await before
    assert [len(samples) for samples in drawn.samples] == [3, 3]
    fresh = await service.create_run("tiny", seed=4)
    for prompt, samples in zip(prompts, drawn.samples, strict=True):
        for sample in samples:
            row = prompt + sample.token_ids.tolist()
            scored = await fresh.compute_logprobs([row])
            np.testing.assert_allclose(scored[0][len(prompt) - 1 :], sample.logprobs, atol=1e-4)
