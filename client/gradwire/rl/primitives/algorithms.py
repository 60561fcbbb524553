"""Blocking training loops over the parts of this package."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from gradwire.loop.loggers import MetricLogger, WandbLogger
from gradwire.rl import algorithms
from gradwire.rl.primitives.background import wait_for
from gradwire.rl.primitives.backprop import ADAM, BackpropModule
from gradwire.rl.primitives.environments import BaseEnvironment
from gradwire.rl.primitives.rewards import ComputedRewards, Method
from gradwire.rl.primitives.rollouts import RolloutManager
from gradwire.rl.primitives.running import EpisodeEnvironment
from gradwire.rl.rewards import RewardComputer

logger = logging.getLogger("gradwire.rl")

OWN = ("use_wandb", "wandb_project", "reward_method")
FROM_PARTS = ("num_parallel", "max_steps_per_rollout", "rollout_timeout_s", "max_tokens", "temperature")


@dataclass(frozen=True)
class AlgorithmConfig(algorithms.AlgorithmConfig):
    """Settings of a training: those of :class:`gradwire.rl.AlgorithmConfig`, and a few more.

    Attributes:
        batch_size: Trajectories per iteration.
        group_size: Trajectories per task; must divide ``batch_size``. None: 8 for GRPO, else 1.
        learning_rate: None: the learning rate of the ``BackpropModule``'s optimizer.
        checkpoint_dir: Folder for checkpoints, the log, and the weights of each checkpoint as a Hugging Face folder.
        use_wandb: Log to Weights & Biases.
        wandb_project: Project of ``wandb.init``.
        reward_method: Passed to ``compute_rewards``.

    The rollout manager and its inference module define the rollouts (``num_parallel``, ``max_steps_per_rollout``),
    length and temperature; these settings may not be given here.
    """

    batch_size: int = 32
    group_size: int | None = None  # type: ignore[assignment]  # set by the algorithm
    use_wandb: bool = False
    wandb_project: str | None = None
    reward_method: Method = "absolute"

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {each.name: each.default for each in fields(algorithms.AlgorithmConfig)}
        changed = [name for name in FROM_PARTS if getattr(self, name) != defaults[name]]
        if changed:
            raise ValueError(
                f"{', '.join(changed)}: set these on the RolloutManager or the InferenceModule (max_new_tokens, "
                "temperature), which do the sampling"
            )


class _WithFolders:
    """Saves the weights as a Hugging Face folder beside each checkpoint on the server."""

    async def save_checkpoint(self: Any, name: str = "", best: bool = False) -> Any:
        checkpoint = await super().save_checkpoint(name, best)  # type: ignore[misc]
        if self.config.folder is not None:
            await self.run.export(self.config.folder / checkpoint.path.rsplit("/", 1)[-1])
        return checkpoint


class PPO(_WithFolders, algorithms.PPOAlgorithm):
    """:class:`gradwire.rl.PPOAlgorithm` that also saves folders."""


class GRPO(_WithFolders, algorithms.GRPOAlgorithm):
    """:class:`gradwire.rl.GRPOAlgorithm` that also saves folders."""


class REINFORCE(_WithFolders, algorithms.REINFORCEAlgorithm):
    """:class:`gradwire.rl.REINFORCEAlgorithm` that also saves folders."""


class _Algorithm:
    """Trains a model in an environment.

    Args:
        env: The environment, whose ``inference`` samples; it receives the trained weights after each iteration.
        rollout_manager: Collects the rollouts; by default one of the environment.
        reward_computer: An object with ``compute_rewards(trajectories, method=...)`` that returns a number, or an
            :class:`~gradwire.rl.EvaluateResult`, per trajectory.
        backprop: Trains the model.
        config: The settings.

    Attributes:
        algorithm: The underlying asynchronous algorithm, once training has begun.
    """

    kind: ClassVar[type[Any]]
    group_size: ClassVar[int] = 1
    options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        env: BaseEnvironment,
        rollout_manager: RolloutManager | None = None,
        reward_computer: Any = None,
        backprop: BackpropModule | None = None,
        config: AlgorithmConfig | None = None,
    ) -> None:
        if backprop is None or env.inference is None:
            raise ValueError(
                "the environment needs an inference module, and the algorithm a backprop=BackpropModule(...)"
            )
        self.env, self.backprop = env, backprop
        self.rollout_manager = rollout_manager or RolloutManager(env)
        self.config = config or AlgorithmConfig()
        self._reward = RewardComputer(ComputedRewards(reward_computer, self.config.reward_method))
        self.algorithm: Any = None

    def loss_arguments(self) -> dict[str, Any]:
        """The ``BackpropModule``'s config as arguments of the loss."""
        raise NotImplementedError

    def train(self, num_iterations: int, progress_bar: bool = True) -> list[dict[str, float]]:
        """Train for this many more iterations; return the metrics of each."""

        async def training() -> list[dict[str, float]]:
            history: list[dict[str, float]] = await (await self._ready()).train(num_iterations, progress_bar)
            return history

        return wait_for(training())

    def save_checkpoint(self, iteration: int | None = None, best: bool = False) -> Path | None:
        """Save the run, and its weights as a Hugging Face folder in ``checkpoint_dir``; return that folder.

        Args:
            iteration: Number for the name, ``iteration-N``; by default the current iteration.
            best: Keep it as the best, for :meth:`resume`.
        """

        async def saved() -> Path | None:
            algorithm = await self._ready()
            number = algorithm.loop.step if iteration is None else iteration
            checkpoint = await algorithm.save_checkpoint(f"iteration-{number}", best)
            folder: Path | None = algorithm.config.folder
            return None if folder is None else folder / checkpoint.path.rsplit("/", 1)[-1]

        return wait_for(saved())

    def resume(self, best: bool = False) -> int:
        """Continue from the last checkpoint in ``checkpoint_dir``, or the best; return the number of finished
        iterations."""

        async def resumed() -> int:
            done: int = await (await self._ready()).resume(best)
            return done

        return wait_for(resumed())

    def close(self) -> None:
        """Close the loggers; the caller closes the ``BackpropModule``."""
        if self.algorithm is not None:
            self.algorithm.close()

    async def _ready(self) -> Any:
        if self.algorithm is None:
            config = self._config()
            if config.folder is not None:
                self.backprop.keep_state_in(config.folder / "server")
            changed = {
                name for name, usual in ADAM.items() if self.backprop.optimizer_settings.get(name, usual) != usual
            }
            if changed:
                logger.warning("train() uses AdamW's default %s, not the optimizer's", " and ".join(changed))
            loggers: list[MetricLogger] = []
            if self.config.use_wandb:
                loggers.append(
                    WandbLogger(**{"project": self.config.wandb_project} if self.config.wandb_project else {})
                )
            tasks = self.env.prompts or [task for task, _ in zip(self.env.tasks(), range(config.batch_size))]
            self.algorithm = self.kind(
                None, await self.backprop.run(), tasks, self._reward, config,
                environment=EpisodeEnvironment(self.env), inference=self.env.inference.backend, loggers=loggers,
                **self.options,
            )  # fmt: skip
        return self.algorithm

    def _config(self) -> algorithms.AlgorithmConfig:
        shared = {each.name: getattr(self.config, each.name) for each in fields(self.config) if each.name not in OWN}
        size = self.config.group_size or min(self.group_size, self.config.batch_size)
        if self.config.batch_size % size:
            raise ValueError(f"batch_size {self.config.batch_size} is not a multiple of group_size {size}")
        rate = self.backprop.learning_rate if self.config.learning_rate is None else self.config.learning_rate
        rollouts, inference = self.rollout_manager.config, self.env.inference
        return algorithms.AlgorithmConfig(
            **shared
            | {
                "batch_size": self.config.batch_size // size,
                "group_size": size,
                "learning_rate": rate,
                "weight_decay": self.config.weight_decay or self.backprop.optimizer_settings.get("weight_decay", 0.0),
                "max_grad_norm": self.backprop.config.max_grad_norm,
                "num_parallel": rollouts.num_parallel,
                "max_steps_per_rollout": rollouts.max_steps_per_rollout,
                "rollout_timeout_s": rollouts.timeout_s,
                "max_tokens": inference.max_new_tokens,
                "temperature": inference.temperature,
                "loss_kwargs": {**self.loss_arguments(), **self.config.loss_kwargs},
            }
        )


class PPOAlgorithm(_Algorithm):
    """Proximal policy optimisation with a critic on the server."""

    kind = PPO

    def loss_arguments(self) -> dict[str, Any]:
        return self.backprop.ppo_arguments()


class GRPOAlgorithm(_Algorithm):
    """Group relative policy optimisation: the baseline is the mean of the episodes that start from the same state."""

    kind = GRPO
    group_size = 8

    def loss_arguments(self) -> dict[str, Any]:
        config = self.backprop.config
        scale = config.normalize_advantages
        return {"clip_epsilon": config.ppo_clip_range, "scale_rewards": scale, **self.backprop.reference()}


class REINFORCEAlgorithm(_Algorithm):
    """Vanilla policy gradient; the baseline is the mean reward of the batch."""

    kind = REINFORCE
    options: ClassVar[dict[str, Any]] = {"baseline": "batch"}

    def loss_arguments(self) -> dict[str, Any]:
        return self.backprop.reference()
