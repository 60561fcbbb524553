"""Heads compute in float32 under a bfloat16 base: the output head in sampling and training, value and reward heads.

The layers of the model add nothing to its residual stream, so hidden states do not depend on how they are computed:
what could differ between sampling, training and the float64 reference is the head alone.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.server import Server
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

PROMPTS = [[5, 9, 11], [12, 33, 7], [40, 41, 8]]
ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60, 61]]
HEAD_FILE = "gradwire_head.safetensors"


@pytest.fixture(scope="module")
def plain(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with layers that add nothing, logits of an ordinary size, and a value head."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(tiny_model_path, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.mul_(3.0 / model(torch.tensor([ROWS[1]])).logits.std())
    model.save_pretrained(folder)
    torch.manual_seed(0)
    head = {"weight": torch.randn(1, model.config.hidden_size), "bias": torch.randn(1)}
    save_file(head, folder / HEAD_FILE, metadata={"format": "pt", "kind": "value"})
    return folder


@pytest.fixture(scope="module")
async def service(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[gradwire.ServiceClient]:
    server = Server(plain, tmp_path_factory.mktemp("state"), "--dtype", "bfloat16").start()
    async with gradwire.connect(server.address) as service:
        yield service
    assert server.end() == 0


def trunk(folder: Path, row: list[int]) -> tuple[torch.Tensor, Any]:
    """Hidden states of a row in bfloat16, ``[tokens, hidden]``, and the model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return model.model(torch.tensor([row])).last_hidden_state[0], model


def head_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / HEAD_FILE)


def of_targets(logits: torch.Tensor, row: list[int]) -> np.ndarray:
    """``[tokens, vocabulary]`` -> the log-probability of every token but the first."""
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0].numpy()


@pytest.mark.parametrize("lora", [4, pytest.param(None, marks=pytest.mark.slow)], ids=["lora", "full"])
async def test_the_output_head_in_sampling_and_in_training(
    service: gradwire.ServiceClient, plain: Path, lora: int | None
) -> None:
    run = await service.create_run("tiny", lora=lora)
    for temperature in (1.0, 0.7):
        samples = (await run.sample(PROMPTS, max_tokens=24, temperature=temperature, ignore_eos=True, seed=1)).samples
        rows = [[*prompt, *sample.token_ids.tolist()] for prompt, [sample] in zip(PROMPTS, samples)]
        trained = await run.compute_logprobs({"input_ids": rows}, temperature=temperature)
        batch = {"input_ids": rows, "old_log_probs": [[0.0] * len(row) for row in rows], "advantages": [1.0] * 3}
        kwargs = {"entropy_coef": 0.0, "temperature": temperature}
        stepped = await run.forward_backward(batch, "enhanced_ppo", kwargs, outputs=("logprobs",))
        rounded = 0.0
        for place, row in enumerate(rows):
            hidden, model = trunk(plain, row)
            with torch.no_grad():
                exact = of_targets(hidden.double() @ model.lm_head.weight.double().T / temperature, row)
                rounded = max(
                    rounded, np.abs(of_targets(model.lm_head(hidden).float() / temperature, row) - exact).max()
                )
            sampled = samples[place][0].logprobs
            np.testing.assert_allclose(sampled, exact[-len(sampled) :], atol=1e-5)
            np.testing.assert_allclose(trained[place], exact, atol=1e-5)
            np.testing.assert_allclose(stepped.outputs["logprobs"][place], exact, atol=1e-5)
        assert rounded > 1e-3  # a bfloat16 head would show
    await service.delete_run(run.run_id)


async def test_value_and_reward_heads(service: gradwire.ServiceClient, plain: Path, tmp_path: Path) -> None:
    value = await service.create_run("tiny", lora=4, head="value")
    reward = await service.create_run("tiny", lora=4, head="reward", seed=3)
    await reward.export(tmp_path / "reward")
    weight = load_file(tmp_path / "reward" / "adapter_model.safetensors")["base_model.model.score.weight"]
    heads = {"value": head_of(plain), "reward": {"weight": weight, "bias": torch.zeros(1)}}
    assert {tensor.dtype for head in heads.values() for tensor in head.values()} == {torch.float32}
    values, rewards = await value.compute_values(ROWS), await reward.compute_rewards(ROWS)
    rounded = 0.0
    for place, row in enumerate(ROWS):
        hidden, _ = trunk(plain, row)
        exact = {
            name: (hidden.double() @ h["weight"].double().T + h["bias"].double())[:, 0] for name, h in heads.items()
        }
        np.testing.assert_allclose(values[place], exact["value"][:-1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(rewards[place], exact["reward"][-1], rtol=1e-5, atol=1e-6)
        low = hidden @ heads["value"]["weight"].bfloat16().T + heads["value"]["bias"].bfloat16()
        rounded = max(rounded, float((low[:, 0].double() - exact["value"]).abs().max()))
    assert rounded > 1e-3  # a bfloat16 head would show
    await service.delete_run(reward.run_id)

    # A step smaller than bfloat16 can represent reaches the head's weights.
    await value.forward_backward({"input_ids": ROWS, "old_log_probs": [[0.0] * len(row) for row in ROWS],
                                  "rewards": [1.0, 2.0, 3.0]}, "enhanced_ppo")  # fmt: skip
    await value.optim_step(learning_rate=1e-5)
    await value.export(tmp_path / "value")
    moved = head_of(tmp_path / "value")["weight"] - heads["value"]["weight"]
    np.testing.assert_allclose(moved.abs(), 1e-5, rtol=0.1)
    await service.delete_run(value.run_id)
