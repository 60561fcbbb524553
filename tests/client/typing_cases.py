"""Calls that check, and calls that must not. Read by test_surface.py; never run."""
# ruff: noqa: B018

from __future__ import annotations

from typing import Any, assert_type

import gradwire
import numpy as np
from numpy.typing import NDArray


async def right(ids: NDArray[np.int64]) -> None:
    async with gradwire.connect("gpu:1", api_key="key") as service:
        run = await service.create_run("m", lora={"rank": 8}, head="value")
        fb = run.forward_backward({"input_ids": ids}, "causal_lm", {"beta": 0.1}, outputs=["logprobs"])
        assert_type(fb, gradwire.Future[gradwire.LossResult])
        assert_type(await fb, gradwire.LossResult)
        assert_type((await run.optim_step(1e-4, betas=(0.9, 0.95))).grad_norm, float)
        loss, step = await gradwire.gather(run.forward_backward([{"input_ids": [1]}], "causal_lm"), run.optim_step())
        assert_type(loss, gradwire.LossResult)
        assert_type(step, gradwire.OptimStepResult)
        assert_type(await run.compute_rewards([[1, 2]]), NDArray[Any])
        assert_type((await run.sample(["text"])).samples[0][0].token_ids, NDArray[Any])
        saved = await run.save_checkpoint("a")
        assert_type(saved, gradwire.Checkpoint)
        run.load_checkpoint(saved)
        assert_type(await service.get_training_client(run.run_id), gradwire.TrainingClient)
    service = await gradwire.connect(models=["m"])
    await service.close()


def right_sync() -> None:
    with gradwire.sync.connect("gpu:1") as service:
        run = service.create_run("m", lora=8)
        assert_type(run.info(), gradwire.RunInfo)
        assert_type(run.optim_step().result(), gradwire.OptimStepResult)
        assert_type(service.list_losses(), list[gradwire.LossInfo])


async def wrong(service: gradwire.ServiceClient, run: gradwire.TrainingClient) -> None:
    gradwire.connect(50051)  # wrong: arg-type
    gradwire.connect("gpu:1", "key")  # wrong: call-arg
    await service.create_run("m", head="critic")  # wrong: arg-type
    run.forward_backward({"input_ids": [[1]]})  # wrong: call-arg
    run.forward_backward("text", "causal_lm")  # wrong: arg-type
    run.forward_backward({"input_ids": [[1]]}, "causal_lm", outputs=["logits"])  # wrong: list-item
    run.optim_step("fast")  # wrong: arg-type
    run.optim_step(betas=0.9)  # wrong: arg-type
    run.optim_step(lr=1e-4)  # wrong: call-arg
    run.optim_step().grad_norm  # wrong: attr-defined
    run.export("x", format="onnx")  # wrong: arg-type
    (await run.forward_backward({}, "causal_lm")).loss + 1  # wrong: operator
    with service:  # wrong: attr-defined
        pass


def wrong_sync(run: gradwire.sync.TrainingClient) -> None:
    run.info().loss  # wrong: attr-defined
    run.list_checkpoints(5)  # wrong: call-arg
