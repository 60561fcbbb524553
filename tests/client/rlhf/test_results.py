"""Results as JSON and as a plot, and the report of a reward model against other people's statistics."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from gradwire import InvalidArgumentError
from gradwire.rlhf import TrainingResult
from gradwire.rlhf.ppo import AdaptiveKL
from gradwire.rlhf.reward_training import evaluate
from gradwire.rlhf.trainer import final_reward


def result(**changes: object) -> TrainingResult:
    report = evaluate([0.1, 0.4, 0.35, 0.9], [0.0, 0.5, 0.5, 1.0], 0.5)
    values: dict[str, object] = {
        "model_path": "out/policy", "reward_model_path": None, "feedback_count": 15, "final_reward_mean": 0.8,
        "final_reward_std": 0.1, "training_steps": 3, "reward_history": [0.5, 0.6, 0.8], "kl_history": [0.0, 0.4, 0.9],
        "loss_history": [0.1, math.nan, 0.05], "value_error_history": [1.0, 0.5, 0.4], "reward_model_report": report,
    }  # fmt: skip
    return TrainingResult(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", ["", "training_results.json", "other.json"])
def test_a_result_is_read_as_it_was_written(tmp_path: Path, place: str) -> None:
    written = result().save(tmp_path / place)
    assert written.name == (place or "training_results.json")
    json.loads(written.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = TrainingResult.load(tmp_path / place)
    assert math.isnan(read.loss_history[1])
    assert TrainingResult(**{**vars(read), "loss_history": []}) == TrainingResult(
        **{**vars(result()), "loss_history": []}
    )


def test_what_is_no_result_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        TrainingResult.load(tmp_path)
    for text in ("{", "[]", '{"model_path": "x"}'):
        (tmp_path / "training_results.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match="not a training result"):
            TrainingResult.load(tmp_path)


def test_the_plot_has_four_curves(tmp_path: Path) -> None:
    matplotlib.use("agg")
    figure = result().plot(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    drawn = {axis.get_title().split(" (")[0]: list(axis.lines[0].get_ydata()) for axis in figure.axes}
    assert drawn["reward"] == [0.5, 0.6, 0.8]
    assert drawn["KL to the initial policy"] == [0.0, 0.4, 0.9]
    assert drawn["value error"] == [1.0, 0.5, 0.4]
    assert len(drawn) == 4
    assert result().plot() is not None


@pytest.mark.parametrize("seed", range(4))
def test_the_report_agrees_with_the_standard_library(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ratings = np.round(rng.random(37) * 10) / 10  # with ties
    guesses = ratings + rng.normal(0, 0.3, 37)
    report = evaluate(guesses, ratings, 0.4)
    assert report.num_ratings == 37
    assert report.pearson == pytest.approx(statistics.correlation(guesses.tolist(), ratings.tolist()))
    ranked = [[sum(b < a for b in side) + sum(b == a for b in side) / 2 for a in side] for side in (guesses, ratings)]
    assert report.spearman == pytest.approx(statistics.correlation(*ranked), abs=1e-12)
    assert report.mean_squared_error == pytest.approx(statistics.fmean((g - r) ** 2 for g, r in zip(guesses, ratings)))
    assert report.baseline_error == pytest.approx(statistics.fmean((0.4 - r) ** 2 for r in ratings))
    assert sum(each.count for each in report.bins) == 37
    predicted = [each.predicted for each in report.bins]
    assert predicted == sorted(predicted)
    assert sum(each.predicted * each.count for each in report.bins) / 37 == pytest.approx(guesses.mean())
    assert sum(each.observed * each.count for each in report.bins) / 37 == pytest.approx(ratings.mean())


def test_the_report_of_a_constant_has_no_correlation() -> None:
    report = evaluate([0.5, 0.5, 0.5], [0.0, 0.5, 1.0], 0.5)
    assert math.isnan(report.pearson)
    assert math.isnan(report.spearman)
    assert math.isnan(evaluate([0.3], [0.2], 0.5).pearson)


def test_the_price_of_kl_rises_above_the_target_and_falls_below_it() -> None:
    controller = AdaptiveKL(0.2, 6.0)
    assert controller.after(6.0).coef == 0.2
    assert controller.after(6.6).coef == pytest.approx(0.2 * (1 + 0.1 * 0.1))
    assert controller.after(600).coef == pytest.approx(0.2 * 1.02)
    assert controller.after(-5).coef == pytest.approx(0.2 * 0.98)
    assert AdaptiveKL(0.2, None).after(600).coef == 0.2


def test_the_final_reward_is_over_all_answers_of_the_last_tenth() -> None:
    rng = np.random.default_rng(0)
    scores = rng.random((20, 8))
    history = [{"rewards/score": row.mean(), "train/score_std": row.std()} for row in scores]
    mean, std = final_reward(history)
    assert mean == pytest.approx(scores[-2:].mean())
    assert std == pytest.approx(scores[-2:].std())
    assert final_reward(history[:3])[0] == pytest.approx(scores[2].mean())
