"""A training pass over a batch and an optimizer step, as the engine makes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gradwire_losses.batch import Batch
from gradwire_losses.registry import LossConfig, LossSpec
from gradwire_proto.v1.training_pb2 import OptimStep
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.scoring.planner import Budget
from gradwire_server.engine.state.engine_run import EngineRun
from gradwire_server.engine.training.accumulation import GradientAccumulator
from gradwire_server.engine.training.forward_backward import Training, forward_backward
from gradwire_server.engine.training.loss_call import LossCall
from gradwire_server.engine.training.loss_report import LossEvaluation
from gradwire_server.engine.training.optimizer import StepOutcome
from gradwire_server.engine.training.optimizer_step import RunStep, take_steps


def train_on(
    policy: Policy,
    batch: Batch,
    loss: LossSpec,
    config: LossConfig,
    accumulator: GradientAccumulator,
    *,
    outputs: Collection[str] = (),
    budget: Budget,
    dropout_seed: str = "",
    **compared: Any,
) -> LossEvaluation:
    """Compute a loss and add its gradient to the accumulator; ``compared`` is LossCall's reference and teacher."""
    on_batch = LossCall(loss, config, **compared).on(policy, batch, outputs)
    (found,) = forward_backward([Training(on_batch, accumulator, budget=budget, dropout_seed=dropout_seed)])
    assert found is not None
    return found


def take_step(run: EngineRun, settings: OptimStep) -> StepOutcome:
    """Take a run's optimizer step with its accumulated gradient."""
    (outcome,) = take_steps([RunStep(run.optimizer, run.accumulator, settings)])
    assert isinstance(outcome, StepOutcome)
    return outcome
