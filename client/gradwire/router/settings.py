"""The settings of a training, all off by default; needs ``gradwire[router]`` (pydantic, PyYAML, rich)."""

from __future__ import annotations

from typing import Annotated, Literal

from gradwire.rl.extras import require

require("pydantic", "router", "gradwire.router.settings")

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator  # noqa: E402

from gradwire.router.world import LONGEST, RewardWeights  # noqa: E402

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Settings that cannot be changed, of which none is unknown and none is converted from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Rllm(Section):
    """The main switch."""

    enabled: bool = Field(False, description="nothing below happens while this is false")


class Rollout(Section):
    """Where the steps come from: a synthetic world, no live traffic."""

    environments: PositiveInt = Field(1024, description="played at once")
    rollout_length: PositiveInt = Field(16, description="steps of each environment before an update")
    episode_length: PositiveInt = Field(LONGEST, description="most steps of a request: the planner's and its agents'")
    workers: PositiveInt = Field(1, description="processes; changes the time, never the result")


class Weights(Section):
    """What an answer is worth; see RewardWeights."""

    quality: NonNegative = Field(1.0, description="of the answer's grade from 0 to 1")
    cost: NonNegative = Field(0.6, description="taken off, heavier where the budget is small")
    latency: NonNegative = Field(0.4, description="taken off, heavier where it is urgent")
    depth: NonNegative = Field(0.02, description="taken off for each step")
    success: NonNegative = Field(1.0, description="of a right answer")
    zero_when_wrong: bool = Field(False, description="a wrong answer earns 0 whatever it cost")

    def weights(self) -> RewardWeights:
        return RewardWeights(**self.model_dump())


class Trainer(Section):
    """PPO."""

    enabled: bool = Field(False, description="train at all")
    updates: PositiveInt = Field(32, description="rounds of rollout and PPO; --updates")
    seed: Annotated[int, Field(ge=0)] = Field(0, description="two runs with one seed give the same files; --seed")
    learning_rate: Positive = Field(0.02, description="of Adam")
    epochs: PositiveInt = Field(4, description="passes over the steps of a rollout")
    mini_batch_size: PositiveInt = Field(2048, description="steps of an optimizer step")
    gamma: Share = Field(1.0, description="discount of a step")
    gae_lambda: Share = Field(0.95, description="of generalised advantage estimation")
    clip_epsilon: Positive = Field(0.2, description="how far the policy's ratio may gain")
    value_clip_epsilon: Positive | None = Field(0.5, description="how far a value may move; null: as far as it likes")
    value_coef: NonNegative = Field(0.5, description="weight of the value's loss")
    entropy_coef: NonNegative = Field(0.002, description="weight of the entropy, which keeps exploring")
    max_grad_norm: Positive = Field(0.5, description="the gradient is scaled down to it")
    target_kl: Positive | None = Field(0.03, description="an update ends early beyond 1.5 times this; null: never")
    normalize_advantages: bool = Field(True, description="to mean 0 and variance 1 in each mini-batch")
    reward_weights: Weights = Weights()


class Evaluation(Section):
    """On requests held out of the training, the same each time."""

    enabled: bool = Field(False, description="measure while training")
    episodes: PositiveInt = Field(2000, description="requests a seed")
    interval: PositiveInt = Field(4, description="updates between two evaluations")
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(
        [1001, 1002, 1003], description="of the held-out requests"
    )


class Autopilot(Section):
    """Train in rounds until it no longer helps. Needs evaluation and experiment."""

    enabled: bool = Field(False, description="takes the place of a fixed number of updates")
    updates_per_round: PositiveInt = Field(8, description="between two evaluations")
    patience: PositiveInt = Field(3, description="rounds without improvement before it stops")
    min_improvement: NonNegative = Field(0.001, description="of the mean reward, to count as one")
    max_updates: PositiveInt = Field(256, description="the budget")


class Experiment(Section):
    """Files of the run."""

    enabled: bool = Field(False, description="write them")
    output_dir: Annotated[str, Field(min_length=1)] = Field(
        "outputs/rllm/", description="history, policy, metadata, settings; a candidate until it is promoted"
    )


class Logging(Section):
    """Events as JSON lines."""

    enabled: bool = Field(False, description="write them")
    destination: Annotated[str, Field(min_length=1)] = Field("logs/rllm.log", description="a file, appended to")


class Metrics(Section):
    """Figures of every update, for a dashboard."""

    backend: Literal["none", "wandb", "tensorboard", "prometheus"] = Field(
        "none", description="none, wandb, tensorboard or prometheus"
    )
    project: str = Field("gradwire-router", description="wandb's")
    entity: str | None = Field(None, description="wandb's")
    tags: list[str] = Field([], description="wandb's")
    directory: str = Field("logs/rllm-tensorboard/", description="tensorboard's")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(9464, description="prometheus's, on 127.0.0.1; 0: a free one")


class Tracing(Section):
    """A span for the run and one for each of its parts."""

    enabled: bool = Field(False, description="send them")
    endpoint: str = Field("http://localhost:4317", description="OTLP over gRPC")


class Observability(Section):
    """What is told to whom."""

    logging: Logging = Logging()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()


class Hicra(Section):
    """Credit assignment before the advantages; see HICRACreditAssigner."""

    enabled: bool = Field(False, description="false: the raw rewards are used")
    multiplier: Annotated[float, Field(allow_inf_nan=False)] = Field(1.0, description="weight of the credits")
    normalize: bool = Field(True, description="rewards to mean 0 and variance 1 over the steps of a rollout")
    normalization_eps: Positive = Field(1e-8, description="keeps the normalisation finite")

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, given: object) -> object:
        from gradwire.rl.hicra import build_hicra_from_dict

        if not isinstance(given, dict):
            return given
        unknown = sorted(set(given) - set(cls.model_fields) - {"planner_weight", "eps", "epsilon"})
        if unknown:
            return given  # pydantic names them, with their place
        try:
            built = build_hicra_from_dict({"enabled": False} | given)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return {name: getattr(built, name) for name in cls.model_fields}


class RouterSettings(Section):
    """Everything that a training takes.

    Attributes:
        rllm, trainer: both must be enabled for anything to happen.
        rollout, evaluation, autopilot, experiment, observability, hicra: the parts.
    """

    rllm: Rllm = Rllm()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    evaluation: Evaluation = Evaluation()
    autopilot: Autopilot = Autopilot()
    experiment: Experiment = Experiment()
    observability: Observability = Observability()
    hicra: Hicra = Hicra()

    @model_validator(mode="after")
    def _parts_that_need_others(self) -> RouterSettings:
        for part in ("evaluation", "experiment"):
            if self.autopilot.enabled and not getattr(self, part).enabled:
                raise ValueError(f"autopilot.enabled needs {part}.enabled: set it to true, or turn the autopilot off")
        return self

    def switched_off(self) -> list[str]:
        """The switches that keep a training from happening."""
        return [name for name in ("rllm", "trainer") if not getattr(self, name).enabled]
