"""Training on preferences: DPO, without a reward model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from gradwire.loop.loggers import MetricLogger
from gradwire.loop.training_loop import Plan, TrainingLoop
from gradwire.rl.batching import derive_seed
from gradwire.rl.generation import ServiceCodec
from gradwire.rlhf import TrainingConfig, TrainingProgress
from gradwire.rlhf.origins import POLICY_FILE, export_run, find_origin
from gradwire.rlhf.results import ProgressLogger
from gradwire.rlhf.reward_model import encode_pairs, encoded
from gradwire.rlhf.state import OWN_FOLDER, POLICY, TrainingState, fingerprint
from gradwire.whole_files import replace_json

PREFERENCES_FILE = "preference_results.json"
HELD_OUT = 0.1
"""Share of the prompts whose pairs are not trained on."""
FIGURES = {"loss": "loss", "preference_accuracy": "accuracy", "reward_margin": "rewardMargin"}
"""The loss's metrics that are kept, and their names in the result."""


@dataclass(frozen=True)
class PreferenceResult:
    """The result of a training on preferences.

    Attributes:
        pairs: Number of preferences, those held out among them.
        held_out: Number of preferences that were held out.
        before, after: ``loss``, ``accuracy`` (share of pairs whose preferred answer became likelier, against the
            start, than the other) and ``rewardMargin`` (nats times beta) on the held-out pairs; empty without any.
        curves: The same of each step.
        checkpoint: ``"RUN_ID/NAME"`` of the policy on the training server.
    """

    pairs: int
    held_out: int
    before: dict[str, float]
    after: dict[str, float]
    curves: dict[str, list[float]]
    checkpoint: str

    def save(self, folder: Path) -> None:
        replace_json(folder / PREFERENCES_FILE, asdict(self), indent=1)

    @staticmethod
    def load(folder: Path) -> PreferenceResult:
        """Raises OSError, ValueError or TypeError if the file is missing or holds something else."""
        return PreferenceResult(**json.loads((folder / PREFERENCES_FILE).read_text(encoding="utf-8")))


@dataclass
class _Rows:
    """Pairs as token ids, and how many of each row's tokens are the prompt's."""

    chosen: list[Any] = field(default_factory=list)
    rejected: list[Any] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def batch(self, places: Sequence[int]) -> dict[str, Any]:
        return {
            "chosen_input_ids": [self.chosen[place] for place in places],
            "rejected_input_ids": [self.rejected[place] for place in places],
            "prompt_lengths": [self.prompts[place] for place in places],
        }


async def train_on_preferences(
    service: gradwire.ServiceClient,
    pairs: Sequence[Mapping[str, str]],
    output: Path,
    config: TrainingConfig,
    beta: float,
    on_progress: Callable[[TrainingProgress], None],
) -> PreferenceResult:
    """Train ``config.max_steps`` steps of ``config.batch_size`` pairs, and write ``policy`` and the result.

    A call with the same arguments continues after a kill, from the last checkpoint.

    Args:
        pairs: With ``prompt``, ``chosen`` and ``rejected``.
        output: A folder for this training alone.
        beta: Weight of the KL to the start, as in DPO.

    Raises:
        gradwire.GradwireError: An error of the training server.
    """
    if (output / PREFERENCES_FILE).exists():
        return PreferenceResult.load(output)
    state = TrainingState(output / OWN_FOLDER, fingerprint(asdict(config), beta, list(pairs)))
    origin = await find_origin(service, config.base_model)
    rows = await _encoded(service, origin.model, origin.context_tokens, pairs)
    trained, unseen = _split([pair["prompt"] for pair in pairs], config.seed)

    run = await state.find_run(service, POLICY)
    if run is None and origin.checkpoint:
        run = await service.fork_run(origin.checkpoint, head="", seed=config.seed, name=state.run_name(POLICY))
    elif run is None:
        run = await service.create_run(
            origin.model, lora=config.lora, seed=config.seed, name=state.run_name(POLICY)
        )  # fmt: skip
    settings = {"beta": beta, "reference_model": origin.reference(await run.info())}

    async def measured() -> dict[str, float]:
        """Means over the held-out pairs."""
        parts = [unseen[at : at + config.batch_size] for at in range(0, len(unseen), config.batch_size)]
        evaluations = [
            await run.forward(rows.batch(part), "dpo", settings, outputs=(), timeout=None) for part in parts
        ]  # fmt: skip
        weights = [len(part) / len(unseen) for part in parts]
        return {
            shown: float(sum(weight * each.metrics[name] for weight, each in zip(weights, evaluations)))
            for name, shown in FIGURES.items()
            if evaluations
        }

    curves: dict[str, list[float]] = {shown: [] for shown in FIGURES.values()}
    before: dict[str, float] = {}

    class Curves:
        """Adds each step's figures to the curves."""

        def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
            for name, shown in FIGURES.items():
                curves[shown].append(float(metrics[name]))

        def close(self) -> None:
            """Do nothing: the loop saves the curves."""

    async def step(number: int) -> gradwire.Future[gradwire.TrainStepResult]:
        batch = rows.batch(_places(trained, config, number))
        return run.train_step(batch, "dpo", settings, learning_rate=config.learning_rate)

    loggers: list[MetricLogger] = [Curves(), ProgressLogger(on_progress, "preferences", config.max_steps)]
    loop = TrainingLoop(
        run, Plan("preferences", save_every=None, keep=1), loggers, state.file(POLICY),
        own=lambda: {"curves": curves, "before": before},
    )  # fmt: skip
    if earlier := await loop.resume():
        curves, before = earlier["curves"], earlier["before"]
    else:
        before = await measured()
    await loop.train(config.max_steps, step, show=False)
    on_progress(TrainingProgress("export", 0, 1))
    await export_run(run, output / "policy")
    written = {"model": origin.model, "checkpoint": loop.checkpoint}
    replace_json(output / "policy" / POLICY_FILE, written, indent=1)
    result = PreferenceResult(len(pairs), len(unseen), before, await measured(), curves, loop.checkpoint)
    result.save(output)
    on_progress(TrainingProgress("export", 1, 1))
    return result


async def _encoded(
    service: gradwire.ServiceClient, model: str, context: int, pairs: Sequence[Mapping[str, str]]
) -> _Rows:
    """The pairs' tokens; a row that is longer than the context loses its beginning."""
    codec, prompts = ServiceCodec(service, model), [pair["prompt"] for pair in pairs]
    lengths = [len(row) for row in await encoded(codec, prompts)]
    rows_of_ids = _Rows()
    both = [await encode_pairs(codec, prompts, [pair[name] for pair in pairs]) for name in ("chosen", "rejected")]
    for chosen, rejected, length in zip(*both, lengths):
        cut = max(len(chosen), len(rejected), context) - context
        rows_of_ids.chosen.append(chosen[cut:])
        rows_of_ids.rejected.append(rejected[cut:])
        rows_of_ids.prompts.append(max(length - cut, 0))
    return rows_of_ids


def _split(prompts: Sequence[str], seed: int) -> tuple[list[int], list[int]]:
    """Places of the pairs to train on, and of those to hold out: all pairs of some prompts, none of a single one."""
    known = list(dict.fromkeys(prompts))
    count = max(1, round(HELD_OUT * len(known))) if len(known) > 1 else 0
    chosen = np.random.default_rng(derive_seed(seed, "held-out preferences")).permutation(len(known))[:count]
    held = {known[place] for place in chosen}
    return (
        [place for place, prompt in enumerate(prompts) if prompt not in held],
        [place for place, prompt in enumerate(prompts) if prompt in held],
    )


def _places(trained: Sequence[int], config: TrainingConfig, step: int) -> list[int]:
    """The pairs of a step, counted from 0: each pass over all of them in another order."""
    first = step * config.batch_size
    places = []
    for place in range(first, first + config.batch_size):
        epoch, position = divmod(place, len(trained))
        order = np.random.default_rng(derive_seed(config.seed, "preferences", epoch)).permutation(len(trained))
        places.append(trained[order[position]])
    return places
