"""A second pass over a batch sends nothing through the reference model, as whoever runs the server can count."""

from __future__ import annotations

import asyncio
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path

import gradwire
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.batches import SEVEN, VOCAB
from support.server import Server, free_port

pytestmark = pytest.mark.long


def lookups(metrics: str) -> tuple[float, float]:
    """Sequences whose log-probabilities were kept, and those that a reference was asked for."""
    with urllib.request.urlopen(f"http://{metrics}/metrics") as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families if family.name == "gradwire_cache_requests" for sample in family.samples]
    counts = {sample.labels["result"]: sample.value for sample in samples if sample.labels["cache"] == "logprobs"}
    return counts.get("hit", 0.0), counts.get("miss", 0.0)


@pytest.fixture(scope="module")
def counted(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a server and of its metrics."""
    metrics = f"127.0.0.1:{free_port()}"
    server = Server(
        tiny_model_path, tmp_path_factory.mktemp("state"), "--engines", "1", "--metrics-address", metrics
    ).start()
    yield server.address, metrics
    assert server.end() == 0


@pytest.mark.parametrize("lora", [pytest.param(None, marks=pytest.mark.slow), {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("loss_fn", ["enhanced_ppo", "dpo", "grpo"])
async def test_the_second_pass_has_no_reference_forward(
    counted: tuple[str, str], loss_fn: str, lora: dict[str, int] | None
) -> None:
    address, metrics = counted
    make, loss_kwargs, head = SEVEN[loss_fn]
    batch = make(np.random.default_rng(zlib.crc32(f"{loss_fn} {lora}".encode())), 6, VOCAB)

    async def expect(hits: float, misses: float) -> None:
        """The engine tells its counts once a second."""
        for _ in range(600):
            if (found := await asyncio.to_thread(lookups, metrics)) == (hits, misses):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{found}, expected {(hits, misses)}")

    before = await asyncio.to_thread(lookups, metrics)
    async with gradwire.connect(address) as service:
        run = await service.create_run("tiny", lora=lora, head=head, seed=1)
        first = await run.forward_backward(batch, loss_fn, loss_kwargs)
        sequences = first.num_sequences
        await expect(before[0], before[1] + sequences)
        await run.optim_step(learning_rate=1e-3)
        second = await run.forward_backward(batch, loss_fn, loss_kwargs)
        await expect(before[0] + sequences, before[1] + sequences)
        assert second.loss != first.loss
        await service.delete_run(run.run_id)
