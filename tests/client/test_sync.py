"""The synchronous face: the same client, without an event loop of one's own."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator

import gradwire
import pytest
from gradwire import service, sync, training
from support.scripted import BATCH, Script, scripted_server
from support.server import Server


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    """A scripted server on a loop in another thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = scripted_server(script)
    found, _ = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(60)
    yield found
    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_watching_without_a_loop(server: Server) -> None:
    with gradwire.sync.connect(server.address) as service:
        watched = service.watch(with_points=True)
        assert next(watched).whole
        run = service.create_run("tiny", lora={"rank": 2}, name="watched")
        run.optim_step().exception(60)
        assert any(each.name == "watched" for update in watched for each in update.runs)
        watched.close()  # type: ignore[attr-defined]  # a generator
        service.delete_run(run.run_id)


def test_a_script_without_a_loop(script: Script, address: str) -> None:
    before = set(threading.enumerate())
    with gradwire.sync.connect(address) as service:
        assert [model.name for model in service.list_models()] == ["tiny"]
        run = service.create_run("tiny")
        steps = [run.optim_step() for _ in range(20)]
        assert [step.result(60).step for step in steps] == list(range(1, 21))
        with pytest.raises(gradwire.InvalidBatchError):
            run.forward_backward({"input_idz": [[1]]}, "row_loss").result()
        assert run.forward_backward(BATCH, "row_loss").result(60).loss == 21
        assert run.info().accepted_seq == 21
        again = service.get_training_client(run.run_id)
        assert again.optim_step().result(60).step == 22
        with pytest.raises(gradwire.UnknownModelError):
            service.create_run("gpt-9")
    assert not any(thread.name == "gradwire" for thread in set(threading.enumerate()) - before)
    service.close()
    with pytest.raises(gradwire.ServiceClosedError):
        service.list_models()
    with pytest.raises(gradwire.ServiceClosedError):
        run.optim_step().result()


def test_a_future_of_the_synchronous_client_can_be_awaited_in_a_notebook(address: str) -> None:
    with gradwire.sync.connect(address) as service:
        run = service.create_run("tiny")

        async def cell() -> int:
            return (await run.optim_step()).step + run.optim_step().result(60).step

        assert asyncio.run(cell()) == 1 + 2


def test_it_has_the_methods_of_the_asynchronous_one() -> None:
    def public(kind: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(value).parameters)
            for name, value in inspect.getmembers(kind, inspect.isfunction)
            if not name.startswith("_")
        }

    assert public(sync.ServiceClient) == public(service.ServiceClient)
    assert public(sync.TrainingClient) == public(training.TrainingClient)
    assert inspect.signature(sync.connect).parameters == inspect.signature(gradwire.connect).parameters


NOT_CLOSED = """
import sys
import gradwire

service = gradwire.sync.connect(sys.argv[1])
run = service.create_run("tiny", lora=2)
print(run.run_id)
for _ in range(20):
    run.forward_backward({"input_ids": [[4, 5, 6]]}, "causal_lm")
    run.optim_step(learning_rate=1e-3)
"""
NOT_CLOSED_ON_A_LOOP = """
import asyncio
import sys
import gradwire

async def main():
    service = await gradwire.connect(sys.argv[1])
    run = await service.create_run("tiny", lora=2)
    print(run.run_id)
    for _ in range(40):
        run.optim_step(learning_rate=1e-3)

asyncio.run(main())
"""


def ran(code: str, address: str) -> tuple[str, str]:
    """The run that a program created, and what it wrote to stderr."""
    done = subprocess.run([sys.executable, "-c", code, address], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_a_script_that_ends_without_closing_has_sent_what_it_submitted(server: Server) -> None:
    run_id, said = ran(NOT_CLOSED, server.address)
    assert said == ""
    with gradwire.sync.connect(server.address) as again:
        assert again.get_training_client(run_id).info().accepted_seq == 40
        again.delete_run(run_id)


FORKED = """
import os
import sys
import gradwire

service = gradwire.sync.connect(sys.argv[1])
run = service.create_run("tiny", lora=2)
pending = run.forward([{"input_ids": [1, 2]}], "causal_lm")
tries = [
    service.list_models,
    lambda: run.forward([{"input_ids": [1, 2]}], "causal_lm"),
    run.zero_grad,
    lambda: gradwire.sync.connect(sys.argv[1]),
]
for _ in range(2):
    if os.fork() == 0:
        for attempt in tries:
            try:
                attempt()
            except gradwire.InvalidRequestError as error:
                assert 'get_context("spawn")' in str(error), error
            else:
                sys.exit(8)
        sys.exit(7)  # ends as a program does; the connection is its parent's
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 7, status
assert pending.result().num_tokens == 2 and service.list_models()
print(run.run_id, os.waitstatus_to_exitcode(status))
"""


def test_connections_are_not_pickled(script: Script, address: str) -> None:
    with gradwire.sync.connect(address) as service:
        run = service.create_run("tiny", lora=2)
        held = (service, run, run.optim_step(), service.sampling_client("tiny"))
        for each in held:
            with pytest.raises(TypeError, match="holds a connection and cannot be pickled"):
                pickle.dumps(each)
        with pytest.raises(TypeError, match=rf"TrainingClient {run.run_id}> .*: pass its run_id on, and call"):
            copy.deepcopy(run)


def test_a_forked_child_is_told_that_the_connection_is_its_parents(server: Server) -> None:
    run_id, code = ran(FORKED, server.address)[0].split()
    assert code == "7"
    with gradwire.sync.connect(server.address) as again:
        again.delete_run(run_id)


def test_a_program_whose_loop_ends_first_is_told_what_it_may_have_lost(server: Server) -> None:
    run_id, said = ran(NOT_CLOSED_ON_A_LOOP, server.address)
    assert f"{run_id}: 40 submitted operations may not have reached the server, because the event loop ended" in said
    assert "async with gradwire.connect(...)" in said
    with gradwire.sync.connect(server.address) as again:
        again.delete_run(run_id)


def test_its_loop_leaves_no_task_behind() -> None:
    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(asyncio.sleep(3600.0))
        await asyncio.sleep(0)
        return task

    loop = sync.LoopThread()
    task = loop.run(begin())
    loop.close()
    assert task.cancelled()
