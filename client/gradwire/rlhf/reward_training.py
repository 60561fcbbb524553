"""Stage one: train a reward model on ratings."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gradwire_proto import rates

from gradwire import schedules, sync
from gradwire.futures import Future
from gradwire.loop.training_loop import Plan, TrainingLoop
from gradwire.results import TrainStepResult
from gradwire.rl.batching import derive_seed
from gradwire.rl.generation import TextCodec
from gradwire.rlhf.config import RewardModelConfig
from gradwire.rlhf.datasets import FeedbackDataset
from gradwire.rlhf.origins import find_origin, served_models, start_run
from gradwire.rlhf.results import CalibrationBin, OnProgress, ProgressLogger, RewardModelReport
from gradwire.rlhf.reward_model import RewardModel, RewardModelDetails, encode_pairs, text_codec
from gradwire.rlhf.state import REWARD_MODEL, TrainingState
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient

logger = logging.getLogger("gradwire.rlhf")

PATIENCE = 2
EVALUATION_ROWS = 256
CALIBRATION_BINS = 10

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def train_reward_model(
    train_dataset: FeedbackDataset,
    val_dataset: FeedbackDataset | None,
    config: RewardModelConfig | None = None,
    tokenizer: Any = None,
    *,
    address: str | None = None,
    api_key: str | None = None,
    progress_bar: bool = True,
) -> RewardModel:
    """Train a scalar head, with an adapter or all weights, by mean squared error on the ratings.

    Args:
        train_dataset: Ratings to train on.
        val_dataset: Held-out ratings for early stopping and the report; None disables both.
        config: The settings; defaults if None.
        tokenizer: The model's own tokenizer, e.g. of ``transformers``; None uses the server's.
        address: Address of a running server that holds ``config.base_model``; None starts one, which stops with the
            model's ``close``.
        api_key: API key of that server.
        progress_bar: Show a line with live numbers on stderr.

    Returns:
        The model of the epoch with the lowest validation loss, with its ``report``.
    """
    config = config or RewardModelConfig()
    own = sync.connect(address, api_key=api_key, models=() if address else served_models([config.base_model]))
    try:
        model = own._loop_thread.run(
            train_reward_model_async(
                own._client, train_dataset, val_dataset, config, tokenizer, progress_bar=progress_bar
            )
        )
    except BaseException:
        own.close()
        raise
    model._owner = own
    return model


async def train_reward_model_async(
    service: ServiceClient,
    train_dataset: FeedbackDataset,
    val_dataset: FeedbackDataset | None,
    config: RewardModelConfig | None = None,
    tokenizer: Any = None,
    *,
    model_class: type[RewardModel] = RewardModel,
    state: TrainingState | None = None,
    on_progress: OnProgress | None = None,
    progress_bar: bool = True,
) -> RewardModel:
    """Like :func:`train_reward_model`, on an open service.

    Args:
        model_class: Class of the returned model.
        state: Stores the progress of the training.
        on_progress: Called after each step.
    """
    config = config or RewardModelConfig()
    if len(set(train_dataset.scores.tolist())) == 1:
        logger.warning(
            "all %d training ratings are %g: good answers cannot be told from bad ones",
            len(train_dataset), train_dataset.scores[0],
        )  # fmt: skip
    origin = await find_origin(service, config.base_model)
    codec, context = text_codec(service, origin.model, tokenizer), origin.context_tokens
    rows = await _rows(codec, train_dataset, context)
    unseen = await _rows(codec, val_dataset, context) if val_dataset is not None else []
    epoch_steps = math.ceil(len(rows) / config.batch_size)
    total, mean, std = epoch_steps * config.num_epochs, train_dataset.mean, train_dataset.std

    run = await state.find_run(service, REWARD_MODEL) if state is not None else None
    if run is None:
        name = state.run_name(REWARD_MODEL) if state is not None else "reward model"
        run = await start_run(service, origin, lora=config.lora, head="reward", seed=config.seed, name=name)
    plan = Plan(
        "reward model", "reward", eval_every=epoch_steps, save_every=None if state is not None else 0,
        at_end=state is not None, keep=1, best_by="loss", patience=PATIENCE,
    )  # fmt: skip
    loop = TrainingLoop(
        run, plan, [ProgressLogger(on_progress, REWARD_MODEL, total)] if on_progress is not None else [],
        state.file(REWARD_MODEL) if state is not None else None,
        shown=lambda metrics: {name: metrics[name] for name in ("loss", "mae", "correlation")},
    )  # fmt: skip

    peak = config.learning_rate
    if peak is None:
        peak = rates.learning_rate("scores", (await run.model_info()).hidden_size, adapter=config.use_lora)

    async def step(number: int) -> Future[TrainStepResult]:
        epoch, place = divmod(number, epoch_steps)
        order = np.random.default_rng(derive_seed(config.seed, "reward epoch", epoch)).permutation(len(rows))
        part = order[place * config.batch_size :][: config.batch_size]
        batch = {"input_ids": [rows[index] for index in part], "scores": train_dataset.scores[part].tolist()}
        rate = schedules.linear(number, peak=peak, total=total)
        loss_kwargs = {"score_mean": mean, "score_std": std}
        return run.train_step(batch, "reward_regression", loss_kwargs, learning_rate=rate)

    async def evaluated() -> dict[str, float]:
        assert val_dataset is not None
        loss = float(np.mean((await _predictions(run, unseen) - val_dataset.normalized_scores) ** 2))
        logger.info("reward model: validation loss %.4f after %d steps", loss, loop.step)
        return {"eval/loss": loss}

    await loop.resume()
    await loop.train(total, step, evaluated if val_dataset is not None else None, show=progress_bar)
    report = None
    if val_dataset is not None:
        await run.load_checkpoint("best")
        report = evaluate(await _predictions(run, unseen) * std + mean, val_dataset.scores, mean)
    return model_class(service, run, RewardModelDetails(origin.model, mean, std, context, report=report), codec=codec)


async def _rows(codec: TextCodec, dataset: FeedbackDataset, context: int) -> list[Ids]:
    prompts, responses = [item.prompt for item in dataset], [item.response for item in dataset]
    rows = await encode_pairs(codec, prompts, responses)
    if cut := sum(len(row) > context for row in rows):
        logger.warning("%d of %d ratings are longer than %d tokens; their beginning is cut", cut, len(rows), context)
    return [row[-context:] for row in rows]


async def _predictions(run: TrainingClient, rows: Sequence[Ids]) -> Floats:
    """``[rows]``: outputs of the head."""
    parts = [
        run.compute_rewards({"input_ids": rows[at : at + EVALUATION_ROWS]})
        for at in range(0, len(rows), EVALUATION_ROWS)
    ]
    return np.concatenate([np.asarray(await part, np.float64) for part in parts])


def evaluate(predicted: npt.ArrayLike, observed: npt.ArrayLike, constant: float) -> RewardModelReport:
    """Compare predictions ``[ratings]`` with held-out ratings, and with predicting ``constant`` for all."""
    guesses, ratings = np.asarray(predicted, np.float64), np.asarray(observed, np.float64)
    order = np.argsort(guesses, kind="stable")
    parts = np.array_split(order, min(CALIBRATION_BINS, len(order)))
    bins = tuple(CalibrationBin(float(guesses[p].mean()), float(ratings[p].mean()), len(p)) for p in parts)
    return RewardModelReport(
        num_ratings=len(ratings),
        mean_squared_error=float(np.mean((guesses - ratings) ** 2)),
        baseline_error=float(np.mean((constant - ratings) ** 2)),
        pearson=_correlation(guesses, ratings),
        spearman=_correlation(_ranks(guesses), _ranks(ratings)),
        calibration_error=sum(each.count * abs(each.predicted - each.observed) for each in bins) / len(ratings),
        bins=bins,
    )


def _correlation(first: Floats, second: Floats) -> float:
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: Floats) -> Floats:
    """Rank ``[n]`` in increasing order; ties share their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    result: Floats = (ends - (counts - 1) / 2)[inverse]
    return result
