"""Algorithms over a stand-in for the run, which reads every batch as the server would and computes its loss."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire.batches import to_columns
from gradwire.descriptions import LossField
from gradwire.errors import NonFiniteError
from gradwire.rl import (
    Algorithm,
    AlgorithmConfig,
    GiGPOAlgorithm,
    GramCluster,
    GRPOAlgorithm,
    HICRAAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    ReplayBuffer,
    SandboxLimits,
    StagedCurriculum,
    StrategicGrams,
    SuccessCurriculum,
    reward_function,
)
from gradwire.rl.algorithms import gigpo_credit
from gradwire.rl.curricula import ShuffledCurriculum
from gradwire.rl.environments import BaseEnvironment, StepResult
from gradwire.rl.loggers import read_jsonl
from gradwire.rl.rows import rows_of
from gradwire.rl.types import Action, EvaluateResult, Prompt, State, StepData, Task, Trajectory
from gradwire_losses.batch import Scores
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss, load_builtin_losses

load_builtin_losses()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no checkpoint_dir is given, the log goes to ``runs`` here."""
    monkeypatch.chdir(tmp_path)


def settled(value: Any) -> asyncio.Future[Any]:
    """What comes a moment later, as from a server."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    loop.call_later(0.002, future.set_exception if isinstance(value, Exception) else future.set_result, value)
    return future


class CheckingRun:
    """Reads batches by the losses' own rules; its scores are numbers drawn from the batch."""

    run_id = "run-x"

    def __init__(self, head: str | None = None) -> None:
        self.head = head
        self.batches: list[tuple[str, dict[str, Any], Any]] = []
        self.steps = 0
        self.saved: dict[str, int] = {}
        self.emas = 0
        self.logprob, self.scored = -0.5, 0
        self.errors: list[Exception] = []

    async def info(self) -> Any:
        return SimpleNamespace(head=self.head, step=self.steps, base_model="tiny")

    def forward_backward(self, batch: Any, loss_fn: str, kwargs: Mapping[str, Any]) -> Any:
        if self.errors:
            return settled(self.errors.pop(0))
        spec = get_loss(loss_fn)
        fields = [
            LossField(f.name, f.dtype, f.shapes, f.required, f.description, f.aligned_with, f.padding_mask)
            for f in spec.fields
        ]
        read = read_batch(spec, to_columns(loss_fn, fields, batch), vocab_size=256)
        config = spec.config(**{k: v for k, v in kwargs.items() if k != "reference_model"})
        tokens = int(read.row_lengths.sum())
        generator = torch.Generator().manual_seed(self.steps)
        scores = Scores(
            {name: -0.5 - 0.1 * torch.rand(tokens, generator=generator) for name in ("logprobs", "entropy", "values")}
        )
        output = spec.function(read, scores, config)
        self.batches.append((loss_fn, dict(kwargs), read))
        metrics = {name: float(metric.value()) for name, metric in output.metrics.items() if hasattr(metric, "value")}
        return settled(SimpleNamespace(metrics=metrics, num_loss_tokens=tokens, warnings=()))

    def optim_step(self, learning_rate: float, **options: Any) -> Any:
        self.steps += 1
        return settled(SimpleNamespace(grad_norm=1.0, skipped=False, learning_rate=learning_rate, step=self.steps))

    def compute_logprobs(self, batch: Any, temperature: float = 1.0) -> Any:
        """A constant for every token, which is what the sampler of ``rule_inference`` gives."""
        self.scored += 1
        return settled([np.full(int(np.sum(mask)), self.logprob, np.float32) for mask in batch["loss_mask"]])

    def compute_values(self, batch: Any) -> Any:
        """The value of a state: the number of tokens before it."""
        values = [np.flatnonzero(np.asarray(mask)).astype(np.float32) for mask in batch["loss_mask"]]
        return settled(values)

    def save_checkpoint(self, name: str, note: str, overwrite: bool) -> Any:
        self.saved[name] = self.steps
        return settled(SimpleNamespace(path=f"run-x/{name}"))

    def load_checkpoint(self, path: str) -> Any:
        self.steps = self.saved[path.split("/")[1]]
        return settled(None)

    def update_reference(self, ema: float) -> Any:
        self.emas += 1
        return settled(None)


class Doors(BaseEnvironment):
    """Two rooms: the left door is right. Prompts are one room each where ``forget``, else the whole conversation."""

    blocking = False

    def __init__(self, forget: bool = False) -> None:
        self.forget = forget

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "room 0"},))

    def step(self, state: State, action: Action) -> StepResult:
        if action.raw != "left":
            return StepResult("wall", terminated=True)
        return StepResult(f"room {state.step + 1}", terminated=state.step == 1)

    def build_prompt(self, state: State) -> Prompt:
        return state.messages[-1:] if self.forget else state.messages


def walk(text: str, number: int) -> str:
    return "left" if number % 2 else "right"


@reward_function(sandboxed=False)
def arrived(messages: list[dict[str, str]]) -> float:
    return float(messages[-1]["content"] == "room 2")


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"batch_size": 2, "group_size": 4, "learning_rate": 1e-3} | changes))


ALGORITHMS: dict[str, tuple[Any, str | None, str]] = {
    "ppo": (PPOAlgorithm, "value", "enhanced_ppo"),
    "grpo": (GRPOAlgorithm, None, "grpo"),
    "reinforce": (REINFORCEAlgorithm, None, "importance_sampling"),
    "gigpo": (GiGPOAlgorithm, None, "gigpo"),
}


@pytest.mark.parametrize("forget", [False, True], ids=["one row", "several rows"])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_batches_are_what_the_losses_take(name: str, forget: bool, rule_inference: Callable[..., Any]) -> None:
    kind, head, loss = ALGORITHMS[name]
    run = CheckingRun(head)
    settings = config(ppo_epochs=2, num_minibatches=2, temperature=0.8)
    algorithm = kind(None, run, ["a"], arrived, settings, environment=Doors(forget), inference=rule_inference(walk))
    history = await algorithm.train(2, progress_bar=False)
    assert run.steps == 8
    assert {each[0] for each in run.batches} == {loss}
    assert all(each[1]["temperature"] == 0.8 for each in run.batches)
    written = sum(len(step.response_ids) for step in (await _collected(algorithm)).steps)
    assert written > 0
    assert [metrics["train/trajectories"] for metrics in history] == [8, 8]
    assert all(0 <= metrics["rewards/reward"] <= 1 for metrics in history)
    # Each pass sees every token that the policy wrote once.
    assert history[0]["train/tokens"] == 2 * history[0]["rollouts/avg_tokens"] * 8


async def _collected(algorithm: Algorithm) -> Trajectory:
    return (await (await algorithm._ready()).iteration(7)).trajectories[0]


def steps(*keys: str, rewards: tuple[float, ...]) -> list[StepData]:
    ids, lps = np.array([7, 8]), np.array([-0.1, -0.2], np.float32)
    return [
        StepData(i, key, key, np.array([1, 2 + i]), Action("x"), ids, lps, reward=reward)
        for i, (key, reward) in enumerate(zip(keys, rewards))
    ]


def test_gigpo_credit_by_hand(caplog: pytest.LogCaptureFixture) -> None:
    """The worked example of test_advantages, from trajectories, with each stage in the log."""
    good = Trajectory(Task("t"), 0, 0, steps=steps("start", "door", rewards=(0, 1)), reward=1)
    bad = Trajectory(Task("t"), 0, 1, steps=steps("start", "door", "wall", rewards=(0, 0, 0)), reward=0)
    with caplog.at_level(logging.DEBUG, "gradwire.rl.gigpo"):
        credit = gigpo_credit([good, bad], gamma=0.5, omega=2.0, scale=False)
    np.testing.assert_allclose(credit.episode, [0.5, -0.5])
    np.testing.assert_allclose(credit.returns, [0.5, 1, 0, 0, 0])
    np.testing.assert_allclose(credit.step, [0.25, 0.5, -0.25, -0.5, 0])
    np.testing.assert_allclose([s.advantage for s in good.steps + bad.steps], [1.0, 1.5, -1.0, -1.5, -0.5])
    assert credit.singletons == 0.2
    for step in good.steps + bad.steps:
        step.state_key = (step.state_key, [1])  # cannot be hashed: compared by how it is written
    again = gigpo_credit([good, bad], gamma=0.5, omega=2.0, scale=False, state_hash=lambda step: {"at": step.state_key})
    np.testing.assert_array_equal(again.advantages, credit.advantages)
    assert "A_E  group 0 member 0: reward 1, A_E 0.5" in caplog.text
    assert "G_k  1: steps [1, 3], returns [1, 0]" in caplog.text
    assert "anchor state 2 of group 0: 'wall'" in caplog.text


async def test_gigpo_sends_a_steps_advantage_with_its_tokens(rule_inference: Callable[..., Any]) -> None:
    algorithm = GiGPOAlgorithm(
        None, CheckingRun(), ["a"], arrived, config(), environment=Doors(), inference=rule_inference(walk), omega=0.7
    )
    collected = (await (await algorithm._ready()).iteration(0)).trajectories
    batch = await algorithm.training_batch(collected)
    flat = [
        (m, a) for ms, as_ in zip(batch.columns["response_masks"], batch.columns["advantages"]) for m, a in zip(ms, as_)
    ]
    assert len(flat) == len(collected)
    for trajectory, (mask, advantages) in zip(collected, flat):
        expected = [step.advantage for step in trajectory.steps for _ in step.response_ids]
        np.testing.assert_allclose(advantages[mask], expected, rtol=1e-6)
        np.testing.assert_array_equal(advantages[~mask], 0)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert 0 <= metrics["train/singleton_steps"] < 1  # found here; the loss, which has no steps, knows of none


@pytest.mark.parametrize("name", ["ppo", "grpo", "gigpo"])
async def test_a_sampler_that_differs_from_the_trainer_is_corrected_for(
    name: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    kind, head, _ = ALGORITHMS[name]

    async def trained(logprob: float, **loss_kwargs: Any) -> CheckingRun:
        run = CheckingRun(head)
        run.logprob = logprob
        settings = config(loss_kwargs=loss_kwargs)
        algorithm = kind(None, run, ["a"], arrived, settings, environment=Doors(), inference=rule_inference(walk))
        await algorithm.train(3, progress_bar=False)
        return run

    run = await trained(-0.5)
    assert run.scored == 1 and caplog.text.count("truncated importance weights") == 0  # measured once
    assert all("sampler_correction" not in kwargs for _, kwargs, _ in run.batches)
    run = await trained(-0.502)
    assert run.scored == 3 and caplog.text.count("truncated importance weights") == 1  # said once
    for _, kwargs, batch in run.batches:
        assert kwargs["sampler_correction"] == "token_truncate"
        np.testing.assert_allclose(batch["old_log_probs"], -0.502)
        np.testing.assert_allclose(batch["sampler_log_probs"], -0.5)
    run = await trained(-0.502, sampler_correction=None)
    assert run.scored == 0 and all(kwargs["sampler_correction"] is None for _, kwargs, _ in run.batches)
    run = await trained(-0.5, sampler_correction="sequence_mask")
    assert run.scored == 3 and {kwargs["sampler_correction"] for _, kwargs, _ in run.batches} == {"sequence_mask"}


def test_steps_that_continue_each_other_make_one_row() -> None:
    first = StepData(0, "", "", np.array([1, 2]), Action("a"), np.array([5, 6]), np.array([-1, -2], np.float32))
    after = StepData(1, "", "", np.array([1, 2, 5, 6, 9]), Action("b"), np.array([7]), np.array([-3], np.float32))
    other = StepData(2, "", "", np.array([4]), Action("c"), np.array([8]), np.array([-4], np.float32))
    one, two = rows_of([Trajectory(Task("t"), steps=[first, after, other])])
    assert one.ids.tolist() == [1, 2, 5, 6, 9, 7]
    assert one.written.tolist() == [False, False, True, True, False, True]
    assert one.logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert one.step_of.tolist() == [-1, -1, 0, 0, -1, 1]
    assert one.at_ends([1, 2, 3]).tolist() == [0, 0, 0, 1, 0, 2]
    assert (one.last, two.last, two.prompt_length) == (False, True, 1)
    first.logprobs = first.logprobs[:1]
    with pytest.raises(ValueError, match="step 0 has 2 tokens and 1 log-probabilities"):
        rows_of([Trajectory(Task("t"), steps=[first])])


async def test_ppo_bootstraps_what_was_cut_off_and_rewards_ends(rule_inference: Callable[..., Any]) -> None:
    algorithm = PPOAlgorithm(
        None, CheckingRun("value"), ["a"], arrived, config(), environment=Doors(), inference=rule_inference(walk)
    )
    (trajectory,) = [Trajectory(Task("t"), steps=steps("s", rewards=(1.5,)), status="truncated", reward=1.5)]
    trajectory.evaluation = EvaluateResult(1.5)
    columns = (await algorithm.training_batch([trajectory])).columns
    # ids 1 2 | 7 8: the values are of the states before 7 and 8. The loss trains these, and none after 8.
    assert columns["old_values"][0].tolist() == [0, 0, 2, 3]
    assert columns["bootstrap_values"] == [3]
    assert columns["rewards"][0].tolist() == [0, 0, 0, 1.5]
    assert trajectory.steps[0].value == 2
    trajectory.status = "completed"
    assert (await algorithm.training_batch([trajectory])).columns["bootstrap_values"] == [0]


class Counting(BaseEnvironment):
    """Never over by itself but for ``max_steps``, the task's own limit."""

    blocking = False

    def __init__(self, max_steps: int | None) -> None:
        self.max_steps = max_steps

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": "go"},))

    def step(self, state: State, action: Action) -> StepResult:
        return StepResult("on")


@pytest.mark.parametrize(("own", "steps_taken", "status"), [(3, 3, "completed"), (None, 4, "truncated")])
async def test_only_a_limit_that_is_not_the_tasks_is_bootstrapped(
    own: int | None, steps_taken: int, status: str, rule_inference: Callable[..., Any], caplog: Any
) -> None:
    algorithm = PPOAlgorithm(
        None, CheckingRun("value"), ["a"], arrived, config(max_steps_per_rollout=4), environment=Counting(own),
        inference=rule_inference(walk),
    )  # fmt: skip
    trajectories = (await (await algorithm._ready()).iteration(0)).trajectories
    assert {(each.status, len(each.steps)) for each in trajectories} == {(status, steps_taken)}
    batch = await algorithm.training_batch(trajectories)
    last = [values[-1] for values in batch.columns["old_values"]]
    assert batch.columns["bootstrap_values"] == (last if status == "truncated" else [0] * len(last))
    assert batch.metrics["bootstrapped"] == (len(last) if status == "truncated" else 0)
    assert ("set the environment's max_steps" in caplog.text) == (status == "truncated")


async def test_ppo_needs_its_critic(rule_inference: Callable[..., Any]) -> None:
    algorithm = PPOAlgorithm(None, CheckingRun(), ["a"], arrived, config(), inference=rule_inference(walk))
    with pytest.raises(
        ValueError, match=r'needs a run made with create_run\(..., head="value"\); this run has no head'
    ):
        await algorithm.train(1, progress_bar=False)


async def test_training_resumes_to_the_same_numbers(tmp_path: Path, rule_inference: Callable[..., Any]) -> None:
    def make(folder: str, run: CheckingRun) -> GRPOAlgorithm:
        return GRPOAlgorithm(
            None, run, [str(n) for n in range(5)], arrived,
            config(checkpoint_dir=tmp_path / folder, save_every=2, eval_every=1, record_every=2),
            environment=Doors(), inference=rule_inference(walk), eval_tasks=["z"],
        )  # fmt: skip

    def numbers(folder: str) -> list[dict[str, Any]]:
        lines = read_jsonl(tmp_path / folder / "metrics.jsonl")
        return [
            {k: v for k, v in line.items() if "time" not in k and "seconds" not in k and "per_second" not in k}
            for line in lines
        ]

    await make("whole", CheckingRun()).train(4, progress_bar=False)
    run = CheckingRun()
    await make("halves", run).train(3, progress_bar=False)  # the third is lost: it was not saved
    again = make("halves", run)
    assert await again.resume() == 2
    await again.train(2, progress_bar=False)
    whole, halves = numbers("whole"), numbers("halves")
    assert [line["iteration"] for line in halves] == [0, 1, 2, 2, 3]
    assert [*halves[:2], *halves[3:]] == whole
    assert run.saved["best"] > 0
    assert [line["iteration"] for line in read_jsonl(tmp_path / "whole" / "trajectories.jsonl")] == [0] * 8 + [2] * 8
    assert await make("nowhere", run).resume() == 0


@pytest.mark.parametrize(("staleness", "trained"), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])])
async def test_rollouts_come_while_others_train(
    staleness: int, trained: list[int], rule_inference: Callable[..., Any]
) -> None:
    """Iterations that were done when each collection began: at most ``max_staleness`` behind."""
    done: list[int] = []

    class Watched(ShuffledCurriculum):
        def select(self, iteration: int, count: int) -> list[Task]:
            done.append(len(algorithm.history))
            return super().select(iteration, count)

    algorithm = GRPOAlgorithm(
        None, CheckingRun(), Watched(["a"]), arrived, config(max_staleness=staleness), environment=Doors(),
        inference=rule_inference(walk),
    )  # fmt: skip
    await algorithm.train(4, progress_bar=False)
    assert done == trained


async def test_weights_go_to_whatever_samples(rule_inference: Callable[..., Any]) -> None:
    """After each iteration; what cannot take them is refused, and where that is allowed its age is told."""
    run, inference = CheckingRun(), rule_inference(walk)
    algorithm = GRPOAlgorithm(None, run, ["a"], arrived, config(ppo_epochs=2), inference=inference)
    history = await algorithm.train(2, progress_bar=False)
    assert (inference.version, algorithm.version) == (4, 4)
    assert [metrics["train/staleness"] for metrics in history] == [0, 0]

    class Fixed(type(inference)):  # type: ignore[misc]
        def can_update(self, run: Any) -> bool:
            return False

    with pytest.raises(ValueError, match=r"Fixed cannot receive the weights of this run.*allow_stale=True"):
        GRPOAlgorithm(None, CheckingRun(), ["a"], arrived, config(), inference=Fixed(walk))
    algorithm = GRPOAlgorithm(None, CheckingRun(), ["a"], arrived, config(), inference=Fixed(walk), allow_stale=True)
    history = await algorithm.train(3, progress_bar=False)
    assert [metrics["train/staleness"] for metrics in history] == [0, 1, 2]
    assert [metrics["train/staleness_max"] for metrics in history] == [0, 1, 2]


async def test_what_cannot_be_trained_on_is_left_out(rule_inference: Callable[..., Any]) -> None:
    @reward_function(sandboxed=False)
    def picky(messages: list[dict[str, str]]) -> Any:
        return "odd" if messages[-1]["content"] == "wall" else 1.0

    run = CheckingRun()
    algorithm = GRPOAlgorithm(None, run, ["a"], picky, config(), environment=Doors(), inference=rule_inference(walk))
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert 0 < metrics["train/trajectories"] < 8
    assert metrics["rewards/not_scored"] == 8 - metrics["train/trajectories"]

    never = GRPOAlgorithm(
        None, run, ["a"], reward_function(sandboxed=False)(lambda response: None), config(on_failure="warn"),
        environment=Doors(), inference=rule_inference(walk),
    )  # fmt: skip
    (metrics,) = await never.train(1, progress_bar=False)
    assert metrics["train/trajectories"] == 0
    assert run.steps == 1


async def test_the_log_is_always_written(tmp_path: Path, rule_inference: Callable[..., Any]) -> None:
    algorithm = GRPOAlgorithm(None, CheckingRun(), ["a"], arrived, config(), inference=rule_inference(walk))
    history = await algorithm.train(2, progress_bar=False)
    lines = read_jsonl(tmp_path / "runs" / "run-x" / "metrics.jsonl")
    assert [line["rewards/reward"] for line in lines] == [metrics["rewards/reward"] for metrics in history]


async def test_failures_are_logged_once_and_shown(
    rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def wordy(response: str) -> str:
        return "very good"

    scorer = reward_function(sandboxed=False)(wordy)
    algorithm = GRPOAlgorithm(
        None, CheckingRun(), ["a"], scorer, config(on_failure="warn"), inference=rule_inference(walk)
    )
    await algorithm.train(1)
    assert [record.getMessage() for record in caplog.records if record.name == "gradwire.rl"] == [
        "iteration 0: 8 of 8 trajectories: wordy: returned str; a reward must be a number or an EvaluateResult",
        "iteration 0: no trajectory can be trained on; the policy is unchanged",
    ]
    assert "not_scored 8" in capsys.readouterr().err


@reward_function(limits=SandboxLimits(time_s=1.0))
def treacherous(response: str) -> Any:
    match response:
        case "hang":
            while True:
                pass
        case "crash":
            os.abort()
        case "fork":
            while True:
                with contextlib.suppress(OSError):
                    os.fork()
        case "print":
            print("x" * 1_000_000)
        case "type":
            return object()
    return float(response == "good")


async def test_a_reward_function_may_do_anything(
    rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Hanging, crashing, forking and a wrong type cost their own trajectories, and are reported; the rest trains."""
    ways = itertools.cycle(["good", "hang", "crash", "fork", "print", "type", "bad", "good"])
    inference = rule_inference(lambda text, number: next(ways))
    async with GRPOAlgorithm(
        None, CheckingRun(), ["a"], treacherous, config(batch_size=1, group_size=8), inference=inference
    ) as algorithm:
        (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["rewards/not_scored"] == 4
    assert metrics["train/trajectories"] == 4
    assert metrics["rewards/reward"] == 0.5
    assert metrics["train/grad_norm"] == 1.0
    assert "2 of 8 trajectories: treacherous: took more than 1 s and was killed" in caplog.text
    assert "1 of 8 trajectories: treacherous: crashed: killed by SIGABRT" in caplog.text
    assert "1 of 8 trajectories: treacherous: TypeError: object cannot be sent back" in caplog.text


async def test_messages_are_prompts_too(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(walk)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "left or right?"}]
    algorithm = GRPOAlgorithm(None, CheckingRun(), [messages], len_of, config(batch_size=1), inference=inference)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["train/trajectories"] == 4
    assert set(inference.prompts) == {"system: Be brief.\nuser: left or right?\nassistant: "}


def len_of(response: str) -> int:
    return len(response)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tasks": "a"}, "tasks is one str; give a list of prompts"),
        ({"tasks": [3]}, "a task is a prompt .* got 3"),
        ({"tasks": []}, "there are no tasks"),
        ({"reward": 3}, "the reward is int; it must be a function, a scorer"),
        ({"reward": lambda answer: 1.0}, "has a parameter 'answer' that is unknown"),
        ({"run": None}, "run is NoneType; it must be a TrainingClient, as returned by `await service.create_run"),
        ({"inference": None}, "pass a service or an inference module"),
        ({"config": config(eval_every=1)}, "eval_every needs held-out tasks"),
        ({"run": object.__new__(gradwire.sync.TrainingClient)}, r"the run comes from gradwire.sync.*asyncio.run\(\)"),
        ({"config": config(group_size=1)}, "compares within a group: set group_size to at least 2"),
    ],
)
async def test_what_an_algorithm_cannot_begin_with(
    changes: dict[str, Any], error: str, rule_inference: Callable[..., Any]
) -> None:
    given = {"run": CheckingRun(), "tasks": ["a"], "reward": arrived, "config": config()}
    given |= {"inference": rule_inference(walk)} | changes
    with pytest.raises((TypeError, ValueError), match=error):
        REINFORCEAlgorithm(None, **given)


async def test_errors_of_the_service_are_raised(rule_inference: Callable[..., Any]) -> None:
    run = CheckingRun()
    run.errors = [NonFiniteError("the loss is NaN")]
    algorithm = GRPOAlgorithm(None, run, ["a"], arrived, config(), environment=Doors(), inference=rule_inference(walk))
    with pytest.raises(NonFiniteError):
        await algorithm.train(1, progress_bar=False)


async def test_replay_and_references(rule_inference: Callable[..., Any]) -> None:
    run = CheckingRun()
    settings = config(replay_fraction=0.5, reference_model="ema", reference_ema=0.9)
    algorithm = REINFORCEAlgorithm(
        None, run, ["a"], arrived, settings, environment=Doors(), inference=rule_inference(walk), baseline="batch"
    )
    with pytest.raises(ValueError, match="baseline must be"):
        REINFORCEAlgorithm(None, run, ["a"], arrived, baseline="median", inference=rule_inference(walk))  # type: ignore[arg-type]
    run.forward_backward = _ignoring_reference(run.forward_backward)  # type: ignore[method-assign]
    history = await algorithm.train(3, progress_bar=False)
    assert [metrics["train/replayed"] for metrics in history] == [0, 4, 4]
    assert run.emas == 3
    with pytest.raises(ValueError, match="learns from its own samples only"):
        GRPOAlgorithm(None, run, ["a"], arrived, settings, inference=rule_inference(walk))


def _ignoring_reference(call: Any) -> Any:
    def forward_backward(batch: Any, loss_fn: str, kwargs: Mapping[str, Any]) -> Any:
        assert kwargs["reference_model"] == "ema"
        return call(batch, loss_fn, {k: v for k, v in kwargs.items() if k != "reference_model"})

    return forward_backward


def test_a_buffer_keeps_groups_whole() -> None:
    def group(number: int, version: int) -> list[Trajectory]:
        made = [Trajectory(Task("t"), number, m, steps=steps("s", rewards=(0,))) for m in range(3)]
        for each in made:
            each.steps[0].policy_version = version
        return made

    buffer = ReplayBuffer(7, max_age=2)
    for number in range(4):
        buffer.add(group(number, number))
    assert len(buffer) == 6
    drawn = buffer.sample(5, np.random.default_rng(0), version=5)
    assert [t.group for t in drawn] == [3, 3, 3]
    assert buffer.sample(1, np.random.default_rng(0), version=9) == []


def test_curricula() -> None:
    shuffled = ShuffledCurriculum([str(n) for n in range(6)], seed=1)
    epoch = [task.prompt for i in range(3) for task in shuffled.select(i, 2)]
    assert sorted(map(str, epoch)) == ["0", "1", "2", "3", "4", "5"]
    assert shuffled.select(1, 2) == ShuffledCurriculum([str(n) for n in range(6)], seed=1).select(1, 2)

    def solved(task: str, *rewards: float) -> list[Trajectory]:
        return [Trajectory(Task(task), steps=steps("s", rewards=(0,)), reward=reward) for reward in rewards]

    staged = StagedCurriculum([["easy"], ["hard"]], threshold=0.7, window=4)
    staged.update(solved("easy", 1, 1, 0))
    assert staged.select(0, 1)[0].prompt == "easy"
    staged.update(solved("easy", 1, 1))
    again = StagedCurriculum([["easy"], ["hard"]])
    again.load(json.loads(json.dumps(staged.state())))
    assert again.select(0, 1)[0].prompt == "hard"

    success = SuccessCurriculum(["always", "sometimes"], floor=0.001, decay=0.0)
    success.update(solved("always", 1, 1) + solved("sometimes", 1, 0))
    chosen = [success.select(i, 1)[0].prompt for i in range(50)]
    assert chosen.count("sometimes") > 45


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"max_staleness": -1}, "max_staleness must not be negative"),
        ({"save_every": 1}, "save_every needs a checkpoint_dir"),
        ({"on_failure": "ignore"}, 'on_failure must be "stop" or "warn", got .ignore.'),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"reference_ema": 2.0}, "from 0 to 1; got 2.0"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        AlgorithmConfig(**changes)


# ---------------------------------------------------------------- HICRA


async def test_hicra_marks_the_tokens_of_strategic_grams(rule_inference: Callable[..., Any]) -> None:
    grams = StrategicGrams((GramCluster(("let me see",), 4),))
    inference = rule_inference(lambda text, n: "let me see: 4" if n % 2 else "it is 5")
    run = CheckingRun()
    config = AlgorithmConfig(batch_size=3, group_size=4)
    algorithm = HICRAAlgorithm(None, run, ["a?", "b?", "c?"], is_four, config, grams=grams, inference=inference)
    [metrics] = await algorithm.train(1, progress_bar=False)
    [(loss, kwargs, batch)] = run.batches
    assert loss == "grpo" and kwargs["scale_rewards"] is False
    marked, lengths = batch["planning_mask"].tolist(), batch.row_lengths.tolist()
    expected = []
    for reward, length in zip(batch["rewards"].tolist(), lengths):
        expected += [reward == 1 and at in (0, 1, 2, 4, 5, 7, 8, 9) for at in range(length)]
    assert marked == expected and any(marked) and not all(marked)
    assert metrics["train/planning_fraction"] == pytest.approx(sum(expected) / sum(lengths))


@reward_function
def is_four(response: str) -> float:
    return float(response.endswith("4"))
