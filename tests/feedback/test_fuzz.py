"""Whatever is sent to the API, it answers as its OpenAPI document says and never with a 5xx."""

from __future__ import annotations

import schemathesis
from support.feedback import FeedbackService
from support.openapi import survived

EXAMPLES = 12


def test_every_operation_survives_generated_requests(service: FeedbackService) -> None:
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json", wait_for_schema=120)
    operations = [found.ok() for found in schema.get_all_operations()]
    # A stream has the same 404 as the job itself, and would be waited for.
    tried = [survived(each, EXAMPLES) for each in operations if not each.path.endswith("/events")]
    assert len(tried) >= 12 and min(tried) >= 2
