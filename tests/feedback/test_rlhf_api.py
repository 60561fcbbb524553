"""The seed document on RLHF: the routes, fields and limits of its API, typed as it has them."""

from __future__ import annotations

import httpx
import pytest
from support.feedback import scores

AGENT = "document-agent"


def test_feedback_as_the_document_sends_it(api: httpx.Client) -> None:
    body = {
        "prompt": "What is the capital of France?",
        "response": "The capital of France is Paris.",
        "score": 0.9,
        "runId": "execution_123",
        "notes": "Accurate and concise answer",
    }
    answer = api.post("/feedback/my_document_agent", json=body)
    assert answer.is_success
    assert {"id", "agentId", "score", "createdAt"} <= answer.json().keys()
    assert (answer.json()["agentId"], answer.json()["score"]) == ("my_document_agent", 0.9)
    refused = api.post(
        "/train_policy/my_document_agent", json={"dryRun": False, "maxSteps": 1000, "learningRate": 1e-5}
    )
    assert refused.is_client_error and "10" in refused.text


@pytest.mark.long
def test_a_dry_run_and_an_empty_list(api: httpx.Client) -> None:
    assert api.get(f"/{AGENT}").json() == []
    for row in scores(10):
        api.post(f"/feedback/{AGENT}", json=row)
    estimate = api.post(f"/train_policy/{AGENT}", json={"dryRun": True, "maxSteps": 1000, "learningRate": 1e-5}).json()
    assert (estimate["status"], estimate["feedbackCount"], estimate["estimatedSteps"]) == ("dry_run", 10, 1000)
    assert estimate["estimatedTimeMinutes"] >= 0
    assert estimate["scoreMean"] == pytest.approx(0.45) and estimate["scoreStd"] > 0
    assert estimate["modelConfig"]["use_lora"] is True
    assert estimate["modelConfig"]["learning_rate"] == 1e-5
