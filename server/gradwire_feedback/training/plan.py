"""The plan of a job, validated before it is queued, and the training itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgumentError
from gradwire.rlhf import RewardModelConfig, RLHFTrainer, TrainingConfig, TrainingProgress
from pydantic.alias_generators import to_camel
from sqlalchemy.orm import Session

from gradwire_feedback.database.connection import Database
from gradwire_feedback.database.tables import Policy
from gradwire_feedback.names import BASE
from gradwire_feedback.settings import Settings
from gradwire_feedback.statistics.distribution import MINIMUM_FEEDBACK
from gradwire_feedback.store import deployments
from gradwire_feedback.store.feedback import feedback_of, scores_of
from gradwire_feedback.store.jobs import newest_version
from gradwire_feedback.store.problems import UnprocessableError
from gradwire_feedback.store.rankings import pairs_of
from gradwire_feedback.training.preferences import train_on_preferences
from gradwire_feedback.training.server import TrainingServer

PREFERENCE_SETTINGS = (
    "base_model", "use_lora", "lora_r", "lora_alpha", "lora_dropout", "learning_rate", "batch_size", "max_steps",
    "max_new_tokens", "seed", "device", "mixed_precision",
)  # fmt: skip
"""Settings of a training on preferences; ``max_new_tokens`` is that of its examples."""


@dataclass(frozen=True)
class Plan:
    """A training, in a form that JSON can store.

    Attributes:
        config: All settings of a :class:`gradwire.rlhf.TrainingConfig`.
        start_from: Version that training continues from; ``base`` for the base model.
        start_path: Folder of that version's policy; None for the base model.
        reward_model_path: Folder of a reward model to reuse; None trains one.
        reward_settings: Settings of a trained reward model that override those of the policy.
        method: ``"ppo"`` against a reward model of the ratings, or ``"dpo"`` on the preferences.
        beta: Weight of the KL in DPO.
        trained_until: Number up to which it knows the agent's ratings; set when they are read.
    """

    config: dict[str, Any]
    start_from: str
    start_path: str | None
    reward_model_path: str | None
    reward_settings: dict[str, Any] = field(default_factory=dict)
    method: str = "ppo"
    beta: float = 0.1
    trained_until: int = 0

    @property
    def policy_config(self) -> TrainingConfig:
        """The policy's settings, with the folder that it starts from as its model."""
        config = TrainingConfig(**self.config)
        return config if self.start_path is None else replace(config, base_model=self.start_path)

    @property
    def reward_config(self) -> RewardModelConfig:
        """All settings of the reward model."""
        return replace(RewardModelConfig.of(TrainingConfig(**self.config)), **self.reward_settings)


def make_plan(
    database: Database,
    settings: Settings,
    agent_id: str,
    requested: Mapping[str, Any],
    start_from: str | None,
    reward_model: str,
    reward_given: Mapping[str, Any],
    method: str = "ppo",
    beta: float | None = None,
) -> Plan:
    """Validate a request for training.

    Args:
        requested: Settings of the request; others have their defaults.
        start_from: A version, ``base``, or None for the newest.
        reward_model: ``retrain``, ``reuse``, or a version.
        reward_given: Settings of a trained reward model; others are the policy's.
        method: ``"ppo"`` or ``"dpo"``.
        beta: Weight of the KL in DPO; None: 0.1.

    Raises:
        UnprocessableError: Too little feedback, a reward model that does not exist, or settings of another method.
        NotFoundError: An unknown version.
        gradwire.InvalidArgumentError: Invalid settings.
    """
    requested = {name: value for name, value in requested.items() if value is not None}
    preferences = method == "dpo"
    if preferences:
        _check_preference_settings(requested, reward_model, reward_given)
        requested = {"mini_batch_size": requested.get("batch_size", TrainingConfig.batch_size)} | requested
    elif beta is not None:
        raise UnprocessableError("beta is a setting of method 'dpo': leave it out, or set the method", field="beta")
    config = TrainingConfig(**({"base_model": settings.base_model} | requested))
    check_server_settings(config)
    with database.read() as session:
        count = len(pairs_of(session, agent_id) if preferences else scores_of(session, agent_id))
        if count < MINIMUM_FEEDBACK:
            raise UnprocessableError(
                f"{agent_id} has {count} {'preferences' if preferences else 'feedback samples'}, but training needs "
                f"{MINIMUM_FEEDBACK}: {MINIMUM_FEEDBACK - count} are missing"
            )
        start = start_from or newest_version(session, agent_id)
        parent = None if start == BASE else deployments.policy_of(session, agent_id, start)
        reward_model_path: str | None
        if reward_model == "retrain":
            reward_model_path = None
        elif reward_model == "reuse":
            if parent is None:
                raise UnprocessableError(
                    f"rewardModel: {agent_id} starts from the base model: there is none to reuse", field="reward_model"
                )
            reward_model_path = _reward_model_of(parent)
        else:
            reward_model_path = _reward_model_of(deployments.policy_of(session, agent_id, reward_model))
    reward_settings = {name: value for name, value in reward_given.items() if value is not None}
    if reward_settings and reward_model_path is not None:
        raise UnprocessableError(
            f"rewardModelConfig: these settings apply to a new reward model, but rewardModel {reward_model!r} trains "
            "none: "
            "leave out one of the two",
            field="reward_model_config",
        )
    start_path = parent.model_path if parent else None
    plan = Plan(
        asdict(config), start, start_path, reward_model_path, reward_settings, method, 0.1 if beta is None else beta
    )
    try:
        plan.reward_config  # noqa: B018 - making the settings checks them
    except InvalidArgumentError as error:
        raise UnprocessableError(f"rewardModelConfig: {error}", field=f"reward_model_config.{error.field}") from error
    return plan


def _reward_model_of(policy: Policy) -> str:
    if policy.reward_model_path is None:
        raise UnprocessableError(
            f"rewardModel: {policy.version} was trained on preferences and has none: use 'retrain', or name another "
            "version",
            field="reward_model",
        )
    return policy.reward_model_path


def _check_preference_settings(given: Mapping[str, Any], reward_model: str, reward_given: Mapping[str, Any]) -> None:
    """Refuse settings that have no effect on a training without rewards and sampling."""
    names = [name for name in given if name not in PREFERENCE_SETTINGS and given[name] != _default(name)]
    names += ["reward_model"] if reward_model != "retrain" else []
    names += ["reward_model_config"] if reward_given else []
    if names:
        raise UnprocessableError(
            f"{', '.join(map(to_camel, names))}: method 'dpo' trains on preferences, without reward model and "
            "sampling, so this has no effect: leave it out",
            field=names[0],
        )


def _default(name: str) -> Any:
    return TrainingConfig.__dataclass_fields__[name].default


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


def rows_of(session: Session, agent_id: str, plan: Plan) -> list[dict[str, Any]]:
    """Return what a plan trains on, oldest first: the preferences, or the scores."""
    if plan.method == "dpo":
        pairs = pairs_of(session, agent_id)
        return [{"prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected} for pair in pairs]
    scores = feedback_of(session, agent_id)
    return [{"prompt": row.prompt, "response": row.response, "score": row.score} for row in scores]


async def train(
    plan: Plan,
    feedbacks: Sequence[Mapping[str, Any]],
    folder: Path,
    server: TrainingServer,
    on_progress: Callable[[TrainingProgress], None],
) -> None:
    """Run a plan, continuing an earlier attempt in the same folder, which then has the result.

    Raises:
        gradwire.GradwireError: An error of the training server.
    """
    async with server.connection() as service:
        if plan.method == "dpo":
            await train_on_preferences(service, feedbacks, folder, plan.policy_config, plan.beta, on_progress)
            return
        trainer = RLHFTrainer(plan.policy_config, reward_config=plan.reward_config, service=service)
        await trainer.train_async(
            feedbacks, folder, plan.reward_model_path, on_progress=on_progress, progress_bar=False
        )
