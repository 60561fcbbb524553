"""A loss from a file of one's own, and what happens to a batch whose loss is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import gradwire
import pytest
from support.server import Server

pytestmark = pytest.mark.long

LOSS = '''
"""Negative log-likelihood times a factor a row: written by somebody who has only the documentation."""

from gradwire_losses.batch import Batch, Scores
from gradwire_losses.outputs import LossOutput, Mean, Term
from gradwire_losses.registry import FieldSpec, LossConfig, register_loss
from pydantic import Field


class Config(LossConfig):
    power: float = Field(1.0, ge=1, description="of the factor")


@register_loss(
    "factored_nll",
    config=Config,
    fields=(
        FieldSpec("input_ids", "int", ("[rows, tokens]",), "Ids.", required=True, ids=True),
        FieldSpec("factor", "float", ("[rows]",), "Of each row.", required=True),
    ),
    metrics={"mean_factor": "of the rows"},
    reference="nobody's",
    formula="-1/T sum_t f^power log p",
    streams=True,
)
def factored_nll(batch: Batch, scores: Scores, config: Config) -> LossOutput:
    """Weighs rows."""
    loss = -(batch.per_token("factor") ** config.power * scores.logprobs).sum()
    return LossOutput({"nll": Term(loss, batch.num_scored, "tokens")}, {"mean_factor": Mean.of(batch["factor"])})
'''

IDS = [[4, 5, 6], [7, 8, 9, 10]]


@pytest.fixture(scope="module")
def extended(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("own-losses")
    (folder / "mine.py").write_text(LOSS)
    server = Server(tiny_model_path, folder / "state", "--losses", str(folder / "mine.py")).start()
    yield server
    assert server.end() == 0


async def test_a_loss_from_a_file_is_listed_checked_and_trained_with(extended: Server) -> None:
    async with gradwire.connect(extended.address) as service:
        listed = {loss.name: loss for loss in await service.list_losses()}
        assert listed["factored_nll"].summary == "Weighs rows."
        run = await service.create_run("tiny", lora=2, seed=1)
        plain = await run.forward({"input_ids": IDS}, "causal_lm")
        mine = await run.forward_backward({"input_ids": IDS, "factor": [2.0, 2.0]}, "factored_nll", {"power": 2.0})
        assert plain.loss is not None
        assert mine.loss == pytest.approx(4 * plain.loss, rel=1e-5)
        assert mine["mean_factor"] == 2.0
        assert (await run.optim_step()).grad_norm > 0
        with pytest.raises(gradwire.InvalidBatchError, match="factor"):
            await run.forward_backward({"input_ids": IDS}, "factored_nll")


async def test_a_loss_that_is_not_finite_fails_by_row_or_is_left_out(extended: Server) -> None:
    good = {"input_ids": IDS, "factor": [1.0, 1.0]}
    bad = {"input_ids": IDS, "factor": [1.0, 1e30]}
    async with gradwire.connect(extended.address) as service:
        run = await service.create_run("tiny", lora=2, seed=1)
        alone = await service.create_run("tiny", lora=2, seed=1)
        with pytest.raises(gradwire.NonFiniteError) as caught:
            await run.forward_backward(bad, "factored_nll", {"power": 2.0})
        assert caught.value.row == 1

        run.forward_backward(good, "factored_nll")
        skipped = run.forward_backward(bad, "factored_nll", {"power": 2.0}, on_nonfinite="skip")
        step = run.optim_step(learning_rate=1e-2)
        alone.forward_backward(good, "factored_nll")
        assert (await step).grad_norm == (await alone.optim_step(learning_rate=1e-2)).grad_norm
        result = await skipped
        assert result.loss is not None and math.isnan(result.loss)
        assert "row 1" in result.warnings[0]

        run.forward_backward(bad, "factored_nll", {"power": 2.0}, on_nonfinite="skip")
        before = await run.compute_logprobs(IDS)
        assert (await run.optim_step(learning_rate=1e-2)).grad_norm == 0.0
        after = await run.compute_logprobs(IDS)
        assert [row.tolist() for row in before] == [row.tolist() for row in after]
