"""LoRA on the output head through the SDK: training, sampling, kill -9, and the exported folder in plain peft."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import gradwire
import numpy as np
import pytest
import torch
from support.plain_peft import with_adapter
from support.server import Server

pytestmark = pytest.mark.long

ROWS = [[1, 20, 21, 22, 23], [1, 30, 31, 32, 33, 34]]
BATCH = {"input_ids": ROWS}
LORA = {"rank": 4, "target_modules": ["all-linear", "lm_head"]}


async def scores(run: gradwire.TrainingClient) -> list[np.ndarray]:
    return [np.asarray(row) for row in await run.compute_logprobs(ROWS)]


async def test_an_adapter_on_the_output_head(killable: Server, tiny_model_path: Path, tmp_path: Path) -> None:
    async with gradwire.connect(killable.address) as service:
        run = await service.create_run("tiny", lora=LORA)
        usual = await service.create_run("tiny", lora={"rank": 4, "target_modules": "all-linear"})
        info = await run.info()
        assert info.lora is not None and info.lora["target_modules"] == LORA["target_modules"]
        assert info.num_trainable_parameters == (await usual.info()).num_trainable_parameters + 4 * (32 + 100)
        for _ in range(3):
            run.forward_backward(BATCH, "causal_lm")
            await run.optim_step(learning_rate=3e-2)
        ((drawn,),) = (await run.sample([ROWS[0]], max_tokens=6, seed=1)).samples
        whole = [*ROWS[0], *drawn.token_ids.tolist()]
        np.testing.assert_allclose(
            np.asarray((await run.compute_logprobs([whole]))[0])[-len(drawn.token_ids) :],
            drawn.logprobs,
            atol=1e-5,
        )
        before = await scores(run)
    killable.end(signal.SIGKILL)
    killable.start()
    async with gradwire.connect(killable.address) as service:
        run = service.get_training_client(run.run_id)
        for ours, theirs in zip(await scores(run), before, strict=True):  # replayed
            np.testing.assert_array_equal(ours, theirs)
        folder = await run.export(tmp_path / "adapter")
    model = await asyncio.to_thread(with_adapter, tiny_model_path, folder)
    assert model.base_model.model.lm_head.lora_B["default"].weight.abs().max() > 1e-2
    with torch.no_grad():
        for row, ours in zip(ROWS, before, strict=True):
            ids = torch.tensor([row])
            logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
            np.testing.assert_allclose(ours, logprobs.gather(-1, ids[0, 1:, None])[:, 0], atol=1e-5)
