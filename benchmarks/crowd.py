"""A crowd of long samples in a key-value cache with room for half of them, and short requests that arrive meanwhile.

In this process, with the engine's own sampler: 64 streams with a context of 8,192 tokens, which is full when they end.
They begin 1,024 tokens before, where each holds most of what it takes in the end. Room in the cache is taken as tokens
come; beside that the same streams where each waits until all tokens that it may take are reserved for it, first come,
first served. Both take turns. Newcomers arrive at chosen steps while the cache is full, and their wait is counted in
steps of the sampler, which do not depend on the machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire_server.engine.model.loading.pool import ModelPool
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.jobs import LocalJob
from gradwire_server.engine.sampling.samplers.local import LocalSampler
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.sizing.parts import key_value_bytes

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import Turns
from benchmarks.workload import Draw, standard_model

TAKEN, RESERVED = "taken as they come", "reserved"
PROMPT_TOKENS, NEW_TOKENS = 16, 8
MOST_STEPS = 2
LEAST_RATE = 0.95
KEYS = {"one key": 1, "four keys": 4}
OTHER = "another"


class Newcomer(NamedTuple):
    """A short request that arrives at a step."""

    step: int
    owner: str


class Crowd:
    """Streams of one model, and a cache that holds half of what they take in the end."""

    def __init__(self, model: Path, size: Size) -> None:
        self.streams, self.context, self.sampled = size.pick(64, 8), size.pick(8192, 128), size.pick(1024, 64)
        self._policy = Policy(ModelPool({"m": str(model)}).get("m"))
        self._draw = Draw.of(0, smoke=size.smoke)
        self._prompts = [self._draw.tokens(self.context - self.sampled) for _ in range(self.streams)]
        self.cache_tokens = self.streams * self.context // 2

    @property
    def tokens(self) -> int:
        """Tokens that the streams sample."""
        return self.streams * self.sampled

    def newcomers(self) -> list[Newcomer]:
        """Two keys in turn, at odd distances, while all streams last."""
        steps = range(20, self.sampled, self.sampled // 20 + 3)
        return [Newcomer(step, (OTHER, "key 0")[number % 2]) for number, step in enumerate(steps)]

    def run(self, keys: int, newcomers: Sequence[Newcomer] = (), *, reserved: bool = False) -> dict[str, list[float]]:
        """Sample all streams; returns the steps to the first token of each newcomer, by key."""
        cache_bytes = self.cache_tokens * key_value_bytes(self._policy.model, self._policy.split_model.dtype)
        sampler = LocalSampler(cache_bytes=int(cache_bytes), kept_bytes=0)
        waiting = [(prompt, f"key {number % keys}") for number, prompt in enumerate(self._prompts)]
        arriving, jobs = list(newcomers), list[LocalJob]()
        newer: list[tuple[Newcomer, LocalJob]] = []
        waits: dict[str, list[float]] = {}
        room, steps = self.cache_tokens // self.context if reserved else self.streams, 0
        while waiting or any(not job.done for job in jobs):
            while waiting and sum(not job.done for job in jobs) < room:
                prompt, owner = waiting.pop(0)
                jobs.append(self._begin(sampler, prompt, self.sampled, owner))
            while arriving and arriving[0].step <= steps:
                newcomer = arriving.pop(0)
                job = self._begin(sampler, self._draw.tokens(PROMPT_TOKENS), NEW_TOKENS, newcomer.owner)
                newer.append((newcomer, job))
            sampler.step()
            steps += 1
            for newcomer, job in list(newer):
                if job.new_tokens():
                    waits.setdefault(newcomer.owner, []).append(steps - newcomer.step)
                    newer.remove((newcomer, job))
        return waits

    def _begin(self, sampler: LocalSampler, prompt: list[int], tokens: int, owner: str) -> LocalJob:
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True, stream=True)
        return sampler.begin(self._policy, [prompt], params, owner=owner)


def measure(size: Size) -> list[Figure]:
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        shape = {} if size.smoke else {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
        length = size.pick(8192, 128)
        crowd = Crowd(standard_model(Path(folder) / "m", smoke=size.smoke, context_length=length, **shape), size)
        words = f"{crowd.streams} streams of {crowd.context - crowd.sampled:,} to {crowd.context:,} tokens"
        words += f", a cache of {crowd.cache_tokens:,}"
        for name, keys in KEYS.items():
            table, waits = Turns(TAKEN, RESERVED), dict[str, list[float]]()
            for _ in range(size.repeats):
                with table.turn(TAKEN, crowd.tokens):
                    for owner, steps in crowd.run(keys, crowd.newcomers()).items():
                        waits.setdefault(owner, []).extend(steps)
                with table.turn(RESERVED, crowd.tokens):
                    crowd.run(keys, reserved=True)
            detail = f"{words}; {table.said('tokens')}"
            rate = f"crowd of {name}: against reserving all tokens"
            figures.append(Figure(rate, table.cpu_ratio(), "x", LEAST_RATE, detail=detail, samples=table.cpu_rates))
            for owner, whose in ((OTHER, "of another key"), ("key 0", "of a key of the crowd")):
                steps = waits[owner]
                detail = f"{len(steps)} newcomers of {NEW_TOKENS} tokens, the longest wait; "
                detail += f"mean {sum(steps) / len(steps):.1f}"
                title = f"crowd of {name}: first token {whose}"
                figures.append(
                    Figure(
                        title, max(steps), "steps", MOST_STEPS, at_least=False, detail=detail, samples={owner: steps}
                    )
                )
    return figures


if __name__ == "__main__":
    run_alone(measure, __doc__)
