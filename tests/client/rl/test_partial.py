"""Responses in parts, of several versions; and samplers that give the log-probabilities of kept tokens only."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire.rl import GRPOAlgorithm, REINFORCEAlgorithm, RolloutManager, SimpleTextEnvironment, reward_function
from gradwire.rl.batching import in_parts
from gradwire.rl.generation import Generation, SamplingParams
from gradwire.rl.inference import OpenAIInference, RunInference
from gradwire.rl.rows import TrainingBatch, rows_of
from gradwire.rl.types import Trajectory
from support.checking_run import CheckingRun, config
from support.server import Server
from support.web import Quiet, serving

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


class Speller:
    """Writes the alphabet, each request from where its prompt ends; it knows the versions of its weights."""

    def __init__(self, codec: Any, second_per_token: float = 0.0) -> None:
        self.codec, self.version, self.asked = codec, 0, [0]
        self.second_per_token = second_per_token

    def can_update(self, run: Any) -> bool:
        return True

    async def update_weights(self, run: Any, version: int) -> None:
        self.version = version

    async def generate(self, prompts: Any, params: SamplingParams) -> list[Generation]:
        version, made = self.version, []
        for prompt in prompts:
            (text,) = await self.codec.decode([prompt])
            rest = ALPHABET[len(text) - text.index(":") - 1 :]
            ids = [*map(ord, rest), 2][: params.max_tokens]
            said, reason = "".join(chr(token) for token in ids if token > 3), "eos" if ids[-1] == 2 else "length"
            for stop in params.stop:
                if stop in said:
                    said = said[: said.index(stop)]
                    ids, reason = ids[: len(said) + len(stop)], "stop"
            made.append(Generation(said, np.array(ids), np.full(len(ids), -0.5 - version, np.float32), reason, version))
        await asyncio.sleep(self.second_per_token * max(len(each.token_ids) for each in made))
        return made


@pytest.mark.parametrize("size", [1, 2, 5, 27, 99])
@pytest.mark.parametrize("stop", [(), ("xy",), ("efg", "zz"), ("never",)])
@pytest.mark.parametrize("most", [3, 26, 27, 40])
async def test_parts_are_the_whole(
    size: int, stop: tuple[str, ...], most: int, rule_inference: Callable[..., Any]
) -> None:
    speller = Speller(rule_inference(lambda text, number: "").codec)
    params = SamplingParams(max_tokens=most, stop=stop)
    prompt = np.array([*map(ord, "say:")])
    (whole,) = await speller.generate([prompt], params)

    async def ask(ids: Any, asked: SamplingParams) -> Generation:
        (made,) = await speller.generate([ids], asked)
        return made

    joined = await in_parts(ask, speller.codec, prompt, params, size)
    assert (joined.text, joined.stop_reason) == (whole.text, whole.stop_reason)
    assert joined.token_ids.tolist() == whole.token_ids.tolist() and len(joined.logprobs) == len(whole.logprobs)


async def test_a_character_in_two_parts() -> None:
    class Bytes:
        end_text = ""

        async def decode(self, rows: Any) -> list[str]:
            return [
                bytes(row).decode(errors="replace") for row in map(np.asarray, rows) if True for row in [row.tolist()]
            ]

    data = "aä€!".encode()

    async def ask(ids: Any, params: SamplingParams) -> Generation:
        more = np.array([*data[len(ids) :][: params.max_tokens]])
        text = (await Bytes().decode([more]))[0]
        return Generation(text, more, np.zeros(len(more), np.float32), "length")

    joined = await in_parts(ask, Bytes(), np.array([], np.int64), SamplingParams(max_tokens=len(data)), 2)  # type: ignore[arg-type]
    assert joined.text == "aä€!" and bytes(joined.token_ids.tolist()) == data


@reward_function(sandboxed=False)
def long(num_tokens: int) -> float:
    return float(num_tokens)


async def test_a_response_longer_than_an_iteration_goes_on_with_newer_weights(
    rule_inference: Callable[..., Any],
) -> None:
    """While it is written others are trained on; its tokens carry their versions, which the correction weights."""
    speller = Speller(rule_inference(lambda text, number: "").codec, 0.004)
    spell = speller.generate

    async def generate(prompts: Any, params: SamplingParams) -> list[Generation]:
        quick = [index for index, prompt in enumerate(prompts) if chr(prompt[1]) == "q"]
        made = await spell(prompts, params)
        return [
            replace(each, token_ids=each.token_ids[:1], logprobs=each.logprobs[:1], stop_reason="eos")
            if index in quick
            else each
            for index, each in enumerate(made)
        ]

    speller.generate = generate  # type: ignore[method-assign]
    seen: list[Trajectory] = []

    class Watched(GRPOAlgorithm):
        async def training_batch(self, trajectories: Any) -> Any:
            seen.extend(trajectories)
            return await super().training_batch(trajectories)

    tasks = [f"{'s' if n % 4 == 0 else 'q'}{n}:" for n in range(16)]
    algorithm = Watched(
        None, CheckingRun(), tasks, long, config(batch_size=2, partial_tokens=4), inference=speller,
        environment=SimpleTextEnvironment(),
    )  # fmt: skip
    history = await algorithm.train(8, progress_bar=False, mode="async", max_staleness=3)
    versions = [step.token_versions for each in seen for step in each.steps if step.token_versions is not None]
    assert all((np.diff(each) >= 0).all() for each in versions)
    assert max(len({*each.tolist()}) for each in versions) >= 2
    for each in seen:
        for step in each.steps:
            of = step.token_versions if step.token_versions is not None else step.policy_version
            np.testing.assert_array_equal(step.logprobs, -0.5 - np.full(len(step.response_ids), of))
    assert max(metrics["train/staleness_max"] for metrics in history) <= 3
    assert any(metrics["train/staleness"] % 1 for metrics in history)


async def test_a_part_is_what_its_policy_says_of_all_before(server: Server) -> None:
    """The prefix is computed anew: log-probabilities of each part are the trainer's of that version."""
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora={"rank": 4})
        inference = await RunInference.of(service, run)
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3)
        scores = []

        async def ask(ids: Any, asked: SamplingParams) -> Generation:
            (made,) = await inference.generate([ids], asked)
            row = np.concatenate([ids, made.token_ids])
            (whole,) = await run.compute_logprobs([row])
            scores.append(whole[-len(made.token_ids) :])
            await run.train_step({"input_ids": [[5, 6, 7, 8]]}, "causal_lm", learning_rate=0.05)
            return made

        joined = await in_parts(ask, inference.codec, np.array([3, 4]), params, 5)
        assert joined.token_versions is not None and joined.token_versions.tolist() == [0] * 5 + [1] * 5 + [2] * 2
        np.testing.assert_allclose(joined.logprobs, np.concatenate(scores), atol=2e-5)
        manager = RolloutManager(inference, SimpleTextEnvironment(), params=params, partial_tokens=5)
        (trajectory,) = (await manager.collect(["ab"])).trajectories
        assert trajectory.num_tokens == 12


class Overflowing(GRPOAlgorithm):
    """Its second batch has a gradient that is not finite."""

    async def training_batch(self, trajectories: Any) -> TrainingBatch:
        rows = rows_of(trajectories)
        columns = {
            "input_ids": [row.ids for row in rows],
            "loss_mask": [row.written for row in rows],
            "behavior_log_probs": [row.logprobs for row in rows],
            "advantages": [5e36 if self.loop.step == 1 else 1.0 for _ in rows],
        }
        return TrainingBatch("importance_sampling", {}, columns, {})


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_the_server_counts_the_steps(mode: Any, server: Server) -> None:
    """A step that is skipped is none, and steps of others between two calls are; samples say the same."""
    async with gradwire.connect(server.address) as service:
        run = await service.create_run("tiny", lora={"rank": 4})

        async def versions() -> tuple[int, int]:
            (sample,) = await (await RunInference.of(service, run)).generate([[5, 6]], SamplingParams(max_tokens=2))
            return (await run.info()).step, sample.version

        settings = config(batch_size=2, max_tokens=4)
        algorithm = Overflowing(service, run, ["ab", "cd"], long, settings)
        history = await algorithm.train(3, progress_bar=False, mode=mode)
        assert [metrics["train/skipped_steps"] for metrics in history] == [0, 1, 0]
        assert algorithm.version == 2 and await versions() == (2, 2)
        await run.train_step({"input_ids": [[5, 6, 7, 8]]}, "causal_lm", learning_rate=0.05)
        history = await algorithm.train(2, progress_bar=False, mode=mode)
        assert algorithm.version == 5 and await versions() == (5, 5)
    assert min(metrics["train/staleness"] for metrics in algorithm.history) >= 0
    assert mode == "async" or max(metrics["train/staleness_max"] for metrics in algorithm.history) == 0


P = np.array([0.5, 0.25, 0.15, 0.06, 0.04])
"""Probabilities of the tokens 10 … 14, whatever came before."""


@pytest.fixture
def vllm() -> Iterator[str]:
    """Answers as vLLM does with ``--logprobs-mode processed_logprobs``: as probable as among the kept tokens."""
    pytest.importorskip("openai", reason="needs gradwire[openai]")
    chance = np.random.default_rng(0)

    class Handler(Quiet):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer: Any = {}
            if self.path.endswith("/completions"):
                kept = np.ones(5, bool)
                kept[body.get("top_k") or 5 :] = False
                kept &= np.cumsum(P) - P < body["top_p"]
                processed = np.where(kept, P, 0) / P[kept].sum()
                ids = chance.choice(5, body["max_tokens"], p=processed)
                choice = {
                    "text": "".join("abcde"[i] for i in ids), "token_ids": (10 + ids).tolist(),
                    "finish_reason": "length", "logprobs": {"token_logprobs": np.log(processed[ids]).tolist()},
                }  # fmt: skip
                answer = {"choices": [choice]}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

    with serving(Handler) as address:
        yield f"http://{address}/v1"
    gc.collect()  # removes the folders of the weights, which would hold a later test's loop


class ScoringRun(CheckingRun):
    """Scores by the whole distribution, as the trainer does."""

    def compute_logprobs(self, batch: Any, temperature: float = 1.0) -> Any:
        self.scored += 1

        async def scored() -> list[Any]:
            return [
                np.log(P[np.asarray(row)[np.asarray(mask)] - 10]).astype(np.float32)
                for row, mask in zip(batch["input_ids"], batch["loss_mask"])
            ]

        return scored()

    async def export(self, folder: Path) -> None:
        await asyncio.to_thread((folder / "adapter_model.safetensors").touch)


@pytest.mark.parametrize("algorithm", [GRPOAlgorithm, REINFORCEAlgorithm])
@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_k": 2}, {"top_k": 1}, {}], ids=str)
async def test_kept_tokens_are_not_weighted_by_the_kept_mass(
    cut: dict[str, Any], algorithm: Any, vllm: str, rule_inference: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    inference = OpenAIInference(vllm, "m", rule_inference(lambda text, number: "").codec, weights="adapter")
    run = ScoringRun()
    seen: list[Trajectory] = []

    class Watched(algorithm):  # type: ignore[misc]
        async def training_batch(self, trajectories: Any) -> Any:
            seen.extend(trajectories)
            return await super().training_batch(trajectories)

    trained = Watched(None, run, ["a", "b"], long, config(max_tokens=6, **cut), inference=inference)
    await trained.train(2, progress_bar=False)
    for step in (step for each in seen for step in each.steps):
        np.testing.assert_allclose(step.logprobs, np.log(P[step.response_ids - 10]), rtol=1e-5)
    assert not any("sampler_correction" in kwargs for _, kwargs, _ in run.batches)
    assert ("the trainer scores the samples" in caplog.text) == bool(cut)
    stale = Watched(None, run, ["a"], long, config(max_tokens=6, max_staleness=1, **cut), inference=inference)
    for mode in ("sync", "async"):
        if cut:
            with pytest.raises(ValueError, match=r"log-probabilities are of the kept tokens only.*set top_p=1"):
                await stale.train(1, progress_bar=False, mode=mode)
    told = OpenAIInference(vllm, "m", inference.codec, weights="adapter", whole_logprobs=True)
    biased = Watched(None, ScoringRun(), ["a"], long, config(max_tokens=6, **cut), inference=told)
    await biased.train(1, progress_bar=False)  # believed; where it is wrong, the comparison with the trainer shows it
    assert ("the sampler's log-probabilities differ" in caplog.text) == bool(cut and algorithm is GRPOAlgorithm)
