"""Answers of the deployed versions, stored so that feedback is assigned to its version."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from gradwire_feedback.database.connection import Database
from gradwire_feedback.database.tables import new_id
from gradwire_feedback.names import BASE
from gradwire_feedback.settings import Settings
from gradwire_feedback.store import deployments, rating
from gradwire_feedback.training.server import TrainingServer

TOP_K, TOP_P = 50, 0.95
"""The same as in training."""


@dataclass(frozen=True)
class GeneratedAnswer:
    """An answer; feedback refers to it by its run id."""

    run_id: str
    version: str
    response: str


async def generate_answer(
    database: Database,
    server: TrainingServer,
    settings: Settings,
    agent_id: str,
    prompt: str,
    *,
    user_id: str | None,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
) -> GeneratedAnswer:
    """Answer with a version drawn by weight, always the same one for a user, and queue the answer for raters.

    Raises:
        gradwire.GradwireError: The training server refuses the prompt, or cannot be reached.
    """
    run_id = new_id()

    def choose() -> tuple[int | None, str, str]:
        with database.read() as session:
            newest = deployments.newest_deployment(session, agent_id)
            if newest is None:
                return None, BASE, settings.base_model
            version = deployments.draw_version(newest.weights, agent_id, user_id or run_id)
            if version == BASE:
                return newest.number, version, settings.base_model
            return newest.number, version, deployments.policy_of(session, agent_id, version).checkpoint

    deployment, version, model = await run_in_threadpool(choose)
    response = await server.complete(
        model, prompt, max_tokens=max_new_tokens, temperature=temperature, top_k=TOP_K, top_p=TOP_P, seed=seed
    )

    def remember() -> None:
        with database.write() as session:
            answer = rating.NewAnswer(run_id, response, version)
            rating.add_item(session, agent_id, prompt, [answer], settings.raters_per_item, user_id, deployment)

    await run_in_threadpool(remember)
    return GeneratedAnswer(run_id, version, response)
