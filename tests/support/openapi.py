"""Generated requests against an OpenAPI document."""

from __future__ import annotations

from typing import Any

import schemathesis
import schemathesis.specs.openapi.schemas  # else at first use: pytest parses it, which CPython bears in one thread only
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def survived(operation: Any, examples: int, **options: Any) -> int:
    """How many generated requests the operation answered as its document says; ``options`` go to each request."""
    count = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def survives(case: schemathesis.Case) -> None:
        nonlocal count
        count += 1
        case.call_and_validate(checks=CHECKS, **options)

    survives()
    return count
