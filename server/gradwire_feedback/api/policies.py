"""Versions of an agent: list, deploy, generate, compare and roll back."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body
from starlette.concurrency import run_in_threadpool

from gradwire_feedback.api.access import Rater, Reader, TheContext, Trainer
from gradwire_feedback.api.bodies import CountedRoute
from gradwire_feedback.api.errors import PROBLEMS
from gradwire_feedback.api.schemas import (
    AgentId,
    AgentOut,
    ComparisonOut,
    DeploymentOut,
    Difference,
    ExampleOut,
    GenerateIn,
    GenerateOut,
    Metrics,
    Name,
    PolicyOut,
    PreferencesOut,
    ReportOut,
    RewardModelOut,
    SampleRatio,
    SourceOut,
    Version,
    VersionScores,
)
from gradwire_feedback.names import version_folder
from gradwire_feedback.store import deployments
from gradwire_feedback.store.agents import agents_of
from gradwire_feedback.store.comparison import ALPHA, compare
from gradwire_feedback.store.feedback import rated_by_version
from gradwire_feedback.store.sources import rated_by_source
from gradwire_feedback.training.generation import generate_answer
from gradwire_feedback.training.report import finite, read_report

router = APIRouter(prefix="/api/policies", tags=["policies"], responses=PROBLEMS, route_class=CountedRoute)


@router.get("")
def list_agents(context: TheContext, caller: Reader) -> list[AgentOut]:
    """Lists the agents by name, with what people said of the answers of each version and model."""
    with context.database.read() as session:
        return [
            AgentOut(
                agent_id=agent.name, waiting=agent.waiting, scores=agent.scores, versions=agent.versions,
                weights=agent.weights,
                sources=[
                    SourceOut(
                        source=source, scores=each.scores, mean=each.mean if each.scores else None,
                        wins=each.wins, ties=each.ties, losses=each.losses,
                    )
                    for source, each in sorted(rated_by_source(session, agent.name).items())
                ],
            )
            for agent in agents_of(session)
        ]  # fmt: skip


@router.get("/{agent_id}")
def list_policies(agent_id: AgentId, context: TheContext, caller: Reader) -> list[PolicyOut]:
    """Lists the agent's trained versions, oldest first."""
    with context.database.read() as session:
        return [
            PolicyOut(
                id=policy.id,
                agent_id=agent_id,
                version=policy.version,
                created_at=policy.created_at,
                metrics=Metrics(
                    feedback_count=policy.feedback_count,
                    reward_mean=policy.reward_mean,
                    reward_std=policy.reward_std,
                ),
            )
            for policy in deployments.policies_of(session, agent_id)
        ]


@router.get("/{agent_id}/deployment")
def get_deployment(agent_id: AgentId, context: TheContext, caller: Reader) -> DeploymentOut:
    """Returns the deployed versions; only `base` before the first deployment."""
    with context.database.read() as session:
        return DeploymentOut(agent_id=agent_id, weights=deployments.deployment_of(session, agent_id))


@router.put("/{agent_id}/deployment")
def put_deployment(
    agent_id: AgentId,
    weights: Annotated[dict[Name, float], Body(examples=[{"v15": 0.5, "v25": 0.5}])],
    context: TheContext,
    caller: Trainer,
) -> DeploymentOut:
    """Deploys versions, each for its share of the users: weights sum to 1, `base` is the untrained model."""
    with context.database.write() as session:
        return DeploymentOut(agent_id=agent_id, weights=deployments.deploy(session, agent_id, weights))


@router.post("/{agent_id}/rollback")
def roll_back(agent_id: AgentId, context: TheContext, caller: Trainer) -> DeploymentOut:
    """Deploys only the version before the newest deployed one."""
    with context.database.write() as session:
        return DeploymentOut(agent_id=agent_id, weights=deployments.roll_back(session, agent_id))


@router.post("/{agent_id}/generate")
async def generate(agent_id: AgentId, request: GenerateIn, context: TheContext, caller: Rater) -> GenerateOut:
    """Answers a prompt with a version drawn by weight; a `userId` always gets the same version."""
    answer = await generate_answer(
        context.database,
        context.server,
        context.settings,
        agent_id,
        request.prompt,
        user_id=request.user_id,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
    )
    return GenerateOut(run_id=answer.run_id, agent_id=agent_id, version=answer.version, response=answer.response)


@router.get("/{agent_id}/versions/{version}/report")
def get_report(agent_id: AgentId, version: Version, context: TheContext, caller: Reader) -> ReportOut:
    """Returns what a version's training did: the reward model's quality, the curves, examples before and after."""
    return report_of(context, agent_id, version)


def report_of(context: TheContext, agent_id: str, version: str) -> ReportOut:
    with context.database.read() as session:
        policy = deployments.policy_of(session, agent_id, version)
        rated_answers, rated = rated_by_version(session, agent_id).get(version, (0, None))
    report_file = read_report(version_folder(context.settings.models_dir, agent_id, version), policy.method)
    report, preferences = report_file.reward_model, report_file.preferences
    return ReportOut(
        version=version,
        method=policy.method,  # type: ignore[arg-type]  # only training.jobs writes it
        started_from=policy.parent,
        reward_model=None if report is None else RewardModelOut(
            num_ratings=report.num_ratings, mean_squared_error=report.mean_squared_error,
            baseline_error=report.baseline_error, pearson=finite(report.pearson), spearman=finite(report.spearman),
            calibration_error=report.calibration_error,
        ),
        preferences=None if preferences is None else PreferencesOut(
            pairs=preferences.pairs, held_out=preferences.held_out, before=preferences.before, after=preferences.after
        ),
        predicted_reward=policy.reward_mean,
        rated_reward=rated,
        rated_answers=rated_answers,
        curves={name: [finite(value) for value in values] for name, values in report_file.curves.items()},
        examples=[ExampleOut(**vars(each)) for each in report_file.examples],
    )  # fmt: skip


@router.get("/{agent_id}/comparison")
async def get_comparison(agent_id: AgentId, context: TheContext, caller: Reader) -> ComparisonOut:
    """Compares the versions of the newest A/B deployment by the scores of their answers.

    The intervals are confidence sequences: you may look after every rating and stop when `settled` is true.
    """
    return await run_in_threadpool(comparison_of, context, agent_id)


def comparison_of(context: TheContext, agent_id: str) -> ComparisonOut:
    with context.database.read() as session:
        observed = deployments.observe(session, agent_id)
    if observed is None:
        return ComparisonOut(
            agent_id=agent_id, since=None, confidence=1 - ALPHA, versions=[], differences=[], sample_ratio=None,
            settled=False, verdict="Deploy two versions at once to compare them.",
        )  # fmt: skip
    comparison = compare(observed)
    return ComparisonOut(
        agent_id=agent_id,
        since=observed.since,
        confidence=1 - ALPHA,
        versions=[
            VersionScores(
                version=each.version, weight=each.weight, count=each.count, users=each.users, mean=each.mean,
                interval=(each.interval.low, each.interval.high),
            )
            for each in comparison.versions
        ],
        differences=[
            Difference(
                baseline=each.baseline, version=each.version, difference=each.difference,
                interval=(each.interval.low, each.interval.high), settled=each.better is not None, better=each.better,
            )
            for each in comparison.differences
        ],
        sample_ratio=SampleRatio(
            expected=observed.weights, observed=observed.stages[-1].units,
            p_value=comparison.sample_ratio_p, ok=comparison.sample_ratio_ok,
        ),
        settled=comparison.settled,
        verdict=comparison.verdict,
    )  # fmt: skip
