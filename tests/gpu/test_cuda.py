"""The service on a CUDA device, through its public door: a real server process that computes in bfloat16.

python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from support.batches import SEVEN, VOCAB, causal_lm
from support.server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROBE = [[5, 9, 11, 30, 7], [40, 41, 42], list(range(3, 23))]


@pytest.fixture(scope="module")
def servers(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    settings = {
        "cuda": ("--device", "cuda"),
        "cuda-small": ("--device", "cuda", "--microbatch-tokens", "24", "--activation-budget-gib", "0.0001"),
        "cpu": ("--device", "cpu"),
    }
    running = {
        name: Server(model_path, tmp_path_factory.mktemp(name), *args).start() for name, args in settings.items()
    }
    yield running
    for server in running.values():
        assert server.end() == 0


@pytest.fixture
async def services(servers: dict[str, Server]) -> AsyncIterator[dict[str, gradwire.ServiceClient]]:
    opened = {name: await gradwire.connect(server.address) for name, server in servers.items()}
    yield opened
    for service in opened.values():
        await service.close()


async def test_the_engine_is_on_the_device_in_bfloat16(services: dict[str, gradwire.ServiceClient]) -> None:
    info = await services["cuda"].server_info()
    assert info.device.startswith("cuda")
    assert (await services["cuda"].list_models())[0].dtype == "bfloat16"


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("loss_fn", SEVEN)
async def test_losses_agree_with_float32_on_the_cpu_and_train(
    services: dict[str, gradwire.ServiceClient], loss_fn: str, lora: dict[str, Any] | None
) -> None:
    make, loss_kwargs, head = SEVEN[loss_fn]
    batch = make(np.random.default_rng(3), 8, VOCAB)
    results = {}
    for name, service in services.items():
        run = await service.create_run("tiny", lora=lora, head=head, seed=1)
        first = await run.forward_backward(batch, loss_fn, loss_kwargs, outputs=["logprobs"])
        for _ in range(3):
            await run.optim_step(learning_rate=1e-3)
            last = await run.forward_backward(batch, loss_fn, loss_kwargs)
        assert first.loss is not None and last.loss is not None and last.loss < first.loss
        results[name] = first
        await service.delete_run(run.run_id)
    exact = np.concatenate(results["cpu"].outputs["logprobs"])
    for name in ("cuda", "cuda-small"):
        assert results[name].loss == pytest.approx(results["cpu"].loss, rel=0.03, abs=0.03)
        np.testing.assert_allclose(np.concatenate(results[name].outputs["logprobs"]), exact, atol=0.05)
    assert results["cuda-small"].num_microbatches > results["cuda"].num_microbatches


async def test_sampled_logprobs_are_those_that_scoring_gives(services: dict[str, gradwire.ServiceClient]) -> None:
    run = await services["cuda"].create_run("tiny", lora={"rank": 4})
    prompts = [[4, 5, 6], list(range(10, 40))]
    drawn = await run.sample(prompts, n=4, max_tokens=16, seed=1, ignore_eos=True)
    rows = [p + s.token_ids.tolist() for p, samples in zip(prompts, drawn.samples, strict=True) for s in samples]
    scored = await run.compute_logprobs(rows)
    flat = [sample for samples in drawn.samples for sample in samples]
    for row, sample in zip(scored, flat, strict=True):
        np.testing.assert_allclose(row[-16:], sample.logprobs, atol=0.1)


async def test_a_checkpoint_goes_on_where_it_was(model_path: Path, tmp_path: Path, servers: dict[str, Server]) -> None:
    rng = np.random.default_rng(5)
    batches = [causal_lm(rng, 4, VOCAB) for _ in range(6)]

    async def steps(run: gradwire.TrainingClient, part: list[dict[str, Any]]) -> list[float]:
        pairs = [(run.forward_backward(b, "causal_lm"), run.optim_step(learning_rate=1e-3)) for b in part]
        for _, step in pairs:
            await step
        return [(await fb).metrics["loss"] for fb, _ in pairs]

    server = Server(model_path, tmp_path / "state", "--device", "cuda").start()
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora={"rank": 4, "dropout": 0.1}, seed=2)
        await steps(run, batches[:3])
        checkpoint = await run.save_checkpoint("three")
        expected = await steps(run, batches[3:])
    assert server.end() == 0
    server.start()
    async with gradwire.connect(server.address) as service:
        run = service.get_training_client(run.run_id)
        await run.load_checkpoint(checkpoint.path)
        assert await steps(run, batches[3:]) == pytest.approx(expected, rel=1e-3)
    assert server.end() == 0
