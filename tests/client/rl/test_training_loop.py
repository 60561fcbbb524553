"""An algorithm's loop over a stand-in for the run: resume, staleness, what is left out, what is logged, failures."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.errors import NonFiniteError
from gradwire.loop.loggers import read_jsonl
from gradwire.loop.training_loop import TrainingStopped
from gradwire.rl import GRPOAlgorithm, REINFORCEAlgorithm, SandboxLimits, reward_function
from gradwire.rl.curricula import ShuffledCurriculum
from gradwire.rl.types import Task
from support.checking_run import CheckingRun, Doors, arrived, config, walk

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.mark.parametrize(("kind", "replayed"), [(GRPOAlgorithm, 0.0), (REINFORCEAlgorithm, 0.5)])
async def test_training_resumes_to_the_same_numbers(
    kind: Any, replayed: float, tmp_path: Path, rule_inference: Callable[..., Any]
) -> None:
    tasks = [Task(str(n), data={"place": (n, object())}) for n in range(5)]

    def make(folder: str, run: CheckingRun) -> Any:
        return kind(
            None, run, tasks, arrived,
            config(checkpoint_dir=tmp_path / folder, save_every=2, eval_every=1, record_every=2,
                   replay_fraction=replayed),
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
    kept = again.replay.sample(99, np.random.default_rng(0))
    assert bool(kept) == bool(replayed) and all(any(each.task is task for task in tasks) for each in kept)
    await again.train(2, progress_bar=False)
    whole, halves = numbers("whole"), numbers("halves")
    assert [line["iteration"] for line in halves] == [0, 1, 2, 3]
    assert halves == whole
    assert run.saved["best"] > 0
    assert [line["iteration"] for line in read_jsonl(tmp_path / "whole" / "trajectories.jsonl")] == [0] * 8 + [2] * 8
    assert [line["iteration"] for line in read_jsonl(tmp_path / "halves" / "trajectories.jsonl")] == [0] * 8 + [2] * 8
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
        "group 0 to 1: 8 of 8 trajectories: wordy: returned str; a reward must be a number or an EvaluateResult",
        "iteration 0: no trajectory can be trained on; the policy is unchanged",
        "the task 'a' is dropped: group 0 failed",
        "the task 'a' is dropped: group 1 failed",
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


class Stopping:
    """A logger that wants the training to stop after an iteration, as a job's worker does when it is paused."""

    stop_wanted = False

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self.stop_wanted = iteration == 1

    def close(self) -> None:
        self.stop_wanted = False


async def test_a_logger_stops_the_training_at_a_checkpoint(tmp_path: Path, rule_inference: Callable[..., Any]) -> None:
    run, options = CheckingRun(), {"environment": Doors(), "inference": rule_inference(walk)}
    arguments = (None, run, ["a"], arrived, config(checkpoint_dir=tmp_path))
    algorithm = GRPOAlgorithm(*arguments, loggers=[Stopping()], **options)
    with pytest.raises(TrainingStopped, match="stopped after step 2 of 4"):
        await algorithm.train(4, progress_bar=False)
    algorithm.close()
    again = GRPOAlgorithm(*arguments, **options)
    assert await again.resume() == 2 and run.saved == {"iteration-2": 2}
    await again.train(2, progress_bar=False)
    assert [line["iteration"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


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
