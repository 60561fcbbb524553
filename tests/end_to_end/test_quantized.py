"""A server whose base models are held in few bits: it learns, repeats itself bit for bit, and exports what it says."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from support.batches import VOCAB, causal_lm, preferences
from support.server import Server
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long

pytest.importorskip("bitsandbytes", reason="needs gradwire[quantize]")

ROW = [5, 9, 11, 30, 7, 41, 8]


async def steps(run: gradwire.TrainingClient, count: int) -> list[float]:
    kwargs = {"reference_model": {"name": "base", "quantize": "int8"}, "beta": 0.1}
    losses = []
    for _ in range(count):
        supervised = run.forward_backward(causal_lm(np.random.default_rng(3), 4, VOCAB), "causal_lm")
        preferred = run.forward_backward(preferences(np.random.default_rng(4), 4, VOCAB), "dpo", kwargs)
        step = run.optim_step(learning_rate=1e-2, optimizer="adamw8bit")
        losses += [(await supervised).metrics["loss"], (await preferred).metrics["loss"], (await step).grad_norm]
    return losses


@pytest.mark.slow  # three starts
async def test_it_trains_survives_a_kill_bit_for_bit_and_says_how_far_the_export_is(
    tiny_model_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tiny_model_path, tmp_path / "state", "--quantize", "nf4").start()
    settings: dict[str, Any] = {"seed": 7, "lora": {"rank": 8}}
    async with gradwire.connect(server.address) as service:
        calm = await service.create_run("tiny", **settings)
        expected = await steps(calm, 6)
        assert expected[-3] < expected[0] - 0.1  # the supervised loss of the same batch
        run = await service.create_run("tiny", **settings)
        seen = await steps(run, 2)
        await run.save_checkpoint("two")
        seen += await steps(run, 2)
        server.end(signal.SIGKILL)
    server.start()
    async with gradwire.connect(server.address) as service:
        run = service.get_training_client(run.run_id)
        seen += await steps(run, 2)
        assert seen == expected
        (served,) = await run.compute_logprobs([ROW])
        with caplog.at_level(logging.WARNING, logger="gradwire"):
            folder = await run.export(tmp_path / "merged", "merged")
        (told,) = [record for record in caplog.records if "quantized base" in record.message]
        difference = float(told.args[1]) if isinstance(told.args, tuple) else 0.0
        owners: Mapping[str, int] = {}
        while not (owners.get("base") and owners.get("runs")):  # the engine reports once a second
            await asyncio.sleep(0.1)
            owners = (await service.server_info()).engines[0].memory_by_owner
    assert server.end() == 0
    merged = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = merged(input_ids=torch.tensor([ROW])).logits[0, :-1]
    own = logits.log_softmax(-1).gather(1, torch.tensor(ROW[1:])[:, None])[:, 0].numpy()
    apart = float(np.abs(own - np.array(served)).max())
    assert 0 < apart < 1 and 0 < difference < 1  # 4 bits are worth less than a nat here, on these tokens and on those


async def test_what_cannot_be_held_in_few_bits_is_refused_by_name(tiny_model_path: Path, tmp_path: Path) -> None:
    server = Server(tiny_model_path, tmp_path / "state").start()
    batch = preferences(np.random.default_rng(4), 2, VOCAB)

    async def refusal(run: gradwire.TrainingClient, **reference: Any) -> str:
        kwargs = {"reference_model": {"quantize": "nf4"} | reference.pop("model"), "beta": 0.1} | reference
        with pytest.raises(gradwire.InvalidArgumentError) as refused:
            await run.forward_backward(batch, "dpo", kwargs)
        return str(refused.value)

    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny")
        saved = await run.save_checkpoint("all-weights")
        assert "has all weights of a model" in await refusal(run, model={"name": saved.path})
        assert "follows the run's weights" in await refusal(run, model={"name": "ema"})
        assert "leave out one of them" in await refusal(run, model={"name": "base"}, reference_dtype="bfloat16")
        assert "dpo: the 'quantize' of reference_model is 'nf3'" in await refusal(
            run, model={"name": "base", "quantize": "nf3"}
        )
        assert "is {'quantize': 'nf4'}, without the entry 'name'" in await refusal(run, model={})
        assert "dpo: reference_model has no entry 'bits'; it has: name, quantize, offload" in await refusal(
            run, model={"name": "base", "bits": 4}
        )
        both = await refusal(run, model={"name": "base", "offload": True})
        assert "True}: a reference is held in few bits or offloaded: leave out quantize or offload" in both
        with pytest.raises(gradwire.InvalidArgumentError, match=r'reference_model is \[\]; it takes "base" \(the run'):
            await run.forward_backward(batch, "dpo", {"reference_model": []})
    assert server.end() == 0
