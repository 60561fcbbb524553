"""Bodies of requests and answers, in camelCase."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from fastapi import Path
from gradwire.errors import did_you_mean
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import InitErrorDetails, PydanticCustomError

from gradwire_feedback.names import AGENT_ID, RESERVED_AGENT_IDS, VERSION
from gradwire_feedback.settings import LIMITS

LARGEST_SEED = 2**53 - 1
"""The largest integer that every JSON parser reads exactly."""


class Body(BaseModel):
    """Base of all bodies: camelCase in JSON, snake_case in Python; unknown fields are refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_names(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Suggest the nearest name for an unknown field."""
        try:
            return handler(data)
        except ValidationError as error:
            known = [field.alias or name for name, field in cls.model_fields.items()]
            faults = []
            for each in error.errors():
                said, field = each["msg"], str(each["loc"][-1]) if each["loc"] else ""
                if each["type"] == "extra_forbidden":
                    said = f"there is no such field{did_you_mean(field, known)}"
                kind = PydanticCustomError("refused", "{said}", {"said": said})
                faults.append(InitErrorDetails(type=kind, loc=each["loc"], input=each["input"]))
            raise ValidationError.from_exception_data(error.title, faults) from None


def _storable(text: str) -> str:
    if "\0" in text:
        raise ValueError("the NUL character cannot be stored")
    return text


def _agent_id(text: str) -> str:
    if text in RESERVED_AGENT_IDS:
        raise ValueError(f"{text!r} is a path of the API and cannot be an agent's id")
    return text


AgentId = Annotated[
    str,
    Path(alias="agent_id", pattern=AGENT_ID, description="Letters, digits, '.', '_' and '-'; at most 100."),
    AfterValidator(_agent_id),
]
RatingId = Annotated[str, Path(alias="id", pattern=r"^[0-9a-f]{32}$", description="The id of a rating.")]
Version = Annotated[str, Path(pattern=VERSION, description="A trained version, as `v15`.")]
JobId = Annotated[str, Path(alias="id", pattern=r"^[0-9a-f]{32}$", description="The job id returned by train_policy.")]
Storable = AfterValidator(_storable)
# the length comes first: only then does pydantic refuse half a surrogate pair, which JSON can hold and UTF-8 cannot
Prompt = Annotated[str, StringConstraints(min_length=1, max_length=LIMITS.prompt_chars), Storable]
Response = Annotated[str, StringConstraints(max_length=LIMITS.response_chars), Storable]
Notes = Annotated[str, StringConstraints(max_length=LIMITS.notes_chars), Storable]
RunId = Annotated[str, StringConstraints(min_length=1, max_length=LIMITS.run_id_chars), Storable]
Name = Annotated[str, StringConstraints(max_length=LIMITS.name_chars), Storable]
ScoreValue = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]


class ErrorField(Body):
    """One wrong field of a request."""

    field: str
    message: str


class Problem(Body):
    """Why a request was refused."""

    detail: str
    errors: list[ErrorField] = []


class FeedbackIn(Body):
    """A person's score of an answer."""

    prompt: Prompt
    response: Response
    score: ScoreValue = Field(description="From 0 (bad) to 1 (excellent).")
    run_id: RunId = Field(
        description="Run id of the answer; with the id returned by generate, the score counts for its version."
    )
    notes: Notes | None = None


class FeedbackOut(Body):
    """A stored score."""

    id: str
    agent_id: str
    score: float
    created_at: datetime


class RevisionOut(Body):
    """A rating as it was before a change."""

    change: Literal["corrected", "withdrawn"]
    score: float
    notes: str | None
    by: str
    created_at: datetime


class RatingOut(Body):
    """A stored rating. `versions` were trained on it, as it was at that time."""

    id: str
    number: int
    prompt: str
    response: str
    score: float
    run_id: str
    notes: str | None
    version: str | None
    rater: str | None
    withdrawn: bool
    created_at: datetime
    history: list[RevisionOut]
    versions: list[str]


class CorrectionIn(Body):
    """Another score for a stored rating."""

    score: ScoreValue
    notes: Notes | None = Field(default=None, description="Replaces the note; kept if absent.")


class AnswerIn(Body):
    """A further answer to the same prompt, shown beside the first."""

    response: Response
    run_id: RunId | None = None


class ItemIn(Body):
    """An answer for people to rate on the page."""

    prompt: Prompt
    response: Response
    run_id: RunId | None = Field(default=None, description="Generated if absent.")
    others: Annotated[list[AnswerIn], Field(max_length=LIMITS.answers_per_item - 1)] = Field(
        default=[], description="Further answers, shown side by side."
    )
    ask: Literal["grades", "ranking"] = Field(
        default="grades", description="A grade of each answer, or which is better (the order of all)."
    )
    raters: Annotated[int, Field(ge=1, le=LIMITS.raters_per_item)] = Field(
        default=1, description="How many people are to rate it."
    )

    @model_validator(mode="after")
    def _has_answers_to_rank(self) -> Self:
        if self.ask == "ranking" and not self.others:
            raise ValueError("a ranking needs two answers or more: add others")
        answers = [self.response, *(other.response for other in self.others)]
        if self.ask == "ranking" and len(set(answers)) < len(answers):
            raise ValueError("two of the answers are the same, and nobody can say which is better: leave one out")
        return self


class ItemOut(Body):
    """An item that waits for raters."""

    id: str
    agent_id: str
    run_ids: list[str]
    raters: int
    created_at: datetime


class RankingIn(Body):
    """Answers to a prompt in the order that a person gave them; two are a pair."""

    prompt: Prompt
    responses: Annotated[list[Response], Field(min_length=2, max_length=LIMITS.answers_per_item)] = Field(
        description="Best first."
    )
    notes: Notes | None = None


class RankingOut(Body):
    """A stored ranking. `responses` are best first, with rising `ranks`; equal ranks are ties."""

    id: str
    number: int
    prompt: str
    responses: list[str]
    ranks: list[int]
    notes: str | None
    rater: str | None
    withdrawn: bool
    created_at: datetime


class PairOut(Body):
    """A preference between two answers, from a ranking or from two grades side by side."""

    prompt: str
    chosen: str
    rejected: str
    rater: str | None


class Metrics(Body):
    """Metrics of a version: the reward model's scores of its answers at the end of training; none after `dpo`."""

    feedback_count: int
    reward_mean: float | None
    reward_std: float | None


class PolicyOut(Body):
    """A trained version."""

    id: str
    agent_id: str
    version: str
    created_at: datetime
    metrics: Metrics


class SourceOut(Body):
    """Ratings of one source's answers. `wins`, `ties` and `losses` are against other sources, in rankings."""

    source: str
    scores: int
    mean: float | None
    wins: int
    ties: int
    losses: int


class AgentOut(Body):
    """An agent. A source is a version, or the model that a `runId` names before its last blank; "" for others."""

    agent_id: str
    waiting: int
    scores: int
    versions: int
    weights: dict[str, float]
    sources: list[SourceOut]


class DryRunOut(Body):
    """The estimated cost of a training."""

    status: Literal["dry_run"] = "dry_run"
    feedback_count: int
    estimated_steps: int
    estimated_time_minutes: float
    estimated_memory_gib: float
    score_mean: float | None
    score_std: float | None
    model_configuration: dict[str, Any] = Field(alias="modelConfig")


class RewardModelOut(Body):
    """A reward model on held-out ratings; `baselineError` is that of always predicting their mean."""

    num_ratings: int
    mean_squared_error: float
    baseline_error: float
    pearson: float | None
    spearman: float | None
    calibration_error: float


class PreferencesOut(Body):
    """A training on preferences, on the pairs that were held out."""

    pairs: int
    held_out: int
    before: dict[str, float]
    after: dict[str, float]


class ExampleOut(Body):
    """Answers to one prompt by the starting version and by the new one, with the predicted scores."""

    prompt: str
    before: str
    after: str
    before_score: float | None
    after_score: float | None


class ReportOut(Body):
    """The results of a training. Of its answers, `predictedReward` is the reward model's and `ratedReward` people's."""

    version: str
    method: Literal["ppo", "dpo"]
    started_from: str
    reward_model: RewardModelOut | None
    preferences: PreferencesOut | None
    predicted_reward: float | None
    rated_reward: float | None
    rated_answers: int
    curves: dict[str, list[float | None]]
    examples: list[ExampleOut]


class TrainedOut(Body):
    """A finished training."""

    status: Literal["trained"] = "trained"
    policy_id: str
    version: str
    model_path: str
    reward_model_path: str | None
    feedback_count: int
    training_steps: int
    reward_mean: float | None
    reward_std: float | None


class ProgressOut(Body):
    """The progress of a job: `reward_model`, then `policy`, then `export`; with `dpo` `preferences`, then `export`."""

    stage: str
    step: int
    total: int
    metrics: dict[str, float | None] = {}


class JobOut(Body):
    """A training job."""

    id: str
    agent_id: str
    status: Literal["queued", "running", "succeeded", "failed", "cancelled"]
    version: str | None = None
    progress: ProgressOut | None = None
    error: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: TrainedOut | None = None


class DeploymentOut(Body):
    """The deployed versions and their shares of the users."""

    agent_id: str
    weights: dict[str, float]


class GenerateIn(Body):
    """A prompt for the deployed version."""

    prompt: Prompt
    user_id: RunId | None = Field(default=None, description="Keeps this user on one version.")
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)] = 128
    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] | None = Field(
        default=None, description="Seed of the sampling: the same version and seed give the same answer."
    )


class GenerateOut(Body):
    """An answer; feedback with its `runId` counts for its version."""

    run_id: str
    agent_id: str
    version: str
    response: str


class VersionScores(Body):
    """A version's scores in the A/B test, and the users behind them; an answer without a user counts as one."""

    version: str
    weight: float
    count: int
    users: int
    mean: float | None
    interval: tuple[float, float]


class Difference(Body):
    """A version's mean score minus the baseline's, among answers of the same time and deployment."""

    baseline: str
    version: str
    difference: float | None
    interval: tuple[float, float]
    settled: bool
    better: str | None


class SampleRatio(Body):
    """Whether the versions were drawn in proportion to their weights, in every deployment of the test.

    The counts are those of the newest.
    """

    expected: dict[str, float]
    observed: dict[str, int]
    p_value: float
    ok: bool


class ComparisonOut(Body):
    """The newest A/B test of an agent. Its intervals stay valid however often you look."""

    agent_id: str
    since: datetime | None
    confidence: float
    versions: list[VersionScores]
    differences: list[Difference]
    sample_ratio: SampleRatio | None
    settled: bool
    verdict: str


class AgreementOut(Body):
    """The agreement of raters on the answers that several of them scored."""

    raters: int
    answers: int
    krippendorff_alpha: float | None
