"""Both stages: from ratings to a policy and its reward model."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import gradwire
from gradwire import sync
from gradwire.errors import InvalidArgumentError
from gradwire.loop.loggers import read_jsonl
from gradwire.loop.training_loop import TrainingLoop
from gradwire.rlhf.config import RewardModelConfig, TrainingConfig
from gradwire.rlhf.datasets import MIN_FEEDBACK, FeedbackDataset, PPODataset
from gradwire.rlhf.origins import POLICY_FILE, Origin, export_run, find_origin, served_models, start_run
from gradwire.rlhf.ppo import FeedbackPPO
from gradwire.rlhf.results import RESULTS_FILE, OnProgress, ProgressLogger, TrainingProgress, TrainingResult
from gradwire.rlhf.reward_model import RewardModel, encoded, text_codec
from gradwire.rlhf.reward_training import train_reward_model_async
from gradwire.rlhf.state import OWN_FOLDER, POLICY, REWARD_MODEL, TrainingState, fingerprint
from gradwire.service import ServiceClient

logger = logging.getLogger("gradwire.rlhf")

METRICS_FILE = "metrics.jsonl"


class RLHFTrainer:
    """Trains a reward model on ratings, and a policy against it.

    Args:
        config: Settings of the policy.
        reward_config: Settings of the reward model; by default derived from the policy's.
        reward_model_class: A subclass of :class:`RewardModel` whose ``forward`` defines the policy's reward.
        address: Address of a running server that holds ``config.base_model``; None starts one for each training.
        api_key: API key of that server.
        service: An open service, for :meth:`train_async`, instead of an address.
        tokenizer: The model's own tokenizer, e.g. of ``transformers``; None uses the server's.

    Raises:
        InvalidArgumentError: Settings of an own server are combined with an address or a service.
    """

    def __init__(
        self,
        config: TrainingConfig | None = None,
        *,
        reward_config: RewardModelConfig | None = None,
        reward_model_class: type[RewardModel] = RewardModel,
        address: str | None = None,
        api_key: str | None = None,
        service: ServiceClient | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.config = config or TrainingConfig()
        self.reward_config = reward_config or RewardModelConfig.of(self.config)
        self._class, self._tokenizer = reward_model_class, tokenizer
        self._address, self._api_key, self._service = address, api_key, service
        if address is not None and service is not None:
            raise InvalidArgumentError("pass an address or a service, not both", field="address", rule="one of them")
        for name in ("device", "mixed_precision"):
            if getattr(self.config, name) is not None and (address is not None or service is not None):
                raise InvalidArgumentError(
                    f"{name}={getattr(self.config, name)!r} applies to a server that the trainer starts; a given "
                    f"server has its own setting: leave {name} out",
                    field=name,
                    rule="only without an address or a service",
                )

    def train(
        self,
        feedbacks: Iterable[Any],
        output_dir: str | Path,
        reward_model_path: str | Path | None = None,
        *,
        on_progress: OnProgress | None = None,
        progress_bar: bool = True,
    ) -> TrainingResult:
        """Train, and write ``policy``, ``reward_model`` and ``training_results.json``.

        If it is called again with the same arguments after the program was killed, it continues; if the training is
        finished, it returns the result again. With other arguments it starts anew and replaces the old results.

        Args:
            feedbacks: Ratings, at least ten: mappings or objects with ``prompt``, ``response`` and ``score`` (0 to 1).
            output_dir: A folder for this training alone.
            reward_model_path: A folder of ``RewardModel.save_pretrained``, used as it is: stage one is skipped.
            on_progress: Called after each step.
            progress_bar: Show a line with live numbers on stderr.

        Returns:
            The result, which is also in ``training_results.json``.

        Raises:
            InvalidArgumentError: Invalid ratings or settings; names the field.
            GradwireError: An error of the service.
        """
        if self._service is not None:
            raise InvalidArgumentError(
                "this trainer uses an open service, which belongs to an event loop: await train_async(...) on that "
                "loop",
                field="service",
                rule="train_async",
            )
        loop_thread = sync.LoopThread()
        try:
            return loop_thread.run(
                self.train_async(
                    feedbacks, output_dir, reward_model_path, on_progress=on_progress, progress_bar=progress_bar
                )
            )
        finally:
            loop_thread.close()

    async def train_async(
        self,
        feedbacks: Iterable[Any],
        output_dir: str | Path,
        reward_model_path: str | Path | None = None,
        *,
        on_progress: OnProgress | None = None,
        progress_bar: bool = True,
    ) -> TrainingResult:
        """Like :meth:`train`, on an event loop. A cancelled training can be continued later."""
        dataset, output = FeedbackDataset(feedbacks), _resolved(output_dir)
        reward_folder = None if reward_model_path is None else _resolved(reward_model_path)
        if len(dataset) < MIN_FEEDBACK:
            raise InvalidArgumentError(
                f"there are {len(dataset)} ratings; training needs at least {MIN_FEEDBACK}, so "
                f"{MIN_FEEDBACK - len(dataset)} are missing",
                field="feedbacks",
                rule=f"at least {MIN_FEEDBACK}",
            )
        if _resolved(self.config.base_model).is_relative_to(output / POLICY):
            raise InvalidArgumentError(
                f"output_dir {output} would replace base_model {self.config.base_model}: use another folder",
                field="output_dir",
                rule="another than base_model's",
            )
        inputs = fingerprint(
            asdict(self.config), asdict(self.reward_config), [item._asdict() for item in dataset], str(reward_folder)
        )
        state = TrainingState(output / OWN_FOLDER, inputs)
        if state.resumed and (output / RESULTS_FILE).exists():
            logger.info("%s already holds the result of this training", output)
            return TrainingResult.load(output)
        if state.discarded:
            logger.warning("%s holds a training of other ratings or settings: it is replaced", output)
            _clear(output, reward_folder)
        async with self._open_service(output, reward_folder) as service:
            training = _Training(self, service, dataset, output, state, on_progress, progress_bar)
            result = await training.run(reward_folder)
        if self._own_server:
            shutil.rmtree(output / OWN_FOLDER / "server", ignore_errors=True)
        return result

    @property
    def _own_server(self) -> bool:
        return self._service is None and self._address is None

    @asynccontextmanager
    async def _open_service(self, output: Path, reward_model: Path | None) -> AsyncIterator[ServiceClient]:
        """Yield the given service, or one started for this training."""
        if self._service is not None:
            yield self._service
            return
        if self._address is not None:
            async with gradwire.connect(self._address, api_key=self._api_key) as service:
                yield service
            return
        models = [self.config.base_model, *([str(reward_model)] if reward_model else [self.reward_config.base_model])]
        arguments = ["--device", self.config.device] if self.config.device else []
        arguments += ["--dtype", "mixed"] if self.config.mixed_precision else []
        if self.config.mixed_precision == "fp16":
            logger.warning("mixed_precision 'fp16' computes in bfloat16: equally small, and without loss scaling")
        state_dir = output / OWN_FOLDER / "server"
        async with gradwire.connect(
            models=served_models(models), state_dir=state_dir, server_args=arguments
        ) as service:
            yield service


class _Training:
    """One training of a policy and, unless one is given, of a reward model."""

    def __init__(
        self,
        trainer: RLHFTrainer,
        service: ServiceClient,
        dataset: FeedbackDataset,
        output: Path,
        state: TrainingState,
        on_progress: OnProgress | None,
        progress_bar: bool,
    ) -> None:
        self._config, self._reward_config = trainer.config, trainer.reward_config
        self._class, self._tokenizer = trainer._class, trainer._tokenizer
        self._keeps_runs = not trainer._own_server
        self._service, self._dataset, self._output, self._state = service, dataset, output, state
        self._on_progress, self._show = on_progress, progress_bar

    async def run(self, reward_model_path: Path | None) -> TrainingResult:
        origin = await find_origin(self._service, self._config.base_model)
        self._config.check_context(origin.model, origin.context_tokens)
        room = origin.context_tokens - self._config.max_new_tokens
        prompts = list(PPODataset(self._dataset))
        rows = await encoded(text_codec(self._service, origin.model, self._tokenizer), prompts)
        if long := sum(len(row) > room for row in rows):
            logger.warning(
                "%d of %d prompts are longer than %d tokens (the model's context minus max_new_tokens); their "
                "beginning is cut",
                long,
                len(prompts),
                room,
            )
        model, reward_model_folder = await self._reward_model(reward_model_path)
        policy = (await self._train_policy(origin, model)).loop
        result = await self._export(policy, origin, model, reward_model_folder)
        await model.close_async()
        return result

    async def _reward_model(self, given: Path | None) -> tuple[RewardModel, Path]:
        """Return the reward model and its folder: the given one, or one trained on the ratings."""
        if given is not None:
            return await self._class.from_pretrained_async(given, self._service), given
        train, val = self._dataset.split(seed=self._reward_config.seed)
        if val is None:
            logger.warning(
                "all ratings belong to one prompt: none can be held out, so the reward model is not validated"
            )
        model = await train_reward_model_async(
            self._service,
            train,
            val,
            self._reward_config,
            self._tokenizer,
            model_class=self._class,
            state=self._state,
            on_progress=self._on_progress,
            progress_bar=self._show,
        )
        folder = await model.save_pretrained_async(self._output / REWARD_MODEL)
        return model, folder

    async def _train_policy(self, origin: Origin, model: RewardModel) -> FeedbackPPO:
        """Train the policy, from the state of an interrupted training if there is one."""
        config, state, total = self._config, self._state, self._config.max_steps
        run = await state.find_run(self._service, POLICY)
        if run is None:
            name = state.run_name(POLICY)
            run = await start_run(self._service, origin, lora=config.lora, head="value", seed=config.seed, name=name)
        prompts, tells = list(PPODataset(self._dataset)), self._on_progress
        ppo = FeedbackPPO(
            self._service,
            run,
            prompts,
            model,
            config,
            origin=origin,
            folder=self._output,
            state=state,
            tokenizer=self._tokenizer,
            loggers=[ProgressLogger(tells, POLICY, total, first=0)] if tells is not None else [],
        )
        await ppo.train(total - await ppo.resume(), self._show)
        ppo.close()
        return ppo

    async def _export(
        self, policy: TrainingLoop, origin: Origin, model: RewardModel, reward_model_folder: Path
    ) -> TrainingResult:
        if self._on_progress is not None:
            self._on_progress(TrainingProgress("export", 0, 1))
        folder = self._output / POLICY
        await export_run(policy.run, folder)
        written = {"model": origin.model, "checkpoint": policy.checkpoint}
        (folder / POLICY_FILE).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
        steps = {each["iteration"]: each for each in read_jsonl(self._output / METRICS_FILE)}
        history = [steps[step] for step in sorted(steps) if step < self._config.max_steps]
        mean, std = final_reward(history)
        result = TrainingResult(
            model_path=str(folder),
            reward_model_path=str(reward_model_folder),
            feedback_count=len(self._dataset),
            final_reward_mean=mean,
            final_reward_std=std,
            training_steps=len(history),
            reward_history=[each["rewards/score"] for each in history],
            kl_history=[each["train/kl"] for each in history],
            loss_history=[each["train/loss"] for each in history],
            value_error_history=[each["train/value_error"] for each in history],
            reward_model_report=model.report,
            policy_checkpoint=policy.checkpoint if self._keeps_runs else "",
        )
        result.save(self._output)
        if self._on_progress is not None:
            self._on_progress(TrainingProgress("export", 1, 1))
        return result


def final_reward(history: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean and standard deviation of the scores of the last tenth of the steps, all with the same number of answers."""
    last = history[-max(1, len(history) // 10) :]
    means, spreads = (np.array([each[name] for each in last]) for name in ("rewards/score", "train/score_std"))
    return float(means.mean()), float(np.sqrt(np.mean(spreads**2) + np.var(means)))


def _clear(output: Path, keep: Path | None) -> None:
    """Remove the files of an earlier training with other inputs, and nothing else."""
    for folder in (POLICY, REWARD_MODEL, f"{OWN_FOLDER}/server"):
        if output / folder != keep:
            shutil.rmtree(output / folder, ignore_errors=True)
    for file in (RESULTS_FILE, METRICS_FILE):
        (output / file).unlink(missing_ok=True)


def _resolved(path: str | Path) -> Path:
    return Path(path).expanduser().resolve()
