"""A server that samples with the real vLLM: run in an environment of its own (``make test-vllm``)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import gradwire
import numpy as np
import psutil
import pytest
import pytest_asyncio
from support.tiny import tiny_model
from support.vllm import ENVIRONMENT, model_for_vllm, trained

pytest.importorskip("vllm", reason="vLLM is in an environment of its own: see docs/rl.md")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

PROMPTS = [[1, 20, 21], [1, 30, 31, 32, 33]]
IN_A_BATCH = 8
"""``max_adapters`` of the sampler."""


@asynccontextmanager
async def serving(model: Path) -> AsyncIterator[gradwire.ServiceClient]:
    # On a CPU a run's samples are computed alone, by the local sampler, unless runs are grouped.
    args = ["--sampler", "vllm", "--group-runs", "on"]
    with pytest.MonkeyPatch.context() as environment:
        for name, value in ENVIRONMENT.items():
            environment.setenv(name, value)
        async with gradwire.connect(models=[f"tiny={model}"], server_args=args) as service:
            yield service
            begun = children()
        assert not pushed(begun - children())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[gradwire.ServiceClient]:
    async with serving(model_for_vllm(tmp_path_factory.mktemp("vllm") / "model")) as service:
        yield service


@pytest.fixture
def wide(tmp_path: Path, layers: int) -> Path:
    """A model as wide as Qwen3-0.6B, which has 28 layers."""
    return tiny_model(tmp_path / "model", hidden_size=1024, num_layers=layers, num_heads=16)


async def greedy(run: gradwire.TrainingClient, n: int = 1, **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "seed": 0}
    found = await run.sample(PROMPTS, n=n, **settings | options)
    return [sample.token_ids.tolist() for of_prompt in found.samples for sample in of_prompt]


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def pushed(pids: set[int]) -> int:
    """The number of adapters that engines with these process ids hold in vLLM."""
    return sum(len(list(Path("/dev/shm").glob(f"gradwire-adapters-*-{pid}-*/*"))) for pid in pids)


async def own(run: gradwire.TrainingClient, n: int = 1) -> list[list[int]]:
    """The local sampler's answer: vLLM is not asked for a sample from the likeliest token alone."""
    return await greedy(run, n, temperature=1.0, top_k=1)


@pytest.mark.parametrize("lora", [{"rank": 32}, None], ids=["adapter", "all weights"])
async def test_samples_follow_the_weights(service: gradwire.ServiceClient, lora: Any) -> None:
    run = await service.create_run("tiny", lora=lora, seed=3)
    said, adapters = [], pushed(children())
    for _ in range(3):
        said.append(await greedy(run, n=2))
        assert pushed(children()) == adapters + (lora is not None)
        assert said[-1] == await own(run, n=2)
        drawn = await run.sample(PROMPTS, n=2, max_tokens=12, seed=1, ignore_eos=True)
        rows = [[*prompt, *sample.token_ids] for prompt, of in zip(PROMPTS, drawn.samples) for sample in of]
        scored = await run.compute_logprobs(rows)
        for place, sample in enumerate(sample for of in drawn.samples for sample in of):
            np.testing.assert_allclose(sample.logprobs, scored[place][-12:], atol=1e-4)
        await trained(run)
    assert said[0] != said[-1]


async def test_runs_that_train_all_weights_take_turns(service: gradwire.ServiceClient) -> None:
    """One set of weights is in vLLM at a time; requests of the other run, which come meanwhile, wait for theirs."""
    runs = [await service.create_run("tiny") for _ in range(2)]
    for run in (runs[0], *runs):
        await trained(run)
    expected = [await own(run) for run in runs]
    assert expected[0] != expected[1]
    asked = [greedy(run, max_tokens=tokens) for run in (*runs, *runs) for tokens in (12, 4)]
    found = await asyncio.gather(*asked)
    assert found == [[ids[:tokens] for ids in rows] for rows in expected * 2 for tokens in (12, 4)]


async def test_more_runs_than_vllm_holds_adapters(service: gradwire.ServiceClient) -> None:
    runs = [await service.create_run("tiny", lora={"rank": 4}, seed=seed) for seed in range(IN_A_BATCH + 3)]
    for run in runs:
        await trained(run)
    first = [await greedy(run) for run in runs]
    assert first == [await own(run) for run in runs]
    assert first == [await greedy(run) for run in runs]  # the first ones have left vLLM meanwhile


@pytest.mark.parametrize(("lora", "layers"), [({"rank": 32}, 28), (None, 8)], ids=["adapter", "all weights"])
async def test_what_an_update_takes(wide: Path, lora: Any) -> None:
    seconds, said = [], set()
    async with serving(wide) as service:
        run = await service.create_run("tiny", lora=lora)
        await greedy(run)  # vLLM starts
        for _ in range(5):
            await trained(run)
            began = time.perf_counter()
            await greedy(run, max_tokens=1)
            updated = time.perf_counter()
            await greedy(run, max_tokens=1)
            seconds.append(2 * updated - began - time.perf_counter())
            said.add(str(await greedy(run)))
        info = await run.info()
    assert len(said) > 1
    print(
        f"{info.num_trainable_parameters:,} parameters: the first sample after a step takes {median(seconds):.3f} s"
        " longer than the next"
    )
