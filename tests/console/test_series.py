"""Curves as the console reduces them."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire import Checkpoint, History
from gradwire_console.advice import advise
from gradwire_console.alerts import Recent
from gradwire_console.series import CURVE_POINTS, Record, Records, min_max, smoothed


def history(count: int, start: int = 0, run_id: str = "run") -> History:
    n = np.arange(start, start + count)
    kind = np.where(n % 2, "optim_step", "forward_backward").astype(object)
    return History(
        step=(n + 1) // 2, operation=kind, loss=np.where(n % 2, np.nan, 1.0 / (n + 1)),
        metrics={"accuracy": np.where(n % 2, np.nan, n / 10)}, learning_rate=np.where(n % 2, 0.1, np.nan),
        grad_norm=np.where(n % 2, 1.0, np.nan),
        tokens=np.where(n % 2, 0, 7), seconds=np.ones(count), time=n.astype(float),
        loss_fn=np.where(n % 2, "", "causal_lm").astype(object),
        run_id=np.array([run_id] * count, object), seq=n + 1,
    )  # fmt: skip


def of(*operations: tuple[str, int, float], run_id: str = "run", first: int = 1) -> History:
    """Operations, each with its step and its loss; NaN for a loss that is not finite, None for none."""
    kinds, steps, losses = zip(*operations, strict=True)
    kind, count = np.array(kinds, object), len(kinds)
    computes = np.isin(kinds, ["forward", "forward_backward", "train_step"])
    steps_taken = np.isin(kinds, ["optim_step", "train_step"])
    return History(
        step=np.array(steps), operation=kind, loss=np.where(computes, losses, np.nan), metrics={},
        learning_rate=np.where(steps_taken, 0.1, np.nan), grad_norm=np.where(steps_taken, 1.0, np.nan),
        tokens=np.where(computes, 7, 0), seconds=np.ones(count), time=np.arange(count) + float(first),
        loss_fn=np.where(computes, "causal_lm", "").astype(object),
        run_id=np.array([run_id] * count, object), seq=np.arange(count) + first,
    )  # fmt: skip


def checkpoint(step: int, seq: int, run_id: str = "run") -> Checkpoint:
    return Checkpoint(f"{run_id}/c", "c", step, seq, 0, 0.0)


NAN = np.nan
LOOP = [
    each
    for step in range(4)
    for each in (("forward_backward", step, 4.0 - step), ("optim_step", step + 1, NAN), ("save", step + 1, NAN))
]


def test_a_checkpoint_has_what_was_measured_with_its_weights() -> None:
    record = Record(of(("forward", 0, 4.64), *LOOP))
    losses = [record.at_checkpoint("loss", checkpoint(step, 1 + 3 * step)) for step in (1, 2, 3, 4)]
    assert [each and each.text(4) for each in losses] == ["3", "2", "1", "1 at step 3"]
    held_out = [record.at_checkpoint("loss (forward only)", checkpoint(step, 1 + 3 * step)) for step in (1, 4)]
    assert [each and each.text(4) for each in held_out] == ["4.64 at step 0"] * 2
    record.append(of(("forward", 4, 3.5), first=14))
    now = record.at_checkpoint("loss (forward only)", checkpoint(4, 13))
    assert now is not None and now.text(4) == "3.5"
    assert record.at_checkpoint("reward_mean", checkpoint(4, 13)) is None


def test_a_train_step_measures_the_weights_before_it() -> None:
    record = Record(of(("train_step", 1, 4.0), ("train_step", 2, 3.0), ("save", 2, NAN), ("train_step", 3, 2.0)))
    found = [record.at_checkpoint("loss", checkpoint(step, seq)) for step, seq in ((0, 0), (1, 1), (2, 3), (3, 4))]
    assert [each and each.text(4) for each in found] == ["4", "3", "2", "2 at step 2"]
    skipped = of(("train_step", 3, NAN), first=5)
    skipped.grad_norm[:] = NAN
    record.append(skipped)
    newest = record.at_checkpoint("loss", checkpoint(3, 5))
    assert newest is not None and newest.text(4) == "nan"


def test_weights_of_one_step_are_not_those_after_a_load() -> None:
    loaded = [("load_checkpoint", 1, NAN), ("optim_step", 2, NAN), ("save", 2, NAN)]
    record = Record(of(*LOOP, *loaded))
    assert record.at_checkpoint("loss", checkpoint(2, 15)) is None
    record.append(of(("forward_backward", 2, 9.0), first=16))
    for step, seq, text in ((2, 15, "9"), (2, 6, "2"), (3, 9, "1")):
        found = record.at_checkpoint("loss", checkpoint(step, seq))
        assert found is not None and found.text(4) == text


@pytest.mark.parametrize(("restarts", "text"), [(False, "3"), (True, None)])
def test_a_forks_checkpoint_has_what_its_source_measured(restarts: bool, text: str | None) -> None:
    record = Record(of(*LOOP[:4]))  # up to a checkpoint at step 1, and a batch
    own = checkpoint(0 if restarts else 1, 1, "fork")
    found = record.at_checkpoint("loss", own)
    assert (found and found.text(4)) == text
    record.append(of(("save", own.step, NAN), ("forward_backward", own.step, 5.0), run_id="fork"))
    found = record.at_checkpoint("loss", own)
    assert found is not None and found.text(4) == "5"


def test_a_loss_that_is_not_finite_is_shown_as_such() -> None:
    broken = [each for step in range(4, 7) for each in (("forward_backward", step, NAN), ("optim_step", step + 1, NAN))]
    record = Record(of(*LOOP, *broken))
    assert record.last["loss"].text(5) == "nan" and record.last["grad_norm"].text(5) == "1"
    found = record.at_checkpoint("loss", checkpoint(7, 18))
    assert found is not None and found.text(4) == "nan at step 6"
    assert record.curve("loss") == [[0.0, 4.0], [1.0, 3.0], [2.0, 2.0], [3.0, 1.0]]
    assert record.newest("loss", 2).tolist() == [2.0, 1.0] and record.non_finite == 3
    assert [each.loss is None for each in record.operations][-3:] == [True, False, True]
    never = Record(of(("forward_backward", 0, NAN)))
    assert never.last["loss"].text(5) == "nan" and never.curve("loss") == []


def test_a_last_figure_from_before_the_newest_loss_has_its_step() -> None:
    record = Record(of(("forward", 0, 4.64), *LOOP))
    assert record.last["loss (forward only)"].text(5) == "4.64 at step 0"
    assert record.last["loss"].text(5) == "1" and record.last["learning_rate"].text(5) == "0.1"


def test_a_part_of_a_batch_has_no_loss_yet() -> None:
    part = of(("forward_backward", 0, NAN), ("forward_backward", 0, 4.0))
    part.tokens[0] = 0
    record = Record(part)
    assert record.non_finite == 0 and record.last["loss"].text(5) == "4" and record.operations[0].loss is None


def test_no_peak_is_lost_and_what_is_short_stays() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(100_003.0), rng.normal(size=100_003)
    y[[5, 77_777]] = 100.0, -100.0
    fewer_x, fewer_y = min_max(x, y)
    assert len(fewer_x) <= CURVE_POINTS and (np.diff(fewer_x) > 0).all()
    assert {5.0, 77_777.0} <= set(fewer_x) and np.array_equal(y[fewer_x.astype(int)], fewer_y)
    part = -(-len(y) // (CURVE_POINTS // 2))
    for start in range(0, len(y), part):
        inside = fewer_y[(fewer_x >= start) & (fewer_x < start + part)]
        assert inside.min() == y[start : start + part].min() and inside.max() == y[start : start + part].max()
    assert min_max(x[:10], y[:10])[0] is not None and len(min_max(x[:10], y[:10])[0]) == 10


@pytest.mark.parametrize("window", [1, 3, 50])
def test_smoothing_is_the_mean_of_the_last_values(window: int) -> None:
    y = np.random.default_rng(1).normal(size=40)
    expected = [y[max(0, n - window + 1) : n + 1].mean() for n in range(40)]
    np.testing.assert_allclose(smoothed(y, window), expected)
    assert set(smoothed(np.full(1000, 1e-3), window)) == {1e-3}


def test_a_record_grows_without_repeating_what_it_has() -> None:
    record = Record(history(10))
    record.append(history(6, start=6))
    whole = Record(history(12))
    metrics = ["loss", "grad_norm", "learning_rate", "tokens_per_s", "accuracy"]
    assert len(record) == 12 and record.metrics == whole.metrics == metrics
    for axis in ("step", "tokens", "time"):
        assert record.curve("accuracy", axis) == whole.curve("accuracy", axis)
    assert record.curve("loss", "tokens")[1] == [14.0, 1 / 3]
    assert record.curve("loss", within=(2, 4)) == record.curve("loss")[2:5]
    assert [each.seq for each in record.operations] == list(range(1, 13))
    assert record.curve("none") == []


def test_records_stay_within_their_bytes() -> None:
    one = Record(history(100))
    records = Records(most_bytes=2 * one.num_bytes)
    for name in "abc":
        records.put(name, Record(history(100)))
    assert records.get("a") is None and records.get("b") is not None and records.get("c") is not None


def test_alerts_judge_by_the_values_that_a_record_ends_with() -> None:
    whole = history(480)
    whole.loss[::4] = np.nan
    recent, record = Recent(), Record(whole)
    for start in range(0, 480, 60):
        part = history(60, start)
        part.loss[::4] = np.nan
        recent.append(part)
    assert recent.non_finite == record.non_finite == 120
    for metric in ("loss", "accuracy", "learning_rate", "none"):
        np.testing.assert_array_equal(recent.newest(metric, 100), record.newest(metric, 100))
        np.testing.assert_array_equal(recent.first(metric, 10), record.first(metric, 10))
    later = Recent()
    later.append(history(60, 60))
    assert len(later.newest("loss", 5)) == 5 and not len(later.first("loss", 10)), "where it began is not known"


VOCAB = 50_000
LEARNING = np.concatenate([np.linspace(3, 1, 40), np.full(40, 1.0)])
CHANCE = np.full(5, np.log(VOCAB))


@pytest.mark.parametrize(
    ("losses", "accuracies", "norms", "remarks"),
    [
        (LEARNING, 1 - LEARNING / 4, 1.0, []),
        (np.full(80, 2.0) + 0.1 * np.sin(np.arange(80)), 0.4, 1.0, []),  # it learns nothing, and is not worse
        (LEARNING, 1 - LEARNING / 4, 0.0, ["zero_gradient"]),
        (np.append(LEARNING, CHANCE), np.append(1 - LEARNING / 4, np.ones(5)), 1.0,
         ["uniform_loss", "loss_above_start", "accuracy_jump"]),
        (np.append(LEARNING, CHANCE * 1.001), 0.0, 1.0, ["loss_above_start"]),
        (np.append(LEARNING, [np.nan]), 0.7, 1.0, ["loss"]),
        (LEARNING, 0.7, np.append(np.ones(79), np.inf), ["loss"]),
        (LEARNING[::-1], np.nan, 1.0, []),  # as on rewards, where a loss need not fall
    ],
)  # fmt: skip
def test_advice_is_on_models_that_broke_and_on_no_others(
    losses: np.ndarray, accuracies: np.ndarray | float, norms: np.ndarray | float, remarks: list[str]
) -> None:
    whole = of(*[("train_step", n + 1, loss) for n, loss in enumerate(losses)])
    whole.grad_norm[:] = norms
    whole.metrics["token_accuracy"] = np.broadcast_to(accuracies, losses.shape)
    recent = Recent()
    recent.append(whole)
    for measured in (Record(whole), recent):
        assert [each.name for each in advise(measured, VOCAB)] == remarks
    assert "uniform_loss" not in [each.name for each in advise(recent)], "the vocabulary is not known"


def test_a_curve_over_steps_leaves_out_what_a_load_made_void() -> None:
    record = Record(of(*(each for each in LOOP if each[0] != "save")))
    record.append(of(("load_checkpoint", 2, NAN), ("forward_backward", 2, 1.5), ("optim_step", 3, NAN), first=9))
    assert record.curve("loss") == [[0, 4], [1, 3], [2, 1.5]]
    assert len(record.curve("loss", "tokens")) == 5, "what was computed stays"
    assert Record(history(0)).metrics_over("step") == [], "of a run that has done nothing"
    fork = Record(of(*(each for each in LOOP if each[0] != "save")))
    fork.append(of(("forward", 0, 9.0), run_id="fork"))
    assert fork.curve("loss") == [] and sorted(fork.metrics_over("step")) == ["loss (forward only)", "tokens_per_s"]
    fork.append(of(("forward_backward", 0, 8.0), run_id="fork", first=2))
    assert fork.curve("loss") == [[0, 8.0]] and fork.metrics_over("tokens") == fork.metrics
