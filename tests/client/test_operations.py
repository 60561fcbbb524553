"""Operations: program order, failures and what they take with them, breaks and what is sent again."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support.scripted import BATCH, Fails, Received, Script, plain, scripted_run, scripted_server, until


def fails_on(*seqs: int, code: pb.ErrorCode.ValueType = pb.ERROR_CODE_NON_FINITE) -> Any:
    def answer(received: Received) -> Any:
        if received.seq in seqs:
            raise Fails(code, f"operation {received.seq} is not finite")
        return plain(received)

    return answer


async def outcomes(*futures: gradwire.Future[Any]) -> list[Any]:
    return await asyncio.gather(*futures, return_exceptions=True)


async def test_one_hundred_pipelined_operations_in_program_order() -> None:
    script = Script()
    finished: list[int] = []

    async def note(future: gradwire.Future[Any], index: int) -> None:
        await future
        finished.append(index)

    async with scripted_run(script) as (run, _):
        futures: list[gradwire.Future[Any]] = []
        for _ in range(50):
            futures += [run.forward_backward(BATCH, "row_loss"), run.optim_step()]
        await asyncio.gather(*(note(future, index) for index, future in enumerate(futures)))
        assert [(await future).loss for future in futures[::2]] == list(range(1, 100, 2))
        assert [(await future).step for future in futures[1::2]] == list(range(2, 101, 2))
    assert finished == list(range(100))
    assert script.kinds() == [(n, "forward_backward" if n % 2 else "optim_step") for n in range(1, 101)]


async def test_a_future_can_be_awaited_again_and_giving_up_does_not_cancel() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):
        script.hold.clear()
        future = run.optim_step()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future, 0.05)
        assert not future.done() and "pending" in repr(future)
        script.hold.set()
        assert (await future).step == (await future).step == 1
        assert future.done() and future.result() is await future and "done" in repr(future)


async def test_result_on_the_loops_own_thread_is_refused_and_elsewhere_waits() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):
        script.hold.clear()
        future = run.optim_step()
        with pytest.raises(gradwire.WouldDeadlockError, match="await"):
            future.result()
        with pytest.raises(TimeoutError, match="goes on"):
            await asyncio.to_thread(future.result, 0.05)
        script.hold.set()
        assert (await asyncio.to_thread(future.result, 60)).step == 1


async def test_calls_from_other_threads_keep_their_order() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):

        def many() -> list[int]:
            futures = [run.optim_step(learning_rate=rate) for rate in range(1, 51)]
            return [future.result(60).step for future in futures]

        steps = await asyncio.gather(asyncio.to_thread(many), asyncio.to_thread(many))
    assert sorted(steps[0] + steps[1]) == list(range(1, 101))
    for own in steps:
        rates = [received.operation.optim_step.learning_rate for received in script.received if received.seq in own]
        assert own == sorted(own) and rates == sorted(rates)


async def test_a_failure_takes_what_is_behind_it_through_the_next_step() -> None:
    async with scripted_run(Script(answer=fails_on(2))) as (run, _):
        futures = [run.forward_backward(BATCH, "row_loss") for _ in range(3)]
        futures += [run.optim_step(), run.forward_backward(BATCH, "row_loss"), run.optim_step()]
        good, first, behind, step, after, after_step = await outcomes(*futures)
    assert good.loss == 1 and after.loss == 5 and after_step.step == 6
    assert isinstance(first, gradwire.NonFiniteError) and first.seq == 2
    for aborted in (behind, step):
        assert isinstance(aborted, gradwire.AbortedPredecessorError)
        assert aborted.cause_seq == 2 and aborted.__cause__ is first


async def test_a_failure_that_was_raised_takes_nothing_more_with_it() -> None:
    script = Script(answer=fails_on(1))
    async with scripted_run(script) as (run, _):
        with pytest.raises(gradwire.NonFiniteError):
            await run.forward_backward(BATCH, "row_loss")
        assert (await run.optim_step()).step == 2
    assert [received.failure_seen for received in script.received] == [0, 1]


async def test_a_failure_that_was_not_raised_is_not_seen() -> None:
    script = Script(answer=fails_on(1))
    async with scripted_run(script) as (run, _):
        first = run.forward_backward(BATCH, "row_loss")
        await until(lambda: first.done())
        with pytest.raises(gradwire.AbortedPredecessorError):
            await run.forward_backward(BATCH, "row_loss")
        assert isinstance(first.exception(), gradwire.NonFiniteError)
    assert [received.failure_seen for received in script.received] == [0, 0]


async def test_a_batch_refused_here_fails_like_one_refused_there_and_takes_no_number() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):
        good = run.forward_backward(BATCH, "row_loss")
        bad = run.forward_backward({"input_idz": [[1]]}, "row_loss")
        behind, step = run.forward_backward(BATCH, "row_loss"), run.optim_step()
        after, after_step = run.forward_backward(BATCH, "row_loss"), run.optim_step()
        assert bad.done() and behind.done() and step.done()
        results = await outcomes(good, bad, behind, step, after, after_step)
    assert isinstance(results[1], gradwire.InvalidBatchError) and results[1].field == "input_idz"
    for aborted in results[2:4]:
        assert isinstance(aborted, gradwire.AbortedPredecessorError)
        assert aborted.__cause__ is results[1] and aborted.cause_seq is None
    # In the refused step's place its accumulation is ended.
    kinds = ["forward_backward", "zero_grad", "forward_backward", "optim_step"]
    assert script.kinds() == list(enumerate(kinds, start=1))
    assert results[4].loss == 3 and results[5].step == 4


async def test_a_local_failure_that_was_raised_takes_nothing_with_it() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):
        with pytest.raises(gradwire.UnknownLossError, match="row_loss"):
            await run.forward_backward(BATCH, "rowloss")
        assert (await run.forward_backward(BATCH, "row_loss")).loss == 1
        bad, behind = run.forward_backward(BATCH, "none"), run.sample([[1]])
        with pytest.raises(gradwire.AbortedPredecessorError):
            await behind  # it names the cause, which is thereby seen
        assert (await run.optim_step()).step == 2
        assert isinstance(bad.exception(), gradwire.UnknownLossError)


async def test_what_is_no_future_or_no_list_of_texts_is_named() -> None:
    async with scripted_run(Script()) as (run, _):
        futures = [run.forward_backward(BATCH, "row_loss"), run.optim_step()]
        with pytest.raises(gradwire.InvalidArgumentError, match=r"argument 0 is a list; .*gather\(\*futures\)"):
            await gradwire.gather(futures)  # type: ignore[arg-type]
        with pytest.raises(gradwire.InvalidArgumentError, match=r"argument 2 is an int$"):
            await gradwire.gather(*futures, 3)  # type: ignore[arg-type]
        with pytest.raises(gradwire.InvalidArgumentError, match="timeout is '3'; it is a number of seconds"):
            await run.optim_step(timeout="3")  # type: ignore[arg-type]
        assert [type(each).__name__ for each in await gradwire.gather(*futures)] == ["LossResult", "OptimStepResult"]


async def test_a_forgotten_await_is_said() -> None:
    async with scripted_run(Script()) as (run, _):
        future = run.forward_backward(BATCH, "row_loss")
        with pytest.raises(AttributeError, match="has no 'loss'; its result may: await it first, or call"):
            print(future.loss)  # type: ignore[attr-defined]
        assert not hasattr(future, "metrics") and (await future).loss == 1


async def test_gather_raises_the_first_cause() -> None:
    async with scripted_run(Script(answer=fails_on(1))) as (run, _):
        first, step = run.forward_backward(BATCH, "row_loss"), run.optim_step()
        with pytest.raises(gradwire.NonFiniteError):
            await gradwire.gather(step, first)
        fb, step = run.forward_backward(BATCH, "row_loss"), run.optim_step()
        loss, stepped = await gradwire.gather(fb, step)
        assert (loss.loss, stepped.step) == (3, 4)
    async with scripted_run(Script(answer=fails_on(1, 3))) as (run, _):
        lost = [run.forward_backward(BATCH, "row_loss"), run.optim_step(), run.forward_backward(BATCH, "row_loss")]
        with pytest.raises(gradwire.NonFiniteError, match="operation 1") as caught:
            await gradwire.gather(*lost)
        assert any("operation 3" in note for note in caught.value.__notes__)
        assert (await run.optim_step()).step == 4
        lost = []
        for name in ("none", "nil", "nil"):
            lost += [run.forward_backward(BATCH, name), run.optim_step()]
        with pytest.raises(gradwire.UnknownLossError) as wrong:
            await gradwire.gather(*lost)
        (note,) = wrong.value.__notes__
        assert note.startswith("also failed (2 times): UnknownLossError: there is no loss 'nil'")


async def test_a_failure_nobody_asked_for_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with scripted_run(Script(answer=fails_on(1))) as (run, _):
            run.forward_backward(BATCH, "row_loss")
            step = run.optim_step()
            with pytest.raises(gradwire.AbortedPredecessorError):
                await step
        gc.collect()  # the error's traceback may hold the future
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("gradwire")]
    assert [message for message in messages if "its result was never retrieved" in message] == [messages[0]]
    assert "operation 1 is not finite" in messages[0]


async def test_a_break_does_not_send_again_what_was_acknowledged() -> None:
    script = Script(break_submit=lambda count: count == 5)
    async with scripted_run(script) as (run, _):
        assert [(await run.optim_step()).step for _ in range(6)] == [1, 2, 3, 4, 5, 6]
    assert [seq for seq, _ in script.kinds()] == [1, 2, 3, 4, 5, 5, 6]


async def test_a_break_sends_again_all_that_was_not_acknowledged_in_order() -> None:
    script = Script(break_submit=lambda count: count == 5)
    async with scripted_run(script) as (run, _):
        futures = [run.optim_step() for _ in range(8)]
        assert [(await future).step for future in futures] == list(range(1, 9))
    seqs = [seq for seq, _ in script.kinds()]
    first = seqs[5]
    assert seqs == [1, 2, 3, 4, 5, *range(first, 9)] and first <= 5


async def test_results_resume_by_number_and_are_acknowledged() -> None:
    script = Script(break_results=lambda count: count in (3, 4, 9))
    async with scripted_run(script) as (run, _):
        futures = [run.optim_step() for _ in range(12)]
        assert [(await future).step for future in futures] == list(range(1, 13))
        await until(lambda: script.acked_up_to == 12)
    assert script.acked_up_to == 12
    assert len(script.received) == 12


async def test_the_server_gone_and_back_is_not_noticed_and_gone_for_good_is() -> None:
    script = Script()
    async with scripted_server(script) as (address, _):
        service = await gradwire.connect(address, reconnect_timeout=4.0)
        run = await service.create_run("tiny")
        assert (await run.optim_step()).step == 1
        script.hold.clear()
        future, port = run.optim_step(), address
        await until(lambda: len(script.received) >= 2)
    with pytest.raises(gradwire.ConnectionLostError, match=r"127\.0\.0\.1"):
        await future
    with pytest.raises(gradwire.ConnectionLostError):
        await run.optim_step()
    with pytest.raises(gradwire.ConnectionLostError):
        await service.list_models()
    async with scripted_server(script, port):
        again = service.get_training_client(run.run_id)
        assert (await again.optim_step()).step == 1
    await service.close()


async def test_a_restarted_server_that_fenced_everybody_is_opened_again() -> None:
    script = Script()
    async with scripted_server(script) as (address, first):
        service = await gradwire.connect(address, reconnect_timeout=10.0)
        run = await service.create_run("tiny")
        assert (await run.optim_step()).step == 1
    future = run.optim_step()
    await asyncio.sleep(0.1)
    async with scripted_server(script, address) as (_, second):
        second.epoch, second.accepted, second.results = first.epoch + 1, first.accepted, first.results
        assert (await future).step == 2
        assert [opened.takeover for opened in script.opened] == [True, False]
        second.epoch += 1  # without a break: another writer
        with pytest.raises(gradwire.StaleEpochError):
            await run.optim_step()
        await service.close()


async def test_a_refused_number_is_taken_by_an_operation_that_fails() -> None:
    refusal = pb.Error(code=pb.ERROR_CODE_UNSUPPORTED, message="not here")
    script = Script(refuse=lambda r: refusal if r.kind == "zero_grad" else None)
    async with scripted_run(script) as (run, _):
        refused, behind, step = run.zero_grad(), run.forward_backward(BATCH, "row_loss"), run.optim_step()
        results = await outcomes(refused, behind, step)
        assert isinstance(results[0], gradwire.UnsupportedError)
        assert all(isinstance(each, gradwire.AbortedPredecessorError) for each in results[1:])
        assert results[1].__cause__ is results[0]
        assert (await run.optim_step()).step == 4


async def test_a_full_queue_is_waited_for() -> None:
    refusals = iter([pb.Error(code=pb.ERROR_CODE_LIMIT_EXCEEDED, message="full")] * 1)
    script = Script(refuse=lambda received: next(refusals, None))
    async with scripted_run(script) as (run, _):
        assert (await run.optim_step()).step == 1
    assert [seq for seq, _ in script.kinds()] == [1, 1]


async def test_large_payloads_go_and_come_in_chunks() -> None:
    script = Script()

    def echo(received: Received) -> Any:
        result, _ = plain(received)
        return result, {"logprobs": received.columns["rewards"]}

    script.answer = echo
    rewards = np.random.default_rng(0).normal(size=(3, 400_000)).astype(np.float32)
    ids = np.ones(rewards.shape, np.int64)
    async with scripted_run(script) as (run, _):
        future = run.forward_backward({"input_ids": ids, "rewards": rewards}, "row_loss")
        expected, rewards[:] = rewards.copy(), 0  # what the caller does afterwards changes nothing
        result = await future
    np.testing.assert_array_equal(np.stack(result.outputs["logprobs"]), expected)


async def test_cancel() -> None:
    script = Script()
    async with scripted_run(script) as (run, _):
        script.hold.clear()
        future = run.optim_step()
        assert future.cancel()
        with pytest.raises(gradwire.OperationCancelledError):
            await future
        assert not future.cancel()
    assert script.cancelled == [1]


async def test_close_sends_what_was_submitted_and_fails_what_is_not_answered() -> None:
    script = Script()
    async with scripted_server(script) as (address, _):
        async with gradwire.connect(address) as service:
            run = await service.create_run("tiny")
            script.hold.clear()
            future = run.optim_step()
        assert script.kinds() == [(1, "optim_step")]
        with pytest.raises(gradwire.ServiceClosedError):
            await future
        with pytest.raises(gradwire.ServiceClosedError):
            await run.optim_step()
        with pytest.raises(gradwire.ServiceClosedError):
            await service.list_models()


async def test_wrong_arguments_name_themselves() -> None:
    script = Script()
    async with scripted_run(script) as (run, service):
        cases: list[tuple[Callable[[], gradwire.Future[Any]], str]] = [
            (lambda: run.optim_step(learning_rate="fast"), "learning_rate"),  # type: ignore[arg-type]
            (lambda: run.optim_step(on_nonfinite="ignore"), "on_nonfinite"),  # type: ignore[arg-type]
            (lambda: run.forward_backward(BATCH, "row_loss", {"betta": 1}), "betta"),
            (lambda: run.forward_backward(BATCH, "row_loss", {"beta": float("nan")}), "beta"),
            (lambda: run.forward_backward(BATCH, "row_loss", {"reference_model": run}), "reference_model"),
            (lambda: run.forward_backward(BATCH, "row_loss", "beta"), "loss_kwargs"),  # type: ignore[arg-type]
            (lambda: run.forward(BATCH, outputs=5), "outputs"),  # type: ignore[arg-type]
            (lambda: run.forward(BATCH, "row_loss", temperature=2.0), "temperature"),
            (lambda: run.forward(BATCH, loss_kwargs={"beta": 1}), "loss_kwargs"),
            (lambda: run.compute_logprobs([[1, 2]], temperature=0.0), "temperature"),
            (lambda: run.forward_backward_custom(BATCH, "dpo"), "fn"),  # type: ignore[arg-type]
            (lambda: run.optim_step(betas=0.9), "betas"),  # type: ignore[arg-type]
            (lambda: run.sample(["text", [1, 2]]), "prompts"),
            (lambda: run.sample(None), "prompts"),  # type: ignore[arg-type]
            (lambda: run.sample("text", n=0), "n"),
            (lambda: run.sample("text", top_k=-1), "top_k"),
            (lambda: run.load_checkpoint(3), "checkpoint"),  # type: ignore[arg-type]
            (lambda: run.sample("text", max_tokens=-3), "max_tokens"),
            (lambda: run.sample("text", stop_token_ids=["a"]), "stop_token_ids"),  # type: ignore[list-item]
        ]
        for call, field in cases:
            with pytest.raises(gradwire.InvalidArgumentError) as caught:
                await call()
            assert caught.value.field == field
            assert field in str(caught.value) and "type" not in str(caught.value)  # words of ours, not of protobuf
        for settings, sentence in (
            ({"seed": -1}, r"seed is -1; it must be a whole number from 0 to 2\*\*64 - 1"),
            ({"lora": "8"}, "rank is '8'; it must be a whole number"),
            ({"tags": {"a": 1}}, "it must be a mapping from text to text"),
        ):
            with pytest.raises(gradwire.InvalidArgumentError, match=sentence):
                await service.create_run("tiny", **settings)  # type: ignore[arg-type]
        with pytest.raises(gradwire.UnknownLossError, match="did you mean 'row_loss'") as unknown:
            await run.forward_backward(BATCH, "row_los")
        assert (unknown.value.field, bool(unknown.value.rule)) == ("loss_fn", True)
        assert not script.received


async def test_a_result_says_what_it_cost_and_with_whom() -> None:
    def answer(received: Received) -> Any:
        loss = pb.LossResult(loss=1.5, num_tokens=7, num_loss_tokens=5, num_microbatches=2, grouped_runs=3)
        loss.num_computed_tokens = 6
        loss.metrics["perplexity"] = 4.5
        return pb.OperationResult(loss=loss, timings=pb.Timings(queue_s=0.25, engine_s=0.5)), {}

    async with scripted_run(Script(answer=answer)) as (run, _):
        result = await run.forward_backward(BATCH, "row_loss")
    assert (result.loss, result["loss"], result["perplexity"]) == (1.5, 1.5, 4.5)
    assert (result.num_tokens, result.num_loss_tokens, result.num_microbatches, result.grouped_runs) == (7, 5, 2, 3)
    assert result.num_computed_tokens == 6
    assert (result.timings.queue_s, result.timings.engine_s) == (0.25, 0.5)
