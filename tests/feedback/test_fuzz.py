"""Whatever is sent to the API, it answers as its OpenAPI document says and never with a 5xx."""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance
from support.feedback import FeedbackService

EXAMPLES = 12
CHECKS = [not_a_server_error, status_code_conformance, response_schema_conformance]


def test_every_operation_survives_generated_requests(service: FeedbackService) -> None:
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", wait_for_schema=120)
    operations = [found.ok() for found in schema.get_all_operations()]
    # A stream has the same 404 as the job itself, and would be waited for.
    tried = [survived(each) for each in operations if not each.path.endswith("/events")]
    assert len(tried) >= 12 and min(tried) >= 2


def survived(operation: Any) -> int:
    """How many requests the operation answered as it should."""
    count = 0

    @settings(
        max_examples=EXAMPLES,
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
        case.call_and_validate(checks=CHECKS)

    survives()
    return count
