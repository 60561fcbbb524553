"""Losses of one's own: the scores come here, their gradients go back, and the loop stays free."""

from __future__ import annotations

import threading
import time
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire.errors import InvalidArgumentError
from gradwire_proto.v1 import training_pb2 as pb
from support.scripted import BATCH, Fails, Received, Script, plain, scores, scripted_run, until


def squares(batch: Any, given: dict[str, list[torch.Tensor]]) -> tuple[torch.Tensor, dict[str, float]]:
    assert batch is BATCH
    return sum((row**2).sum() for row in given["logprobs"]), {"rows": len(given["logprobs"])}


async def test_torch_gradients() -> None:
    script = Script(answer=scores)
    async with scripted_run(script) as (run, _):
        result = await run.forward_backward_custom(BATCH, squares, weight=3.0)
    forward, backward = script.received
    assert (forward.kind, backward.kind) == ("kept_forward", "backward")
    assert list(forward.operation.kept_forward.scores) == ["logprobs"]
    sent = backward.operation.backward
    assert (sent.forward_seq, sent.weight, sent.loss) == (1, 3.0, 4.0 + 9.0 + 25.0)
    assert [row.tolist() for row in backward.columns["grad_logprobs"].rows()] == [[-4.0, -6.0], [-10.0]]
    assert result.loss == result["loss"] == 38.0 and result["rows"] == 2
    assert [row.tolist() for row in result.outputs["logprobs"]] == [[-2.0, -3.0], [-5.0]]


@pytest.mark.parametrize(
    "fn", [lambda scores: scores["logprobs"][0].sum(), lambda batch, scores, beta: 0.0, lambda *, batch, scores: 0.0]
)
async def test_a_loss_of_another_signature_is_told_so_before_anything_is_sent(fn: Any) -> None:
    script = Script(answer=scores)
    async with scripted_run(script) as (run, _):
        with pytest.raises(InvalidArgumentError, match=r"with two arguments, the batch and the scores; <lambda>\("):
            await run.forward_backward_custom(BATCH, fn)
    assert not script.received


async def test_numpy_gradients() -> None:
    def halves(batch: Any, given: dict[str, list[np.ndarray]]) -> Any:
        assert all(isinstance(row, np.ndarray) for row in given["logprobs"])
        return 1.5, {"logprobs": [row / 2 for row in given["logprobs"]]}, {"extra": 7}

    script = Script(answer=scores)
    async with scripted_run(script) as (run, _):
        result = await run.forward_backward_custom(BATCH, halves, framework="numpy")
    assert script.received[1].columns["grad_logprobs"].values.tolist() == [-1.0, -1.5, -2.5]
    assert (result.loss, result["extra"]) == (1.5, 7)


async def test_a_score_the_loss_does_not_use_has_no_gradient() -> None:
    def answer(received: Received) -> Any:
        result, columns = scores(received)
        return result, columns | ({"entropy": columns["logprobs"]} if columns else {})

    script = Script(answer=answer)
    async with scripted_run(script) as (run, _):
        fn = lambda batch, given: given["logprobs"][0].sum()  # noqa: E731
        await run.forward_backward_custom(BATCH, fn, scores=("logprobs", "entropy"))
    sent = script.received[1].columns
    assert sent["grad_entropy"].values.tolist() == [0, 0, 0]
    assert sent["grad_logprobs"].values.tolist() == [1, 1, 0]


async def test_what_is_behind_is_sent_while_the_loss_is_computed_and_the_loop_is_free() -> None:
    script, go = Script(answer=scores), threading.Event()

    def slow(batch: Any, given: Any) -> Any:
        assert go.wait(60)
        return squares(batch, given)

    async with scripted_run(script) as (run, _):
        custom, step = run.forward_backward_custom(BATCH, slow), run.optim_step()
        await until(lambda: len(script.received) >= 2)
        assert script.kinds() == [(1, "kept_forward"), (3, "optim_step")]
        assert not step.done()
        go.set()
        loss, stepped = await gradwire.gather(custom, step)
    assert script.kinds()[2] == (2, "backward")
    assert (loss.loss, stepped.step) == (38.0, 3)


async def test_a_gap_survives_a_break() -> None:
    script, go = Script(answer=scores), threading.Event()
    script.break_submit = lambda count: count == 3

    def slow(batch: Any, given: Any) -> Any:
        assert go.wait(60)
        return squares(batch, given)

    async with scripted_run(script) as (run, _):
        custom = run.forward_backward_custom(BATCH, slow)
        steps = [run.optim_step() for _ in range(3)]
        await until(lambda: len(script.received) >= 4)
        go.set()
        assert (await custom).loss == 38.0
        assert [(await step).step for step in steps] == [3, 4, 5]


async def test_what_the_loss_raises_is_raised_and_what_is_behind_fails_with_it() -> None:
    script = Script(answer=scores)

    def broken(batch: Any, given: Any) -> Any:
        raise KeyError("mine")

    async with scripted_run(script) as (run, _):
        custom, step = run.forward_backward_custom(BATCH, broken), run.optim_step()
        with pytest.raises(KeyError, match="mine") as caught:
            await custom
        assert any(frame.name == "broken" for frame in caught.traceback)
        with pytest.raises(gradwire.AbortedPredecessorError) as aborted:
            await step
        assert aborted.value.__cause__ is caught.value
        assert "KeyError" in script.received[-1].operation.backward.abandoned
        assert (await run.optim_step()).step == 4
    assert script.received[-1].failure_seen >= 2


async def test_a_forward_that_fails_is_the_error_and_the_second_number_is_given_up() -> None:
    script = Script()

    def answer(received: Received) -> Any:
        if received.seq == 1:
            raise Fails(pb.ERROR_CODE_OUT_OF_MEMORY, "too large")
        return plain(received)

    script.answer = answer
    async with scripted_run(script) as (run, _):
        custom, step = run.forward_backward_custom(BATCH, squares), run.optim_step()
        with pytest.raises(gradwire.OutOfMemoryError, match="too large") as caught:
            await custom
        with pytest.raises(gradwire.AbortedPredecessorError) as aborted:
            await step
        assert aborted.value.__cause__ is caught.value
        assert (await run.optim_step()).step == 4
    assert sorted(script.kinds())[1] == (2, "backward")


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (1.0, "return a torch loss"),
        (torch.zeros(3, requires_grad=True), "one number"),
        ((1.0, {"logprobs": [np.zeros(9)]}), "lengths"),
        ((1.0, {"values": []}), "not one of the requested scores"),
    ],
)
async def test_a_loss_that_returns_something_else(returned: Any, text: str) -> None:
    async with scripted_run(Script(answer=scores)) as (run, _):
        with pytest.raises(ValueError, match=text):
            await run.forward_backward_custom(BATCH, lambda batch, given: returned)


async def test_closing_does_not_wait_for_a_loss_that_is_being_computed() -> None:
    script, go = Script(answer=scores), threading.Event()
    async with scripted_run(script) as (run, service):
        custom = run.forward_backward_custom(BATCH, lambda batch, given: go.wait(100) and squares(batch, given))
        await until(lambda: script.received)
        began = time.monotonic()
        await service.close()
        assert time.monotonic() - began < 30
        with pytest.raises(gradwire.ServiceClosedError):
            await custom
        go.set()
