"""The settings of a training, all off by default; needs ``gradwire[router]`` (pydantic, PyYAML, rich)."""

from __future__ import annotations

from typing import Annotated, Literal

from gradwire.extras import require

require("pydantic", "router", "gradwire.router.settings")

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator  # noqa: E402

from gradwire.router.world import LONGEST, RewardWeights  # noqa: E402

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Immutable settings; unknown keys are refused and types are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Rllm(Section):
    """The main switch."""

    enabled: bool = Field(default=False, description="nothing below takes effect while this is false")


class Rollout(Section):
    """Source of the steps: a synthetic world, no live traffic."""

    environments: PositiveInt = Field(default=1024, description="environments played at once")
    rollout_length: PositiveInt = Field(default=16, description="steps of each environment before an update")
    episode_length: PositiveInt = Field(
        default=LONGEST, description="most steps of a request: the planner's and its agents'"
    )
    workers: PositiveInt = Field(default=1, description="processes; changes the time, never the result")


class Weights(Section):
    """Weights of the reward; see RewardWeights."""

    quality: NonNegative = Field(default=1.0, description="weight of the answer's grade from 0 to 1")
    cost: NonNegative = Field(default=0.6, description="penalty on cost, larger for a small budget")
    latency: NonNegative = Field(default=0.4, description="penalty on time, larger for an urgent request")
    depth: NonNegative = Field(default=0.02, description="penalty per step")
    success: NonNegative = Field(default=1.0, description="bonus for a right answer")
    zero_when_wrong: bool = Field(default=False, description="a wrong answer earns 0 whatever it cost")

    def weights(self) -> RewardWeights:
        return RewardWeights(**self.model_dump())


class Trainer(Section):
    """PPO."""

    enabled: bool = Field(default=False, description="whether to train")
    updates: PositiveInt = Field(default=32, description="rounds of rollout and PPO; --updates")
    seed: Annotated[int, Field(ge=0)] = Field(
        default=0, description="two runs with one seed give the same files; --seed"
    )
    interactions: bool = Field(default=True, description="the policy also sees the products of two features")
    learning_rate: Positive = Field(default=0.05, description="of Adam")
    anneal_learning_rate: bool = Field(
        default=True, description="decays linearly to 0 over the updates; constant under the autopilot"
    )
    epochs: PositiveInt = Field(default=4, description="passes over the steps of a rollout")
    mini_batch_size: PositiveInt = Field(default=2048, description="rollout steps per optimizer step")
    gamma: Share = Field(default=1.0, description="discount per step")
    gae_lambda: Share = Field(default=0.95, description="lambda of generalised advantage estimation")
    clip_epsilon: Positive = Field(default=0.2, description="clip range of the policy's ratio")
    value_clip_epsilon: Positive | None = Field(default=0.5, description="clip range of the value; null: no clipping")
    value_coef: NonNegative = Field(default=0.5, description="weight of the value loss")
    entropy_coef: NonNegative = Field(default=0.002, description="weight of the entropy bonus, which keeps exploration")
    max_grad_norm: Positive = Field(default=0.5, description="gradient clipping norm")
    target_kl: Positive | None = Field(
        default=None, description="an update ends early beyond 1.5 times this; null: never"
    )
    normalize_advantages: bool = Field(
        default=True, description="scale advantages to mean 0 and variance 1 in each mini-batch"
    )
    reward_weights: Weights = Weights()


class Evaluation(Section):
    """Evaluation on held-out requests, the same each time."""

    enabled: bool = Field(default=False, description="measure while training")
    episodes: PositiveInt = Field(default=2000, description="requests per seed")
    interval: PositiveInt = Field(default=4, description="updates between two evaluations")
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = Field(
        default=[1001, 1002, 1003], description="seeds of the held-out requests"
    )


class Autopilot(Section):
    """Train in rounds until the reward stops improving. Needs evaluation and experiment."""

    enabled: bool = Field(default=False, description="replaces a fixed number of updates")
    updates_per_round: PositiveInt = Field(default=8, description="updates between two evaluations")
    patience: PositiveInt = Field(default=3, description="rounds without improvement before it stops")
    min_improvement: NonNegative = Field(
        default=0.001, description="minimum gain of the mean reward that counts as an improvement"
    )
    max_updates: PositiveInt = Field(default=256, description="the budget")


class Experiment(Section):
    """Files of the run."""

    enabled: bool = Field(default=False, description="write them")
    output_dir: Annotated[str, Field(min_length=1)] = Field(
        default="outputs/rllm/", description="history, policy, metadata, settings"
    )


class Logging(Section):
    """Events as JSON lines."""

    enabled: bool = Field(default=False, description="write them")
    destination: Annotated[str, Field(min_length=1)] = Field(default="logs/rllm.log", description="a file, appended to")


class Metrics(Section):
    """Metrics of every update, for a dashboard."""

    backend: Literal["none", "wandb", "tensorboard", "prometheus"] = Field(
        default="none", description="none, wandb, tensorboard or prometheus"
    )
    project: str = Field(default="gradwire-router", description="wandb's")
    entity: str | None = Field(default=None, description="wandb's")
    tags: list[str] = Field(default=[], description="wandb's")
    directory: str = Field(default="logs/rllm-tensorboard/", description="tensorboard's")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=9464, description="port of the prometheus backend on 127.0.0.1; 0: a free one"
    )


class Tracing(Section):
    """One span for the run and one for each of its parts."""

    enabled: bool = Field(default=False, description="send them")
    endpoint: str = Field(default="http://localhost:4317", description="OTLP over gRPC")


class Observability(Section):
    """Reporting."""

    logging: Logging = Logging()
    metrics: Metrics = Metrics()
    tracing: Tracing = Tracing()


class Hicra(Section):
    """Credit assignment before the advantages; see HICRACreditAssigner."""

    enabled: bool = Field(default=False, description="false: use the raw rewards")
    multiplier: Annotated[float, Field(allow_inf_nan=False)] = Field(default=1.0, description="weight of the credits")
    normalize: bool = Field(
        default=True, description="scale rewards to mean 0 and variance 1 over the steps of a rollout"
    )
    normalization_eps: Positive = Field(default=1e-8, description="added to the variance in the normalisation")

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, values: object) -> object:
        from gradwire.rl.hicra import build_hicra_from_dict

        if not isinstance(values, dict):
            return values
        unknown = sorted(set(values) - set(cls.model_fields) - {"planner_weight", "eps", "epsilon"})
        if unknown:
            return values  # pydantic reports them with their place
        try:
            built = build_hicra_from_dict({"enabled": False} | values)
        except TypeError as error:
            raise ValueError(str(error)) from None
        return {name: getattr(built, name) for name in cls.model_fields}


class RouterSettings(Section):
    """All settings of a training.

    Attributes:
        rllm, trainer: Both must be enabled for anything to happen.
        rollout, evaluation, autopilot, experiment, observability, hicra: The parts.
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
        """List the switches that disable training."""
        return [name for name in ("rllm", "trainer") if not getattr(self, name).enabled]
