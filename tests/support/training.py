"""A training pass over a batch, its scores, and an optimizer step, as the engine makes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gradwire_losses.batch import Batch
from gradwire_losses.registry import LossConfig, LossSpec
from gradwire_proto.v1.training_pb2 import OptimStep
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.operations.scores import evaluate
from gradwire_server.engine.scoring.forward import Scoring
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.step import checked, pass_over
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.loss_report import LossEvaluation
from gradwire_server.engine.training.optimizer import StepOutcome
from gradwire_server.engine.training.optimizer_step import RunStep, take_steps


def train_on(
    policy: Policy,
    batch: Batch,
    loss: LossSpec,
    config: LossConfig,
    accumulator: GradientAccumulator,
    **asked: Any,
) -> LossEvaluation:
    """Compute a loss and add its gradient to the accumulator; ``asked`` as of :func:`.step.checked`."""
    (passed,) = pass_over([checked(loss, config, policy, batch, **asked)])
    assert passed is not None
    accumulator.merge(passed.gradients, passed.counts, norm=passed.norm)
    return passed.report


def scores_on(
    policy: Policy,
    batch: Batch,
    loss: LossSpec | None = None,
    config: LossConfig | None = None,
    *,
    outputs: Collection[str] = (),
    temperature: float = 1.0,
    budget: Budget,
    **asked: Any,
) -> LossEvaluation:
    """Compute scores, and a loss if given, without gradients; ``asked`` as of :func:`.step.checked`."""
    if loss is None:
        return evaluate(Scoring(policy, batch, outputs, temperature, None, budget), outputs=outputs)
    step = checked(loss, config or loss.config(), policy, batch, outputs=outputs, budget=budget, **asked)
    return evaluate(step.scoring, step, outputs=outputs)


def take_step(run: EngineRun, settings: OptimStep) -> StepOutcome:
    """Take a run's optimizer step with its accumulated gradient."""
    (outcome,) = take_steps([RunStep(run.optimizer, run.accumulator, settings)])
    assert isinstance(outcome, StepOutcome)
    return outcome
