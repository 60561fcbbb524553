"""Learning rates by the step."""

from __future__ import annotations

from gradwire.schedules import constant, cosine, linear, wsd
from pytest import approx


def test_the_warm_up_rises_to_the_peak() -> None:
    for schedule in (
        lambda step: constant(step, peak=2.0, warmup=4),
        lambda step: linear(step, peak=2.0, total=100, warmup=4),
        lambda step: cosine(step, peak=2.0, total=100, warmup=4),
        lambda step: wsd(step, peak=2.0, total=100, decay=10, warmup=4),
    ):
        assert [schedule(step) for step in range(5)] == approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert constant(0, peak=2.0) == 2.0


def test_each_ends_where_it_should() -> None:
    assert [linear(step, peak=1.0, total=10, final=0.5) for step in (0, 5, 10, 99)] == approx([1, 0.75, 0.5, 0.5])
    assert [cosine(step, peak=1.0, total=10) for step in (0, 5, 10, 99)] == approx([1, 0.5, 0, 0])
    assert cosine(2, peak=1.0, total=12, warmup=2, final=0.2) == approx(1.0)
    assert [wsd(step, peak=1.0, total=10, decay=4) for step in (0, 6, 8, 10)] == approx([1, 1, 0.5, 0])
