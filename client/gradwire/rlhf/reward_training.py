"""Stage one: train a reward model on ratings."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire import sync
from gradwire.futures import Future
from gradwire.results import TrainStepResult
from gradwire.rl.batching import derive_seed
from gradwire.rl.generation import TextCodec
from gradwire.rl.progress import Progress
from gradwire.rlhf.config import RewardModelConfig
from gradwire.rlhf.datasets import FeedbackDataset
from gradwire.rlhf.origins import Origin, find_origin, served_models, start_run
from gradwire.rlhf.results import CalibrationBin, RewardModelReport, TrainingProgress
from gradwire.rlhf.reward_model import RewardModel, RewardModelDetails, encode_pairs, text_codec
from gradwire.rlhf.state import Checkpoints, TrainingState, find_run
from gradwire.service import ServiceClient
from gradwire.training import TrainingClient

logger = logging.getLogger("gradwire.rlhf")

AHEAD = 8
PATIENCE = 2
EVALUATION_ROWS = 256
CALIBRATION_BINS = 10
SECTION = "reward_model"

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
OnProgress = Callable[[TrainingProgress], None]


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
    training = _RewardTraining(service, config, model_class, tokenizer, state, on_progress)
    return await training.run(train_dataset, val_dataset, progress_bar)


class _RewardTraining:
    """One training of a reward model: its inputs and its progress."""

    def __init__(
        self,
        service: ServiceClient,
        config: RewardModelConfig,
        model_class: type[RewardModel],
        tokenizer: Any,
        state: TrainingState | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._service, self._config, self._class = service, config, model_class
        self._tokenizer = tokenizer
        self._state = state
        self._on_progress = on_progress or (lambda progress: None)
        self._step, self._risen = 0, 0
        self._best_loss, self._best = math.inf, ""

    async def run(self, train: FeedbackDataset, val: FeedbackDataset | None, show: bool) -> RewardModel:
        config = self._config
        if len(set(train.scores.tolist())) == 1:
            logger.warning(
                "all %d training ratings are %g: good answers cannot be told from bad ones",
                len(train), train.scores[0],
            )  # fmt: skip
        origin = await find_origin(self._service, config.base_model)
        codec, context = text_codec(self._service, origin.model, self._tokenizer), origin.context_tokens
        rows = await _rows(codec, train, context)
        unseen = await _rows(codec, val, context) if val is not None else []
        run, checkpoint = await self._open(origin)
        checkpoints = Checkpoints(run, "reward", last=checkpoint)
        epoch_steps = math.ceil(len(rows) / config.batch_size)
        total = epoch_steps * config.num_epochs
        with Progress("reward model", total, show=show) as progress:
            while self._step < total and self._risen < PATIENCE:
                await self._epoch(run, rows, train, total, checkpoints, progress)
                if val is not None:
                    await self._validate(run, unseen, val)
                if self._state is not None:
                    await checkpoints.save(self._step, self._state, SECTION, self._values())
        if self._best:
            await run.load_checkpoint(self._best)
        report = None
        if val is not None:
            report = evaluate(await _predictions(run, unseen) * train.std + train.mean, val.scores, train.mean)
        details = RewardModelDetails(origin.model, train.mean, train.std, context, report=report)
        return self._class(self._service, run, details, codec=codec)

    async def _epoch(
        self,
        run: TrainingClient,
        rows: Sequence[Ids],
        train: FeedbackDataset,
        total: int,
        checkpoints: Checkpoints,
        progress: Progress,
    ) -> None:
        """Train the rest of the epoch of ``self._step``; a few steps are in flight at any time."""
        config, epoch_steps = self._config, total // self._config.num_epochs
        epoch, first = divmod(self._step, epoch_steps)
        order = np.random.default_rng(derive_seed(config.seed, "reward epoch", epoch)).permutation(len(rows))
        parts = [order[at : at + config.batch_size] for at in range(0, len(rows), config.batch_size)]
        loss_kwargs = {"score_mean": train.mean, "score_std": train.std}
        waiting: deque[Future[TrainStepResult]] = deque()

        async def settle(left: int) -> None:
            while len(waiting) > left:
                metrics = dict((await waiting.popleft()).metrics)
                done = self._step - len(waiting)
                progress.update(done, {name: metrics[name] for name in ("loss", "mae", "correlation")})
                self._on_progress(TrainingProgress("reward_model", done, total, metrics))

        for part in parts[first:]:
            batch = {"input_ids": [rows[index] for index in part], "scores": train.scores[part].tolist()}
            rate = config.rate * (1 - self._step / total)
            waiting.append(run.train_step(batch, "reward_regression", loss_kwargs, learning_rate=rate))
            self._step += 1
            await settle(AHEAD)
            if self._state is not None and checkpoints.due:
                await settle(0)
                await checkpoints.save(self._step, self._state, SECTION, self._values())
        await settle(0)

    async def _validate(self, run: TrainingClient, rows: Sequence[Ids], val: FeedbackDataset) -> None:
        """Save the weights if the validation loss is the lowest so far."""
        loss = float(np.mean((await _predictions(run, rows) - val.normalized_scores) ** 2))
        logger.info("reward model: validation loss %.4f after %d steps", loss, self._step)
        self._risen = 0 if loss < self._best_loss else self._risen + 1
        if not self._risen:
            self._best_loss, self._best = loss, (await run.save_checkpoint("best", overwrite=True)).path

    async def _open(self, origin: Origin) -> tuple[TrainingClient, str]:
        """Open the run of an interrupted training at its last checkpoint, or create a run."""
        config, state = self._config, self._state
        name = f"rlhf {state.job} reward model" if state is not None else "reward model"
        if state is not None and (found := await find_run(self._service, name)) is not None:
            done = state.section(SECTION)
            if done:
                await found.load_checkpoint(done["checkpoint"])
                self._step, self._risen = done["step"], done["risen"]
                self._best_loss, self._best = done["best_loss"], done["best"]
                return found, str(done["checkpoint"])
            await self._service.delete_run(found.run_id)
        if state is not None:
            state.forget(SECTION)
        run = await start_run(self._service, origin, lora=config.lora, head="reward", seed=config.seed, name=name)
        return run, ""

    def _values(self) -> dict[str, Any]:
        return {"step": self._step, "risen": self._risen, "best_loss": self._best_loss, "best": self._best}


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
