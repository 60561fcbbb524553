"""``gradwire estimate`` against the memory that an engine really takes, within 15 %."""

from __future__ import annotations

import pytest

from benchmarks.memory_cases import CASES, TOLERANCE, Case, compare


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_is_computed_is_what_is_measured(case: Case) -> None:
    if "nf4" in case.flags:
        pytest.importorskip("bitsandbytes", reason="needs gradwire[quantize]")
    figure = compare(case)
    assert abs(figure.value - 1) <= TOLERANCE, figure.detail
