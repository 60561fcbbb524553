"""The plan of a job, validated before it is queued, and the training itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgumentError
from gradwire.rlhf import RewardModelConfig, RLHFTrainer, TrainingConfig, TrainingProgress, TrainingResult

from gradwire_feedback.database.connection import Database
from gradwire_feedback.names import BASE
from gradwire_feedback.settings import Settings
from gradwire_feedback.statistics.distribution import MINIMUM_FEEDBACK
from gradwire_feedback.store import deployments
from gradwire_feedback.store.feedback import scores_of
from gradwire_feedback.store.jobs import newest_version
from gradwire_feedback.store.problems import UnprocessableError
from gradwire_feedback.training.server import TrainingServer


@dataclass(frozen=True)
class Plan:
    """A training, in a form that JSON can store.

    Attributes:
        config: All settings of a :class:`gradwire.rlhf.TrainingConfig`.
        start_from: Version that training continues from; ``base`` for the base model.
        start_path: Folder of that version's policy; None for the base model.
        reward_model_path: Folder of a reward model to reuse; None trains one.
        reward_settings: Settings of a trained reward model that override those of the policy.
        trained_until: Number up to which it knows the agent's ratings; set when they are read.
    """

    config: dict[str, Any]
    start_from: str
    start_path: str | None
    reward_model_path: str | None
    reward_settings: dict[str, Any] = field(default_factory=dict)
    trained_until: int = 0

    @property
    def reward_config(self) -> RewardModelConfig:
        """All settings of the reward model."""
        return replace(RewardModelConfig.of(TrainingConfig(**self.config)), **self.reward_settings)


def make_plan(
    database: Database,
    settings: Settings,
    agent_id: str,
    given: Mapping[str, Any],
    start_from: str | None,
    reward_model: str,
    reward_given: Mapping[str, Any],
) -> Plan:
    """Validate a request for training.

    Args:
        given: Settings of the request; others have their defaults.
        start_from: A version, ``base``, or None for the newest.
        reward_model: ``retrain``, ``reuse``, or a version.
        reward_given: Settings of a trained reward model; others are the policy's.

    Raises:
        UnprocessableError: Too little feedback, or a reward model that does not exist.
        NotFoundError: An unknown version.
        gradwire.InvalidArgumentError: Invalid settings.
    """
    config = TrainingConfig(**({"base_model": settings.base_model} | {k: v for k, v in given.items() if v is not None}))
    check_server_settings(config)
    with database.read() as session:
        count = len(scores_of(session, agent_id))
        if count < MINIMUM_FEEDBACK:
            raise UnprocessableError(
                f"{agent_id} has {count} feedback samples, but training needs {MINIMUM_FEEDBACK}: "
                f"{MINIMUM_FEEDBACK - count} are missing"
            )
        start = start_from or newest_version(session, agent_id)
        parent = None if start == BASE else deployments.policy_of(session, agent_id, start)
        if reward_model == "retrain":
            reward_model_path = None
        elif reward_model == "reuse":
            if parent is None:
                raise UnprocessableError(
                    f"rewardModel: {agent_id} starts from the base model: there is none to reuse", field="reward_model"
                )
            reward_model_path = parent.reward_model_path
        else:
            reward_model_path = deployments.policy_of(session, agent_id, reward_model).reward_model_path
    reward_settings = {name: value for name, value in reward_given.items() if value is not None}
    if reward_settings and reward_model_path is not None:
        raise UnprocessableError(
            f"rewardModelConfig: these settings apply to a new reward model, but rewardModel {reward_model!r} trains "
            "none: "
            "leave out one of the two",
            field="reward_model_config",
        )
    plan = Plan(asdict(config), start, parent.model_path if parent else None, reward_model_path, reward_settings)
    try:
        plan.reward_config  # noqa: B018 - making the settings checks them
    except InvalidArgumentError as error:
        raise UnprocessableError(f"rewardModelConfig: {error}", field=f"reward_model_config.{error.field}") from error
    return plan


def check_server_settings(config: TrainingConfig) -> None:
    """Refuse settings that only the training server has.

    Raises:
        UnprocessableError: Such a setting was given.
    """
    for name, option in (("device", "--device"), ("mixed_precision", "--dtype")):
        if getattr(config, name) is not None:
            raise UnprocessableError(
                f"{name} is a setting of the training server: set it there, with `gradwire serve {option}` or, for the "
                "embedded "
                f"one, `gradwire feedback serve --server-arg={option}=…`",
                field=name,
            )


async def train(
    plan: Plan,
    feedbacks: Sequence[Mapping[str, Any]],
    folder: Path,
    server: TrainingServer,
    on_progress: Callable[[TrainingProgress], None],
) -> TrainingResult:
    """Run a plan, continuing an earlier attempt in the same folder.

    Raises:
        gradwire.GradwireError: An error of the training server.
    """
    config = TrainingConfig(**plan.config)
    policy = config if plan.start_path is None else replace(config, base_model=plan.start_path)
    async with server.connection() as service:
        trainer = RLHFTrainer(policy, reward_config=plan.reward_config, service=service)
        return await trainer.train_async(
            feedbacks, folder, plan.reward_model_path, on_progress=on_progress, progress_bar=False
        )
