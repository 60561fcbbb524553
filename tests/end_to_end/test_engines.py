"""Two real engines behind one front: the same bits wherever an operation runs, under moves, too."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import pytest
from gradwire.cli.app import app
from support.server import Server
from support.tiny import tiny_model
from typer.testing import CliRunner

pytestmark = pytest.mark.long

LORA = {"rank": 4, "dropout": 0.2}
ROUNDS = 6
MOVES = 20


@pytest.fixture(scope="module")
def server(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    state = tmp_path_factory.mktemp("two_engines")
    running = Server(
        tiny_model_path, state, "--engines", "2", "--threads", "1", "--checkpoint-every-steps", "2"
    ).start()
    yield running
    running.end()


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": [(number * 7 + 5 * place) % 90 + 3 for place in range(12)]} for _ in range(2)]


async def train(run: gradwire.TrainingClient) -> list[float]:
    """Two calls a step, so that most moves come in mid-accumulation; the figures of each result."""
    figures: list[float] = []
    for each in range(ROUNDS):
        first = run.forward_backward(rows(each), "causal_lm")
        second = run.forward_backward(rows(each + 1), "causal_lm")
        step = run.optim_step(learning_rate=1e-2)
        figures += [(await first).loss, (await second).loss, (await step).grad_norm]
    return figures


async def weights(run: gradwire.TrainingClient) -> list[list[float]]:
    """What the run computes now, to the last bit."""
    scored = await run.forward(rows(3), outputs=["logprobs"])
    return [list(map(float, row)) for row in scored.outputs["logprobs"]]


async def test_every_bit_is_the_same_on_each_engine_and_under_moves(server: Server) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with gradwire.connect(server.address) as client:
        runs = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(4)]
        still, moving = runs[:2], runs[2:]
        assert {(await run.info()).engine for run in still} == {0, 1}
        expected = await train(still[0])
        assert await train(still[1]) == expected
        training = [asyncio.create_task(train(run)) for run in moving]
        for _ in range(MOVES):
            await asyncio.sleep(rng.random() * 0.05)
            await client.move_run(rng.choice(moving).run_id)
        assert [await task for task in training] == [expected] * 2
        scores = await weights(still[0])
        assert [await weights(run) for run in runs] == [scores] * 4
        for run in runs:
            await client.delete_run(run.run_id)


def test_an_administrator_moves_runs_and_drains_an_engine(server: Server) -> None:
    def move(*words: str) -> str:
        done = CliRunner().invoke(app, ["runs", "move", *words, "--address", server.address], env={"COLUMNS": "200"})
        return done.output

    with gradwire.sync.connect(server.address) as client:
        run_id = client.create_run("tiny", lora=LORA, seed=1).run_id
        for engine in (1, 0, 1):
            assert move(run_id, "--to", str(engine)) == f"{run_id} is on engine {engine}\n"
        assert move("--drain", "1") == "engine 1 drains: 1 runs moved\n"
        assert client.get_training_client(run_id).info().engine == 0
        assert "no other engine" in move("--drain", "0")
        assert move("--undo-drain", "1") == "engine 1 takes runs again\n"
        assert "there is no engine 7: this server's are 0 to 1" in move(run_id, "--to", "7")
        assert "run-none" in move("run-none")
        for words in ((), (run_id, "--drain", "0")):
            assert "give ids of runs, or --drain ENGINE" in move(*words)
        client.delete_run(run_id)


async def test_a_prompt_goes_where_its_beginning_is_known(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny", context_length=1024)
    server = Server(model, tmp_path / "state", "--engines", "2", "--threads", "1").start()
    talk = [5 + number * 7 % 60 for number in range(600)]
    async with gradwire.connect(server.address) as client:
        sampler = client.sampling_client("tiny")
        busy = sampler.stream([1, 2, 3], max_tokens=1000, ignore_eos=True)
        await anext(busy)  # engine 0 has this one
        for tokens in (300, 450, 600):
            found = await sampler.sample([talk[:tokens]], max_tokens=2, ignore_eos=True)
            assert found.num_cached_tokens >= tokens - 150 - 16 or tokens == 300
            await busy.aclose()  # from now on both engines have nothing to do
    assert server.end() == 0


@pytest.mark.slow
async def test_two_engines_of_two_ranks_each(tiny_model_path: Path, tmp_path: Path) -> None:
    engines = ("--engines", "2", "--ranks", "2", "--threads", "1", "--device", "cpu")
    running = Server(tiny_model_path, tmp_path, *engines).start()
    try:
        async with gradwire.connect(running.address) as client:
            runs = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(2)]
            assert {(each.engine, each.lanes) for each in [await run.info() for run in runs]} == {(0, 2), (1, 2)}
            first, second = [await train(run) for run in runs]
            assert first == second
            await client.move_run(runs[0].run_id)
            assert await weights(runs[0]) == await weights(runs[1])
    finally:
        running.end()


async def test_a_run_moves_between_the_halves_of_a_clients_loss(server: Server) -> None:
    """The second half finds the graph of the first one on the other engine, where that is repeated."""
    loop = asyncio.get_running_loop()
    async with gradwire.connect(server.address) as client:
        still, moving = [await client.create_run("tiny", lora=LORA, seed=1) for _ in range(2)]
        places = [(await moving.info()).engine]

        async def moved() -> None:
            places.append(await client.move_run(moving.run_id))

        async def trained(run: gradwire.TrainingClient) -> list[float]:
            def loss(batch: Any, scores: Any) -> tuple[float, dict[str, Any]]:
                if run is moving:
                    asyncio.run_coroutine_threadsafe(moved(), loop).result()
                values = scores["logprobs"]
                return -float(sum(row.sum() for row in values)), {"logprobs": [row * 0 - 1 for row in values]}

            figures: list[float] = []
            for each in range(3):
                first = await run.forward_backward(rows(each), "causal_lm")
                custom = await run.forward_backward_custom(rows(each + 1), loss, framework="numpy")
                step = await run.optim_step(learning_rate=1e-2)
                figures += [first.loss, custom.loss, step.grad_norm]
            return figures

        assert await trained(moving) == await trained(still)
        assert await weights(moving) == await weights(still)
        assert len(places) == 4 and all(here != there for here, there in itertools.pairwise(places))
        for run in (still, moving):
            await client.delete_run(run.run_id)


PROMPTS = [[5 + number, 7, 3 * number + 4] for number in range(10)]
ASKED: dict[str, Any] = {"max_tokens": 12, "n": 7, "temperature": 0.9, "seed": 11}


def tokens(result: gradwire.SampleResult) -> list[list[list[int]]]:
    return [[sample.token_ids.tolist() for sample in of_prompt] for of_prompt in result.samples]


def logprobs(result: gradwire.SampleResult) -> list[float]:
    return [float(each) for of_prompt in result.samples for sample in of_prompt for each in sample.logprobs]


async def both(client: gradwire.ServiceClient) -> None:
    """Wait until both engines are ready."""
    while not all(engine.ready for engine in (await client.server_info()).engines):  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def shared(server: Server) -> list[Path]:
    return [file for file in (server.state_dir / "shared_weights").glob("*/*") if file.is_file()]


@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
async def test_samples_on_two_engines_have_the_tokens_of_one(server: Server, lora: dict[str, Any] | None) -> None:
    async with gradwire.connect(server.address) as client:
        run = await client.create_run("tiny", lora=lora, seed=1)
        current, seen = client.sampling_client(run.run_id), []
        for each in range(3):
            await run.train_step(rows(each), "causal_lm", learning_rate=1e-2)
            one = await current.sample(PROMPTS, **ASKED, deterministic=True)
            two, inside = await current.sample(PROMPTS, **ASKED), await run.sample(PROMPTS, **ASKED)
            assert not one.engines
            assert [sorted(set(result.engines)) for result in (two, inside)] == [[0, 1]] * 2
            assert len(two.engines) == len(PROMPTS)
            assert tokens(one) == tokens(two) == tokens(inside)
            assert logprobs(two) == pytest.approx(logprobs(one), abs=1e-5)
            assert two.num_sampled_tokens == one.num_sampled_tokens
            assert [file.name.startswith(run.run_id) for file in shared(server)] == [True], "one file, of the newest"
            seen.append(tokens(one))
        assert seen[0] != seen[1] != seen[2], "the other engine has the new weights each time"
        unseeded = {name: value for name, value in ASKED.items() if name != "seed"}
        drawn = [await current.sample(PROMPTS, **unseeded) for _ in range(2)]
        assert tokens(drawn[0]) != tokens(drawn[1])
        saved = await run.save_checkpoint("here")
        assert tokens(await client.sampling_client(saved.path).sample(PROMPTS, **ASKED)) == seen[-1]
        await client.delete_run(run.run_id)
        while shared(server):  # noqa: ASYNC110  nobody announces it
            await asyncio.sleep(0.05)


async def test_an_engine_that_trains_takes_no_part_of_anothers_samples(server: Server) -> None:
    async with gradwire.connect(server.address) as client:
        await both(client)
        run = await client.create_run("tiny", lora=LORA, seed=1)
        base = client.sampling_client("tiny")
        expected = await base.sample(PROMPTS, **ASKED)
        assert set(expected.engines) == {0, 1}
        steps = [run.train_step(rows(each), "causal_lm", learning_rate=1e-2) for each in range(100)]
        await steps[0]
        beside = await base.sample(PROMPTS, **ASKED)
        assert not steps[-1].done() and not beside.engines, "one engine generated them"
        await asyncio.gather(*steps)
        assert tokens(beside) == tokens(expected)
        await client.delete_run(run.run_id)


async def test_what_is_wrong_with_a_prompt_is_said_by_its_number_in_the_whole_request(server: Server) -> None:
    async with gradwire.connect(server.address) as client:
        with pytest.raises(gradwire.InvalidBatchError, match="prompt 9 has the token id 5000: the model's are 0 to "):
            await client.sampling_client("tiny").sample([*PROMPTS[:9], [5000]], **ASKED)


async def test_samples_on_two_engines_are_cancelled_and_have_a_timeout(server: Server) -> None:
    long: dict[str, Any] = ASKED | {"max_tokens": 250, "ignore_eos": True}
    async with gradwire.connect(server.address) as client:
        run = await client.create_run("tiny", lora=LORA, seed=1)
        cancelled = run.sample(PROMPTS * 4, **long)
        behind = run.train_step(rows(0), "causal_lm", learning_rate=1e-2)
        await asyncio.sleep(0.2)  # with luck it has begun; cancelled it is in any case
        assert cancelled.cancel()
        with pytest.raises(gradwire.OperationCancelledError):
            await cancelled
        await behind
        with pytest.raises(gradwire.DeadlineExceededError):
            await run.sample(PROMPTS * 8, **long, timeout=0.2)
        assert tokens(await run.sample(PROMPTS, **ASKED))
        await client.delete_run(run.run_id)


@pytest.mark.parametrize("dies", ["holder", pytest.param("other", marks=pytest.mark.slow)])
async def test_samples_go_on_when_one_of_their_engines_dies(server: Server, dies: str) -> None:
    async with gradwire.connect(server.address) as client:
        run = await client.create_run("tiny", lora=LORA, seed=1)
        await run.train_step(rows(0), "causal_lm", learning_rate=1e-2)
        expected = await run.sample(PROMPTS, **ASKED)
        await both(client)
        here = (await run.info()).engine
        sampling = run.sample(PROMPTS, **ASKED)
        pids = server.engine_pids
        os.kill(pids[here if dies == "holder" else 1 - here], signal.SIGKILL)
        assert tokens(await sampling) == tokens(expected)
        await client.delete_run(run.run_id)


@pytest.mark.slow
async def test_engines_that_serve_different_models(tiny_model_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model_path, other)
    engines = ["--engine", "model=tiny", "--engine", f"model={other},ranks=2"]
    running = Server(tiny_model_path, tmp_path / "state", *engines, "--threads", "1").start()
    try:
        async with gradwire.connect(running.address) as client:
            runs = [await client.create_run(model, lora={"rank": 4}, seed=1) for model in ("tiny", "other", "tiny")]
            assert [(await run.info()).engine for run in runs] == [0, 1, 0]
            assert [(await run.info()).lanes for run in runs] == [1, 2, 1]
            assert [list(engine.models) for engine in (await client.server_info()).engines] == [["tiny"], ["other"]]
            for run in runs:
                await run.train_step(rows(0), "causal_lm", learning_rate=1e-2)
            with pytest.raises(gradwire.InvalidArgumentError, match="engine 1 does not serve tiny"):
                await client.move_run(runs[0].run_id, engine=1)
            result = await client.sampling_client("other").sample(PROMPTS, **ASKED)
            assert not result.engines, "one engine serves it"
    finally:
        running.end()
