"""Curves as the console reduces them."""

from __future__ import annotations

import numpy as np
import pytest
from gradwire import History
from gradwire_console.alerts import Recent
from gradwire_console.series import CURVE_POINTS, Record, Records, min_max, smoothed


def history(count: int, start: int = 0, run_id: str = "run") -> History:
    n = np.arange(start, start + count)
    kind = np.where(n % 2, "optim_step", "forward_backward").astype(object)
    nan = np.full(count, np.nan)
    return History(
        step=(n + 1) // 2, operation=kind, loss=np.where(n % 2, np.nan, 1.0 / (n + 1)),
        metrics={"accuracy": np.where(n % 2, np.nan, n / 10)}, learning_rate=np.where(n % 2, 0.1, np.nan),
        grad_norm=nan,
        tokens=np.where(n % 2, 0, 7), seconds=np.ones(count), loss_fn=kind, time=n.astype(float),
        run_id=np.array([run_id] * count, object), seq=n + 1,
    )  # fmt: skip


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


def test_a_record_grows_without_repeating_what_it_has() -> None:
    record = Record(history(10))
    record.append(history(6, start=6))
    whole = Record(history(12))
    assert len(record) == 12 and record.metrics == whole.metrics == ["loss", "learning_rate", "accuracy"]
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
    recent, record = Recent(), Record(history(480))
    for start in range(0, 480, 60):
        recent.append(history(60, start))
    assert recent.non_finite == record.non_finite == 240
    for metric in ("loss", "accuracy", "learning_rate", "none"):
        np.testing.assert_array_equal(recent.newest(metric, 100), record.newest(metric, 100))
