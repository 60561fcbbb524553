"""How iterations get their trajectories: asynchronously, resampled, from a manager of the user's, or not at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl import (
    AlgorithmConfig,
    BaseEnvironment,
    GroupBuilder,
    GRPOAlgorithm,
    LengthPenalty,
    Mixture,
    OverlongPenalty,
    Part,
    REINFORCEAlgorithm,
    RolloutManager,
    RolloutsFailedError,
    reward_function,
)
from gradwire.rl.algorithms.evaluation import pass_at_k
from gradwire.rl.environments import StepResult
from gradwire.rl.metrics import Elapsed, Max, Mean, Min, Std, Sum, merged, of_loss, values_of
from gradwire.rl.rows import rows_of
from gradwire.rl.types import Action, EvaluateResult, State, StepData, Task, Trajectory


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class SlowRun:
    """Steps take a while; batches are kept."""

    run_id = "slow"

    def __init__(self, step_s: float = 0.02) -> None:
        self.step_s = step_s
        self.batches: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self.training = False
        self.steps = 0

    async def info(self) -> Any:
        return SimpleNamespace(head=None, lora=None, step=self.steps)

    async def model_info(self) -> Any:
        return SimpleNamespace(hidden_size=32)

    def forward_backward(self, batch: Any, loss_fn: str, kwargs: Any) -> Any:
        self.batches.append((loss_fn, dict(kwargs), batch))

        async def work() -> Any:
            self.training = True
            await asyncio.sleep(self.step_s)
            self.training = False
            return SimpleNamespace(metrics={}, num_loss_tokens=1, warnings=())

        return asyncio.ensure_future(work())

    async def _stepped(self) -> Any:
        return SimpleNamespace(grad_norm=1.0, skipped=False, step=self.steps)

    def optim_step(self, *args: Any, **options: Any) -> Any:
        self.steps += 1
        return asyncio.ensure_future(self._stepped())

    async def compute_logprobs(self, batch: Any, temperature: float = 1.0) -> Any:
        return [np.full(int(np.sum(mask)), -0.5005, np.float32) for mask in batch["loss_mask"]]


def coin(text: str, number: int) -> str:
    return "heads" if number % 2 else "tails"


@reward_function(sandboxed=False)
def heads(response: str) -> float:
    return float(response == "heads")


class Turns(BaseEnvironment):
    """Three turns; the task's own number of them where its prompt is one."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": str(task.prompt)},))

    async def step(self, state: State, action: Action) -> StepResult:
        await asyncio.sleep(0.001)
        return StepResult("on", terminated=state.step >= 2)


def config(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"batch_size": 4, "group_size": 2, "max_tokens": 8} | changes))


async def test_generation_goes_on_while_the_policy_trains(rule_inference: Callable[..., Any]) -> None:
    """Each step knows its version, nothing trained on is older than allowed, and minibatches stream."""
    run, inference = SlowRun(), rule_inference(coin, second_per_token=0.0005)
    during: Counter[bool] = Counter()
    sample = inference.generate

    async def generate(prompts: Any, params: Any) -> Any:
        during[run.training] += len(prompts)
        return await sample(prompts, params)

    inference.generate = generate
    trained: list[int] = []

    class Watched(GRPOAlgorithm):
        async def training_batch(self, trajectories: Sequence[Trajectory]) -> Any:
            trained.extend(self.version - step.policy_version for each in trajectories for step in each.steps)
            return await super().training_batch(trajectories)

    settings = config(num_minibatches=2)
    algorithm = Watched(None, run, ["a", "b"], heads, settings, environment=Turns(), inference=inference)
    history = await algorithm.train(6, progress_bar=False, mode="async", max_staleness=2)
    assert len(run.batches) == run.steps == algorithm.version == 12
    assert [metrics["train/trajectories"] for metrics in history] == [8] * 6
    assert 0 < max(trained) <= 2
    assert during[True] > 10
    assert max(metrics["train/staleness_max"] for metrics in history) == max(trained)
    # A trajectory that was under way over an update goes on with the newer policy.
    assert any(metrics["train/staleness"] % 1 for metrics in history)
    with pytest.raises(ValueError, match='mode must be "sync" or "async"'):
        await algorithm.train(1, mode="both")  # type: ignore[arg-type]


async def test_stale_groups_are_dropped_or_corrected(rule_inference: Callable[..., Any]) -> None:
    class Dawdling(Turns):
        """Every fifth group takes a while."""

        async def step(self, state: State, action: Action) -> StepResult:
            if state.task.prompt == "slow":
                await asyncio.sleep(0.5 if dropping else 0.03)
            return await super().step(state, action)

    async def train(**changes: Any) -> tuple[SlowRun, list[dict[str, float]]]:
        run = SlowRun(0.005)
        algorithm = GRPOAlgorithm(
            None, run, ["slow", "a", "b", "c", "d"], heads, config(batch_size=2, **changes),
            environment=Dawdling(), inference=rule_inference(coin),
        )  # fmt: skip
        return run, await algorithm.train(10, progress_bar=False, mode="async", max_staleness=1)

    def share(run: SlowRun) -> float:
        prompts = ["".join(map(chr, prompt)) for _, _, batch in run.batches for prompt in batch["prompt_ids"]]
        return sum("slow" in prompt for prompt in prompts) / len(prompts)

    dropping = True
    run, history = await train(on_stale="drop")
    assert max(metrics.get("train/staleness_max", 0) for metrics in history) <= 1
    assert sum(metrics.get("rollouts/too_stale", 0) for metrics in history) > 0 and share(run) < 0.1
    assert not any("sampler_correction" in kwargs for _, kwargs, _ in run.batches)
    dropping = False
    for epochs in (1, 2):
        run, history = await train(ppo_epochs=epochs)
        assert max(metrics["train/staleness_max"] for metrics in history) == (1 if epochs == 1 else 0)
        assert history[-1]["groups/trained"] == 20 and history[-1]["groups/dropped"] == 0 and share(run) == 0.2
    run, history = await train(ppo_epochs=2, gradient_accumulation_steps=2)
    for (_, kwargs, batch), metrics in zip(run.batches[::2], history, strict=True):
        age = metrics["train/staleness_max"]
        assert kwargs.get("sampler_correction") == ("token_truncate" if age else None)
        masks = [mask for group in batch["response_masks"] for mask in group]
        for name, value in {"old_log_probs": -0.5005, "sampler_log_probs": -0.5}.items() if age else ():
            given = [row for group in batch[name] for row in group]
            assert all((row[mask] == np.float32(value)).all() for row, mask in zip(given, masks))
    assert any(metrics["train/staleness_max"] for metrics in history)
    run, _ = await train()  # of one step, the loss takes the log-probabilities of its own forward
    assert all(("old_log_probs" in batch) == ("sampler_correction" not in kwargs) for _, kwargs, batch in run.batches)
    assert any("sampler_log_probs" in batch for _, _, batch in run.batches)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_groups_without_spread_are_replaced(mode: Any, rule_inference: Callable[..., Any]) -> None:
    run = SlowRun(0)

    scores: list[float] = []

    @reward_function(sandboxed=False)
    def sometimes(response: str, prompt: str) -> float:
        scores.append(0.8 if prompt == "easy" else float(response == "heads"))
        return scores[-1]

    algorithm = GRPOAlgorithm(
        None, run, ["easy", "open"], sometimes, config(dynamic_sampling=True, group_size=6),
        inference=rule_inference(coin),
    )  # fmt: skip
    history = await algorithm.train(3, progress_bar=False, mode=mode)
    assert len(history) == 3
    for metrics, (_, _, batch) in zip(history, run.batches):
        assert all(len(set(rewards)) == 2 for rewards in batch["rewards"]) and len(batch["rewards"]) == 4
        assert metrics["rollouts/without_spread"] > 0
        assert metrics["rollouts/trajectories"] == 6 * (4 + metrics["rollouts/without_spread"])
        if mode == "sync":  # the parts of an iteration, here of unequal sizes, count by their trajectories
            own = [scores.pop(0) for _ in range(int(metrics["rollouts/trajectories"]))]
            assert metrics["rewards/reward"] == pytest.approx(np.mean(own))
            assert metrics["rewards/reward_std"] == pytest.approx(np.std(own))


async def test_resampling_ends(rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    for mode in ("sync", "async"):
        algorithm = GRPOAlgorithm(
            None, SlowRun(0), ["a"], reward_function(sandboxed=False)(lambda response: 1.0),
            config(dynamic_sampling=True, max_resampling=2), inference=rule_inference(coin),
        )  # fmt: skip
        (metrics,) = await algorithm.train(1, progress_bar=False, mode=mode)  # type: ignore[arg-type]
        assert metrics["train/trajectories"] == 0
    assert "are the tasks too easy or too hard" in caplog.text.lower()


async def test_rows_say_what_was_cut_off(rule_inference: Callable[..., Any]) -> None:
    run = SlowRun(0)
    inference = rule_inference(lambda text, number: "x" * (1 + 20 * (number % 2)))
    plain = inference.generate

    async def generate(prompts: Any, params: Any) -> Any:
        from dataclasses import replace

        made = await plain(prompts, params)
        return [replace(each, stop_reason="length" if len(each.text) > 8 else "eos") for each in made]

    inference.generate = generate
    settings = config(loss_kwargs={"mask_truncated": True}, group_size=8)
    algorithm = GRPOAlgorithm(None, run, ["a"], heads, settings, inference=inference)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    ((_, kwargs, batch),) = run.batches
    assert kwargs["mask_truncated"]
    cut = [flag for group in batch["truncated"] for flag in group]
    assert cut == [len(ids) == 9 for group in batch["response_ids"] for ids in group]
    assert 0 < sum(cut) < len(cut)
    assert (metrics["rollouts/truncated"], metrics["rollouts/completed"]) == (sum(cut), len(cut) - sum(cut))


async def test_a_rollout_manager_of_the_users(rule_inference: Callable[..., Any]) -> None:
    inference = rule_inference(coin)
    manager = RolloutManager(inference, Turns(), deterministic=False, num_parallel=3, template=lambda messages: "MINE")
    run = SlowRun(0)
    algorithm = REINFORCEAlgorithm(None, run, ["a"], heads, config(), rollout_manager=manager)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["train/trajectories"] == 8 and set(inference.prompts) == {"MINE"}
    assert inference.version == 1  # the manager's sampler is what is given the weights
    with pytest.raises(ValueError, match="a rollout manager has its own environment"):
        GRPOAlgorithm(None, run, ["a"], heads, rollout_manager=manager, environment=Turns())

    class Elsewhere:
        async def collect(self, tasks: Any, **settings: Any) -> Any:
            return await manager.collect(tasks, **settings)

    with pytest.raises(ValueError, match="Elsewhere cannot receive the weights"):
        GRPOAlgorithm(None, run, ["a"], heads, config(), rollout_manager=Elsewhere())
    algorithm = GRPOAlgorithm(None, run, ["a"], heads, config(), rollout_manager=Elsewhere(), allow_stale=True)
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["train/trajectories"] == 8


class Broken(Turns):
    async def step(self, state: State, action: Action) -> StepResult:
        raise KeyError("no such door")


async def test_a_training_in_which_everything_fails_stops(rule_inference: Callable[..., Any]) -> None:
    def make(reward: Any, environment: BaseEnvironment | None, **changes: Any) -> GRPOAlgorithm:
        return GRPOAlgorithm(
            None, SlowRun(0), ["a"], reward, config(**changes), environment=environment, inference=rule_inference(coin)
        )

    algorithm = make(heads, Broken())
    with pytest.raises(RolloutsFailedError) as raised:
        await algorithm.train(5, progress_bar=False)
    told = str(raised.value)
    assert "iteration 0: 8 of 8 episodes failed" in told and "KeyError: 'no such door' (File" in told
    assert f'{Path(__file__).name}", line' in told and "Traceback" in raised.value.traceback
    assert isinstance(raised.value, gradwire.GradwireError) and "\n" not in told
    assert algorithm.history == [] and algorithm.loop.step == 0
    assert len(await make(heads, Broken(), on_failure="warn").train(2, progress_bar=False)) == 2

    @reward_function(sandboxed=False)
    def wrong(response: str) -> float:
        return {}["score"]  # type: ignore[no-any-return]

    with pytest.raises(
        RolloutsFailedError, match=r"none of the 8 trajectories could be scored.*wrong: KeyError"
    ) as raised:
        await make(wrong, None).train(1, progress_bar=False, mode="async")
    assert f"line {wrong.__reward_function__.__code__.co_firstlineno + 2}" in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "answered", "words"),
    [
        ("a", "<think>so", "cut at 8 tokens inside <think>, before they said"),
        ("a<think>", "so", "cut at 8 tokens inside <think>, before they said"),
        ("a", "<think>so</think>it", "cut at 8 tokens: raise max_tokens (in a recipe, answer_tokens)"),
        ("a", "", ""),
    ],
)
async def test_answers_that_are_all_cut_are_said_once(
    asked: str, answered: str, words: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    inference = rule_inference(lambda text, number: answered or "heads")
    sample = inference.generate

    async def cut(prompts: Any, params: Any) -> Any:
        return [replace(each, stop_reason="length" if answered else "eos") for each in await sample(prompts, params)]

    inference.generate = cut
    await GRPOAlgorithm(None, SlowRun(0), [asked], heads, config(), inference=inference).train(2, progress_bar=False)
    said = [record.getMessage() for record in caplog.records if "were cut" in record.getMessage()]
    assert len(said) == bool(words) and (not words or words in said[0]), said


class Pair(GroupBuilder):
    """Two players who take turns at one board: each hears what the other said last."""

    interactive = True

    class Player(Turns):
        def __init__(self, board: dict[str, Any], number: int) -> None:
            self.board, self.number = board, number

        async def step(self, state: State, action: Action) -> StepResult:
            board = self.board
            async with board["turn"]:
                await board["turn"].wait_for(lambda: len(board["said"]) % 2 == self.number)
                board["said"].append(f"{self.number}:{action.raw}")
                board["turn"].notify_all()
            return StepResult(board["said"][-2] if len(board["said"]) > 1 else "-", terminated=state.step >= 2)

    def __init__(self) -> None:
        self.boards: list[dict[str, Any]] = []

    def environments(self, task: Task, size: int, seed: int) -> Sequence[BaseEnvironment]:
        self.boards.append({"said": [], "turn": asyncio.Condition()})
        return [self.Player(self.boards[-1], number) for number in range(size)]


async def test_several_agents_in_one_episode(rule_inference: Callable[..., Any]) -> None:
    pair = Pair()
    manager = RolloutManager(rule_inference(coin), pair, num_parallel=4, group_size=2, straggler_s=60)
    async with asyncio.timeout(20):
        rollouts = await manager.collect(["a", "b", "c"])
    assert not rollouts.errors and len(pair.boards) == 3
    for board, group in zip(pair.boards, rollouts.groups()):
        assert [said[0] for said in board["said"]] == list("010101")
        assert group[1].steps[1].observation == board["said"][0]

    class Lazy(GroupBuilder):
        def environments(self, task: Task, size: int, seed: int) -> Sequence[BaseEnvironment]:
            return [Turns()]

    rollouts = await RolloutManager(rule_inference(coin), Lazy(), group_size=2).collect(["a"])
    assert list(rollouts.errors) == ["ValueError: Lazy made 1 environments for a group of 2"]


async def test_two_policies_in_one_game_and_only_ones_own_is_trained(rule_inference: Callable[..., Any]) -> None:
    """A member per policy: each asks its own sampler in its own tokens, and rows come from the trained one alone."""
    own, other = rule_inference(coin), rule_inference(lambda text, number: "other")
    pair = Pair()
    pair.inferences = {1: other}
    run = SlowRun(0)
    algorithm = GRPOAlgorithm(
        None, run, ["a", "b"], lambda response: float(len(response) % 2), config(batch_size=2, group_size=4),
        environment=Teams(other), inference=own,
    )  # fmt: skip
    rollouts = await RolloutManager(own, pair, num_parallel=4, group_size=2).collect(["a", "b"])
    assert [each.by_other for each in rollouts.trajectories] == [False, True] * 2
    assert all((step.action.raw == "other") == each.by_other for each in rollouts.trajectories for step in each.steps)
    assert len(own.prompts) == len(other.prompts) == 6
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert (metrics["rollouts/trajectories"], metrics["train/trajectories"]) == (8, 4)


class Teams(GroupBuilder):
    """Groups in which the second half of the members is another policy's."""

    def __init__(self, other: Any) -> None:
        self.inferences = {2: other, 3: other}

    def environments(self, task: Task, size: int, seed: int) -> Sequence[BaseEnvironment]:
        return [Turns()] * size


async def test_a_mixture_of_environments(rule_inference: Callable[..., Any]) -> None:
    class Other(Turns):
        stop = ("|",)

    mixture = Mixture(
        {"long": Part(["a", "b"], heads, Turns(), 3.0), "short": Part(["c"], lambda response: 0.25)}, seed=1
    )
    run = SlowRun(0)
    algorithm = GRPOAlgorithm(
        None, run, mixture.curriculum, mixture.reward, config(batch_size=64), environment=mixture.environment,
        inference=rule_inference(coin),
    )  # fmt: skip
    (metrics,) = await algorithm.train(1, progress_bar=False)
    assert metrics["rewards/short"] == 0.25 and 0 < metrics["rewards/long"] < 1
    share = metrics["rollouts/avg_trajectory_length"]  # three steps or one
    assert 2.2 < share < 2.8
    with pytest.raises(ValueError, match="belongs to no part of the mixture"):
        await mixture.reward.evaluate([Trajectory(Task("x"))])
    with pytest.raises(ValueError, match="the weight of a must be above 0"):
        Mixture({"a": Part(["x"], heads, weight=0)})


def written(tokens: int, group: int = 0) -> Trajectory:
    ids = np.arange(tokens)
    step = StepData(0, "", "", np.array([1]), Action("x"), ids, np.zeros(tokens, np.float32))
    return Trajectory(Task("t"), group, steps=[step])


class Fixed:
    def __init__(self, *scores: float) -> None:
        self.scores = scores

    async def evaluate(self, trajectories: Sequence[Trajectory]) -> list[EvaluateResult]:
        return [EvaluateResult(score) for score in self.scores]


async def test_penalties_of_length() -> None:
    """Against the papers' formulas: DAPO's eq. 13 with L_max 100 and L_cache 40, Kimi k1.5's with min 10 and max 30."""
    trajectories = [written(n) for n in (10, 60, 80, 100, 150)]
    over = await OverlongPenalty(Fixed(1, 1, 1, 0, 0), max_tokens=100, buffer_tokens=40).evaluate(trajectories)
    assert [each.score for each in over] == [1, 1, 0.5, -1, -1]
    assert [each.metrics["unshaped"] for each in over] == [1, 1, 1, 0, 0]
    cut, ended = written(5), written(100)
    cut.steps[0].stop_reason = "length"
    over = await OverlongPenalty(Fixed(0.2, 0.1), penalty=0.5).evaluate([cut, ended])  # only what a limit cut
    np.testing.assert_allclose([each.score for each in over], [-0.3, 0.1])
    with pytest.raises(ValueError, match="buffer_tokens must be from 1 to max_tokens"):
        OverlongPenalty(Fixed(), max_tokens=100)
    trajectories = [written(n) for n in (10, 15, 30)] + [written(7, group=1)]
    bonus = await LengthPenalty(Fixed(1, 0, 0, 1), weight=0.2).evaluate(trajectories)
    np.testing.assert_allclose([each.score for each in bonus], [1.1, 0, -0.1, 1])


async def test_rewards_see_how_many_tokens_were_written() -> None:
    @reward_function(sandboxed=False)
    def brief(num_tokens: int, steps: list[dict[str, Any]]) -> float:
        assert [step["num_tokens"] for step in steps] == [num_tokens]
        return -num_tokens

    assert [each.score for each in await brief.evaluate([written(3), written(5)])] == [-3, -5]


def test_pass_at_k() -> None:
    """Against the share of subsets of k trajectories with a right one."""
    from itertools import combinations

    solved = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], bool)
    expected = {
        k: np.mean([np.mean([any(row[list(c)]) for c in combinations(range(5), k)]) for row in solved])
        for k in (1, 2, 4, 5)
    }
    found = pass_at_k(solved)
    assert list(found) == [f"eval/pass@{k}" for k in expected]
    np.testing.assert_allclose(list(found.values()), list(expected.values()))
    assert pass_at_k(solved[:, :1]) == {}
    assert rows_of([]) == []


def test_parts_of_any_sizes_merge_as_the_whole() -> None:
    values = np.random.default_rng(0).normal(size=72)
    parts = [values[:56], values[56:64], values[64:], values[:0]]
    kinds: list[Any] = [Mean.of, Std.of]
    for kind in kinds:
        whole = kind(values).value()
        assert merged({"x": kind(part)} for part in parts)["x"].value() == pytest.approx(whole)
    assert Std.of(values).value() == pytest.approx(np.std(values))
    assert Mean(56 * 0.8, 56).merge(Mean(0, 8)).merge(Mean(0, 8)).value() == pytest.approx(56 * 0.8 / 72)
    waited = merged([{"s": Elapsed(0, 2), "rate": Elapsed(0, 2, 10)}, {"s": Elapsed(1, 4), "rate": Elapsed(1, 4, 30)}])
    assert values_of(waited) == {"s": 4, "rate": 10}
    loss = [("num_pairs", 3.0), ("is_ratio_max", 2.0), ("is_ratio_min", 0.5), ("loss", 1.0)]
    halves = [{name: of_loss(name, value * k, tokens) for name, value in loss} for k, tokens in ((1, 30), (2, 10))]
    assert values_of(merged(halves)) == {"num_pairs": 9, "is_ratio_max": 4, "is_ratio_min": 0.5, "loss": 1.25}
    assert [kind(1.0).merge(kind(2.0)).value() for kind in (Sum, Max, Min)] == [3, 2, 1]
