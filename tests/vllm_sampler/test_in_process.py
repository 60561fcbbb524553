"""Weights of a run in the real vLLM in this process: run in an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl.algorithms.weights import asleep
from gradwire.rl.inference import RunInference, VLLMInference
from support.vllm import GREEDY, Exported, check_equal, engine_of, flat, follow, model_for_vllm, resident_mib, trained

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: see docs/rl.md")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.holds_loop("the model is built in it")]

PUSHES = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_for_vllm(tmp_path_factory.mktemp("vllm") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Any:
    return engine_of(model, enable_lora=True, max_lora_rank=16)


async def test_an_adapter(engine: Any, model: Path) -> None:
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        inference = VLLMInference(engine)
        await follow(inference, run, await RunInference.of(service, run))
        other = await service.create_run("tiny", lora={"rank": 8}, seed=5)
        await follow(VLLMInference(engine), other, await RunInference.of(service, other))
        with pytest.raises(gradwire.UnsupportedError, match="cannot score prompts with LoRA enabled"):
            await inference.get_logprobs([[1, 20, 21]])
        with pytest.raises(ValueError, match="use one engine for each"):
            await inference.update_weights(await service.create_run("tiny"), 4)


async def test_it_sleeps(engine: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait until new weights wake it; on a CPU vLLM frees nothing, and says that it does not sleep."""
    assert not VLLMInference(engine).sleeps
    monkeypatch.setattr(engine.llm_engine.vllm_config.model_config, "enable_sleep_mode", True)
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        own, inference = await RunInference.of(service, run), VLLMInference(engine)
        async with asleep(inference):
            waiting = asyncio.ensure_future(inference.generate([[1, 20, 21]], GREEDY))
            await trained(run)
            assert engine.llm_engine.is_sleeping() and not waiting.done()
            await inference.update_weights(run, 1)
        await waiting
        await check_equal(inference, own, 1)


async def test_a_thousand_adapters_take_no_memory(engine: Any, model: Path, tmp_path: Path) -> None:
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny", lora={"rank": 8})
        await trained(run)
        await run.export(tmp_path / "adapter")
    inference, memory = VLLMInference(engine), []
    pushed = Exported(tmp_path / "adapter")
    for number in range(PUSHES):
        await inference.update_weights(pushed, number)
        if number % (PUSHES // 10) == 0:
            await inference.generate([[1, 20, 21]], GREEDY)
            memory.append(resident_mib(os.getpid()))
    assert flat(memory, 20)
    assert len(engine.llm_engine.list_loras()) == 1
    assert len(list(inference._kept[0].parent.iterdir())) == 2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
async def test_all_weights(tied: bool, tmp_path: Path) -> None:
    model = model_for_vllm(tmp_path / "base", tied=tied)
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny")
        own, inference = await RunInference.of(service, run), VLLMInference(engine_of(model))
        await follow(inference, run, own)
        (scored,), (expected,) = [await each.get_logprobs([[1, 20, 21, 22]]) for each in (inference, own)]
        np.testing.assert_allclose(scored, expected, atol=1e-5)
        await run.export(tmp_path / "model")
    memory, pushed = [], Exported(tmp_path / "model")
    for number in range(PUSHES):
        await inference.update_weights(pushed, number)
        if number % (PUSHES // 10) == 0:
            await inference.generate([[1, 20, 21]], GREEDY)
            memory.append(resident_mib(os.getpid()))
    assert flat(memory, 20)


async def test_all_weights_of_an_engine_that_is_ready_for_adapters(engine: Any, model: Path) -> None:
    """After the adapters, because these weights stay in the engine."""
    engine.llm_engine.remove_lora(next(iter(engine.llm_engine.list_loras())))
    async with gradwire.connect(models=[f"tiny={model}"]) as service:
        run = await service.create_run("tiny")
        await follow(VLLMInference(engine), run, await RunInference.of(service, run), pushes=1)
