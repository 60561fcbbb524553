"""Reward and tokens per second of synchronous and asynchronous RL, with durations as agents have: median 1, p99 20.

The training is the real one, with the server's losses on a policy of a few numbers. The clock is virtual: sampling,
environments and optimizer steps only wait, so that the figures do not depend on the machine or its load. Two engines:
one samples while the other trains, and a step takes as long as the sampling of an iteration. One engine: it samples or
trains, a step takes half of that, and its environments are slow. Learning is compared by the reward after as many
samples. The slowest quarter of the tasks is of a kind of its own. ``--write-docs`` writes them to docs/rl.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import selectors
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from gradwire.batches import to_columns
from gradwire.descriptions import LossField
from gradwire.rl import (
    AlgorithmConfig,
    BaseEnvironment,
    GRPOAlgorithm,
    RolloutManager,
    State,
    StepResult,
    Task,
    reward_function,
)
from gradwire.rl.batching import derive_seed
from gradwire.rl.generation import Generation, SamplingParams
from gradwire_losses.batch import Scores
from gradwire_losses.layouts import read_batch
from gradwire_losses.registry import get_loss, load_builtin_losses

from benchmarks import ROOT
from benchmarks.report import Figure, Size, run_alone

KINDS, LENGTH, VOCABULARY = 4, 6, 12
FIRST = 100
"""The token of the first letter; those before it are prompts."""
SIGMA = np.log(20) / 2.326
"""Of the logarithm of a duration, such that the median is 1 and the 99th percentile 20."""
TOKEN_S, RATE, BATCH, GROUP, ITERATIONS = 0.01, 0.15, 16, 8, 40
ONE, TWO = "one engine", "two engines"
BEGIN, END = "<!-- async: begin (python -m benchmarks.async_rl --write-docs) -->", "<!-- async: end -->"


class VirtualClock(selectors.DefaultSelector):
    """Moves the time of an event loop on, instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


def in_virtual_time(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a loop whose waits take no time."""
    clock = VirtualClock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


class Policy:
    """A run and its sampler: a distribution for each kind of task and each place of an answer.

    Args:
        step_s: Seconds that the engine trains on an iteration's samples.
        shared: The engine samples or trains; otherwise each has an engine of its own.
    """

    run_id = "policy"

    def __init__(self, step_s: float, *, shared: bool, seed: int) -> None:
        load_builtin_losses()
        self.version = self.steps = 0
        self._step_s = step_s
        self._trainer = asyncio.Lock()
        self._sampler = self._trainer if shared else None
        generator = torch.Generator().manual_seed(seed)
        self._logits = torch.randn(KINDS, LENGTH, VOCABULARY, generator=generator).mul(0.1).requires_grad_()
        self._optimizer = torch.optim.Adam([self._logits], lr=RATE)
        self._chance = np.random.default_rng(seed)
        self.codec = self
        self.end_text = ""

    def reward(self) -> float:
        """The mean reward of an answer, over all kinds."""
        with torch.no_grad():
            p = self._logits.softmax(-1).numpy()
        return float(np.mean([p[kind, range(LENGTH), wanted(kind)] for kind in range(KINDS)]))

    # ---------------------------------------------------------------- the run

    async def info(self) -> Any:
        return SimpleNamespace(head=None, step=self.steps)

    def _logprobs(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.split(ids, lengths.tolist())
        log_p = self._logits.log_softmax(-1)
        kinds = torch.cat([torch.full((len(row) - 1,), int(row[0])) for row in rows])
        places = torch.cat([torch.arange(len(row) - 1) for row in rows])
        return log_p[kinds, places, torch.cat([row[1:] for row in rows]) - FIRST]

    def forward_backward(self, batch: Any, loss_fn: str, kwargs: Mapping[str, Any]) -> Any:
        spec = get_loss(loss_fn)
        fields = [
            LossField(f.name, f.dtype, f.shapes, f.required, f.description, f.aligned_with, f.padding_mask)
            for f in spec.fields
        ]
        read = read_batch(spec, to_columns(loss_fn, fields, batch), vocab_size=FIRST + VOCABULARY)

        async def work() -> Any:
            async with self._trainer:
                await asyncio.sleep(self._step_s * len(read.row_lengths) / (BATCH * GROUP))
                logprobs = self._logprobs(read.input_ids, read.lengths)
                scores = Scores({"logprobs": logprobs, "entropy": -logprobs.detach()})
                output = spec.function(read, scores, spec.config(**kwargs))
                sum(term.sum / term.count for term in output.terms.values()).backward()  # type: ignore[union-attr]
            return SimpleNamespace(metrics={}, num_loss_tokens=int(read.row_lengths.sum()), warnings=())

        self._pending = asyncio.ensure_future(work())
        return self._pending

    def optim_step(self, learning_rate: float, **options: Any) -> Any:
        before = self._pending

        async def work() -> Any:
            await before
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.steps += 1
            return SimpleNamespace(grad_norm=1.0, skipped=False, step=self.steps)

        return asyncio.ensure_future(work())

    async def compute_logprobs(self, batch: Any, temperature: float = 1.0) -> Any:
        """Scoring is a forward, a third of a training step."""
        async with self._trainer:
            await asyncio.sleep(self._step_s / 3 * len(batch["input_ids"]) / (BATCH * GROUP))
        rows = [torch.as_tensor(np.asarray(row)) for row in batch["input_ids"]]
        with torch.no_grad():
            return [self._logprobs(row, torch.tensor([len(row)])).numpy() for row in rows]

    # ---------------------------------------------------------------- the sampler

    async def get_logprobs(self, rows: Sequence[Any], *, temperature: float = 1.0) -> list[Any]:
        raise NotImplementedError

    async def get_logits(self, prompts: Sequence[Any], *, top_k: int = 5) -> list[Any]:
        raise NotImplementedError

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version
        with torch.no_grad():
            self._sampled = self._logits.softmax(-1).numpy().astype(np.float64)

    async def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[Generation]:
        async with self._sampler or contextlib.nullcontext():
            await asyncio.sleep(TOKEN_S * LENGTH)
            version, made = self.version, []
            for prompt in prompts:
                p = self._sampled[int(prompt[0])]
                ids = np.array([self._chance.choice(VOCABULARY, p=row / row.sum()) for row in p])
                logprobs = np.log(p[np.arange(LENGTH), ids]).astype(np.float32)
                made.append(Generation("".join(map(chr, ids + 97)), ids + FIRST, logprobs, "eos", version))
        return made

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[Any]:
        return [np.array([int(text)]) for text in texts]

    async def decode(self, rows: Sequence[Any]) -> list[str]:
        return ["".join(chr(int(token) - FIRST + 97) for token in row) for row in rows]


class Slow(BaseEnvironment):
    """Answers after a while, which is drawn for each episode: a task's own share, and the episode's."""

    blocking = False

    def reset(self, task: Task, seed: int) -> State:
        return State(task, ({"role": "user", "content": str(task.prompt)},))

    def build_prompt(self, state: State) -> str:
        return str(state.task.prompt)

    async def step(self, state: State, action: Any) -> StepResult:
        chance = np.random.default_rng(derive_seed(state.task.key, action.raw))
        await asyncio.sleep(float(state.task.data["takes"]) * float(np.exp(0.3 * chance.normal())))
        return StepResult(terminated=True)


def wanted(kind: int) -> list[int]:
    """The letters of the right answer."""
    return [(kind * 5 + place) % VOCABULARY for place in range(LENGTH)]


@reward_function(sandboxed=False)
def right(response: str, prompt: str) -> float:
    """The share of letters that are those of the task's kind."""
    return float(np.mean([ord(said) - 97 == letter for said, letter in zip(response, wanted(int(prompt)))]))


@dataclass(frozen=True)
class Way:
    """How to train.

    Attributes:
        mode: Of ``train``.
        stale: ``max_staleness``: of the config, or of ``train(mode="async")``.
        on_stale, minibatches: Of the config.
    """

    mode: Literal["sync", "async"]
    stale: int
    on_stale: Literal["correct", "drop"] = "correct"
    minibatches: int = 1


WAYS = {
    "sync": Way("sync", 0),
    "one iteration ahead": Way("sync", 1),
    "async, max_staleness=1": Way("async", 1),
    "async, max_staleness=2": Way("async", 2),
    "async, max_staleness=4": Way("async", 4),
    'async, max_staleness=2, on_stale="drop"': Way("async", 2, "drop"),
}
RECOMMENDED = "async, max_staleness=2"


@dataclass(frozen=True)
class Curve:
    """A training: seconds since its beginning and the policy's reward, iteration by iteration; tasks dropped."""

    seconds: list[float]
    rewards: list[float]
    dropped: float

    @property
    def rate(self) -> float:
        """Iterations per second; each has as many tokens as any other."""
        return len(self.seconds) / self.seconds[-1]

    @property
    def half(self) -> float:
        """Seconds until the policy's reward is a half."""
        return next((at for at, each in zip(self.seconds, self.rewards) if each >= 0.5), math.inf)


def tasks(count: int, seed: int) -> list[Task]:
    """Durations of the long-tailed distribution; the slowest quarter is of a kind of its own."""
    takes = np.exp(SIGMA * np.random.default_rng(seed).normal(size=count))
    slow = np.quantile(takes, 0.75)
    return [
        Task(str(KINDS - 1 if each >= slow else n % (KINDS - 1)), task_id=f"t{n}", data={"takes": each})
        for n, each in enumerate(takes)
    ]


def train(way: Way, *, shared: bool, step_s: float, iterations: int, seed: int) -> Curve:
    """Train in virtual time."""

    async def work() -> Curve:
        loop = asyncio.get_running_loop()
        policy = Policy(step_s, shared=shared, seed=seed)
        seconds: list[float] = []
        rewards: list[float] = []

        class Timer:
            def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
                seconds.append(loop.time())
                rewards.append(policy.reward())

            def close(self) -> None:
                pass

        config = AlgorithmConfig(
            batch_size=BATCH, group_size=GROUP, max_tokens=LENGTH, learning_rate=RATE, seed=seed, num_parallel=1024,
            on_stale=way.on_stale, max_staleness=way.stale if way.mode == "sync" else 0,
            num_minibatches=way.minibatches,
        )  # fmt: skip
        # deterministic=False: a batch does not wait for the slowest environment, in any mode
        manager = RolloutManager(policy, Slow(), deterministic=False, num_parallel=1024, group_size=GROUP)
        given = tasks(BATCH * iterations, seed)
        algorithm = GRPOAlgorithm(None, policy, given, right, config, rollout_manager=manager, loggers=[Timer()])
        options: dict[str, Any] = {"max_staleness": way.stale} if way.mode == "async" else {}
        history = await algorithm.train(iterations, progress_bar=False, mode=way.mode, **options)
        return Curve(seconds, rewards, history[-1]["groups/dropped"])

    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        curve: Curve = in_virtual_time(work)
    return curve


def compare(size: Size) -> dict[str, dict[str, list[Curve]]]:
    """Train in all ways with one and with two engines; each with as many seeds as there are repeats."""
    logging.getLogger("gradwire.rl").setLevel(logging.ERROR)
    iterations = size.pick(ITERATIONS, 3)
    curves: dict[str, dict[str, list[Curve]]] = {TWO: {way: [] for way in WAYS}, ONE: {way: [] for way in WAYS}}
    for seed in range(size.repeats):
        sampling_s = 1 / train(WAYS["sync"], shared=False, step_s=0, iterations=iterations, seed=seed).rate
        for name, way in WAYS.items():
            for engines, step_s in ((TWO, sampling_s), (ONE, sampling_s / 2)):
                curve = train(way, shared=engines == ONE, step_s=step_s, iterations=iterations, seed=seed)
                curves[engines][name].append(curve)
    return curves


def speedup(curves: Mapping[str, Sequence[Curve]], way: str, figure: Callable[[Curve], float]) -> float:
    """The median over seeds of a way's figure over that of sync."""
    return statistics.median(figure(a) / figure(b) for a, b in zip(curves[way], curves["sync"], strict=True))


def figures_of(curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> list[Figure]:
    figures = []
    for engines, target in ((TWO, 1.7), (ONE, 1.3)):
        of = curves[engines]
        rewards = {way: [each.rewards[-1] for each in of[way]] for way in (RECOMMENDED, "sync")}
        ours, theirs = (statistics.mean(rewards[way]) for way in (RECOMMENDED, "sync"))
        half = 1 / speedup(of, RECOMMENDED, lambda c: c.half)
        detail = (
            f"reward after as many samples {ours:.3f}, sync {theirs:.3f}; half of it {half:.2f} x as soon; virtual time"
        )
        value, samples = speedup(of, RECOMMENDED, lambda c: c.rate), {way: [c.rate for c in of[way]] for way in of}
        figures.append(
            Figure(f"{RECOMMENDED} against sync, {engines}", value, "x", target, detail=detail, samples=samples)
        )
    return figures


def measure(size: Size) -> list[Figure]:
    return figures_of(compare(size))


def table(curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> str:
    head = [""]
    for engines in (TWO, ONE):
        head += [f"{engines}: tokens/s", "reward 0.5"]
    lines = [[*head, f"reward after {ITERATIONS} iterations", "tasks lost"], ["---"] * 7]
    for way in WAYS:
        cells = [way]
        for engines in (TWO, ONE):
            half = 1 / speedup(curves[engines], way, lambda c: c.half)
            cells += [f"{speedup(curves[engines], way, lambda c: c.rate):.2f} x", f"{half:.2f} x as soon"]
        both = [*curves[TWO][way], *curves[ONE][way]]
        last, dropped = [each.rewards[-1] for each in both], statistics.mean(each.dropped for each in both)
        cells += [
            f"{statistics.mean(last):.3f} ± {statistics.stdev(last):.3f}",
            f"{dropped:.0f} of {ITERATIONS * BATCH}",
        ]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write_docs(curves: Mapping[str, Mapping[str, Sequence[Curve]]]) -> None:
    """Replace the table of docs/rl.md, and draw the rewards over time of the first seed."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "async", "font.size": 9}
    picture, sides = pyplot.subplots(1, 2, figsize=(8.4, 3.2), sharey=True)
    for side, (engines, of) in zip(sides, curves.items()):
        for way in ("sync", "one iteration ahead", RECOMMENDED):
            side.plot([0, *of[way][0].seconds], [1 / VOCABULARY, *of[way][0].rewards], label=way)
        side.set(title=engines, xlabel="seconds (virtual)")
    sides[0].set(ylabel="reward")
    sides[0].legend()
    picture.tight_layout()
    picture.savefig(ROOT / "docs/rl_async.svg", metadata={"Date": None})
    page = ROOT / "docs/rl.md"
    before, begin, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{begin}\n{table(curves)}\n{END}{after}")


if __name__ == "__main__":
    if "--write-docs" in sys.argv:
        write_docs(compare(Size(repeats=3)))
    else:
        run_alone(measure, __doc__)
