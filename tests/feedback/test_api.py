"""The API over real HTTP: feedback, training, versions, deployment, comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path

import httpx
import pytest
from gradwire.rlhf import TrainingConfig
from gradwire_feedback.training.preferences import PreferenceResult
from support.feedback import QUICK, FeedbackService, scores


def submit(api: httpx.Client, agent: str, rows: object, **headers: str) -> httpx.Response:
    return api.post(f"/feedback/{agent}", json=rows, headers=headers)


def test_one_score_is_stored(api: httpx.Client) -> None:
    body = {"prompt": "What is the capital of France?", "response": "Paris.", "score": 0.9, "runId": "execution_123"}
    answer = submit(api, "one", body | {"notes": "Accurate"})
    assert answer.status_code == 201
    stored = answer.json()
    assert set(stored) == {"id", "agentId", "score", "createdAt"}
    assert (stored["agentId"], stored["score"]) == ("one", 0.9)


def test_batches_as_a_list_as_lines_and_as_a_file(api: httpx.Client) -> None:
    lines = "\n".join(map(json.dumps, scores(3))) + "\n\n"
    as_list = submit(api, "batches", scores(3))
    as_lines = api.post("/feedback/batches", content=lines, headers={"content-type": "application/x-ndjson"})
    as_file = api.post("/feedback/batches", files={"file": ("scores.jsonl", lines)})
    for answer in (as_list, as_lines, as_file):
        assert answer.status_code == 201 and len(answer.json()) == 3
    refused = api.post("/train_policy/batches", json={"maxSteps": 1})
    assert refused.status_code == 422
    assert "9 feedback samples" in refused.json()["detail"] and "1 are missing" in refused.json()["detail"]


def test_a_wrong_row_is_named_and_nothing_is_stored(api: httpx.Client) -> None:
    rows = scores(3)
    rows[1]["score"] = 1.5
    answer = submit(api, "wrong", rows)
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == "row 1.score"
    lines = "\n".join([json.dumps(scores(1)[0]), '{"prompt": "x"', json.dumps(scores(1)[0])])
    answer = api.post("/feedback/wrong", content=lines, headers={"content-type": "application/jsonl"})
    assert answer.status_code == 422 and "line 2" in answer.json()["detail"]
    assert "0 feedback samples" in api.post("/train_policy/wrong", json={}).json()["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"score": "0.5"}, "score"),
        ({"score": True}, "score"),
        ({"score": -0.1}, "score"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 40_000}, "prompt"),
        ({"response": "a\0b"}, "response"),
        ({"runId": "r" * 201}, "runId"),
        ({"extra": 1}, "extra"),
    ],
)
def test_a_wrong_field_is_named(api: httpx.Client, body: dict[str, object], field: str) -> None:
    answer = submit(api, "fields", scores(1)[0] | body)
    assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == field


def test_an_unknown_field_is_told_with_the_nearest_name(api: httpx.Client) -> None:
    rows = [scores(1)[0] | {"note": "good"}]
    for answer, field, said in (
        (submit(api, "names", rows), "row 0.note", "there is no such field (did you mean 'notes'?)"),
        (api.post("/train_policy/names", json={"maxStep": 3}), "maxStep", "(did you mean 'maxSteps'?)"),
        (
            api.post("/train_policy/names", json={"rewardModelConfig": {"learning_rates": 1.0, "zzz": 1}}),
            "rewardModelConfig.learning_rates",
            "(did you mean 'learningRate'?)",
        ),
    ):
        assert answer.status_code == 422
        error = answer.json()["errors"][0]
        assert error["field"] == field and error["message"].endswith(said)
    assert answer.json()["errors"][1] == {"field": "rewardModelConfig.zzz", "message": "there is no such field"}


def test_a_repeated_request_is_stored_once(api: httpx.Client) -> None:
    key = {"Idempotency-Key": "order-1"}
    first, again = submit(api, "twice", scores(2), **key), submit(api, "twice", scores(2), **key)
    assert first.status_code == again.status_code == 201 and first.json() == again.json()
    other = submit(api, "twice", scores(3), **key)
    assert other.status_code == 409 and "Idempotency-Key" in other.json()["detail"]
    assert "2 feedback samples" in api.post("/train_policy/twice", json={}).json()["detail"]


@pytest.mark.parametrize("agent", ["..", "../x", ".hidden", "a/b", "a" * 101, "jobs", "%2e%2e%2fetc", "a%00b"])
def test_names_that_lead_elsewhere_are_no_agents(api: httpx.Client, service: FeedbackService, agent: str) -> None:
    answer = api.post(f"/feedback/{agent}", json=scores(10))
    assert answer.status_code in (404, 405, 422)
    deployed = api.put("/fields/deployment", json={"../../etc": 1.0})
    assert deployed.status_code == 404


def test_a_body_that_is_too_large_is_refused(api: httpx.Client) -> None:
    answer = api.post("/feedback/large", content=b" " * (33 << 20), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["detail"] == "the body is larger than 32 MiB: send it in parts"
    in_chunks = api.post("/large/generate", content=iter([b" " * (11 << 20)] * 3))
    assert in_chunks.status_code == 413 and "32 MiB" in in_chunks.json()["detail"]
    assert submit(api, "large", [{}] * 10_001).status_code == 413
    assert api.post("/feedback/large", content="x", headers={"content-type": "image/png"}).status_code == 415


def unknown(fields: int) -> bytes:
    return b"{" + b",".join(b'"k%d":0' % number for number in range(fields)) + b"}"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/feedback/dear",
            b"{" + b",".join(b'"k%d":0' % n for n in range(600_000)) + b"}",
            "more than 160,000 containers",
        ),
        ("/items/dear", b"{" + b",".join(b'"k%d":0' % n for n in range(5000)) + b"}", "more than 4,096 containers"),
        ("/items/dear", b'{"others":[' + b"0," * 20_000 + b"0]}", "more than 16,384 values"),
        ("/feedback/dear", b"[" + b"0," * 4_000_000 + b"0]", "more than 160,000 values"),
        ("/feedback/dear", b'{"prompt":' + b"[" * 1000 + b"]" * 1000 + b"}", "more than 64 levels"),
        ("/feedback/dear", unknown(20), "this has 20 fields"),
    ],
)
def test_what_a_body_holds_is_counted_before_it_is_read(api: httpx.Client, path: str, body: bytes, said: str) -> None:
    """600,000 unknown fields, 7 MB, held up the service for 35 s."""
    kinds = ["application/json"] if path.startswith("/items") else ["application/json", "application/x-ndjson"]
    for kind in kinds:
        answer = api.post(path, content=body, headers={"content-type": kind})
        assert answer.status_code in (413, 422) and said in answer.json()["detail"], answer.text[:300]
    if kinds[1:]:
        answer = api.post(path, files={"file": ("rows.jsonl", body)})
        assert answer.status_code in (413, 422) and said in answer.json()["detail"], answer.text[:300]


def test_a_head_without_end_is_refused(api: httpx.Client) -> None:
    refused = api.get("/fields", headers={"x-long": "a" * 300_000})
    assert refused.status_code == 431


def test_another_sites_name_for_this_machine_is_refused(api: httpx.Client) -> None:
    assert api.get("/fields", headers={"host": "evil.example"}).status_code == 421
    answer = api.options("/fields", headers={"origin": "https://evil.example", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in answer.headers
    for plain in ("text/plain", "application/x-www-form-urlencoded"):
        answer = api.post("/feedback/plain", content=json.dumps(scores(1)), headers={"content-type": plain})
        assert answer.status_code == 415 and "application/json" in answer.json()["detail"]


def test_text_that_is_no_text_is_refused(api: httpx.Client) -> None:
    """JSON can escape half of a surrogate pair, for which UTF-8 has no bytes."""
    row = scores(1)[0]
    for method, path, body, field in (
        ("POST", "/feedback/half", row | {"response": "\ud800"}, "response"),
        ("POST", "/feedback/half", row | {"\udfff": 1}, "body"),
        ("POST", "/half/generate", {"prompt": "a\udc00b"}, "prompt"),
        ("POST", "/train_policy/half", {"startFrom": "v\ud801"}, "startFrom"),
        ("POST", "/train_policy/half", {"baseModel": "\ud801"}, "baseModel"),
        ("PUT", "/half/deployment", {"v\ud800": 1}, "v" + 3 * "\N{REPLACEMENT CHARACTER}" + ".[key]"),
    ):
        answer = api.request(method, path, content=json.dumps(body), headers={"content-type": "application/json"})
        assert answer.status_code == 422, answer.text
        assert answer.json()["errors"][0]["field"] == field


def test_sentences_are_for_people(api: httpx.Client) -> None:
    for rows, sentence in (
        ([scores(1)[0], None], "row 1: this is not a JSON object"),
        (scores(1)[0] | {"prompt": ""}, "prompt: String should have at least 1 character"),
        (scores(1)[0] | {"notes": "\0"}, "notes: the NUL character cannot be stored"),
    ):
        assert submit(api, "sentences", rows).json()["detail"] == sentence


def test_wrong_methods_and_paths_are_answered_as_json(api: httpx.Client) -> None:
    wrong = api.get("/feedback/bot")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["detail"] == "GET is not possible here: use POST"
    wrong = api.post("/bot/deployment")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, PUT")
    for path in ("/bot/nothing/here", "/train/policy/of/bot"):
        unknown = api.get(path)
        assert unknown.status_code == 404 and path in unknown.json()["detail"]


def test_settings_that_cannot_be_are_refused_by_name(api: httpx.Client) -> None:
    submit(api, "settings", scores(10))
    for settings, word in (
        ({"batchSize": 4, "miniBatchSize": 8}, "miniBatchSize"),
        ({"maxSteps": 0}, "maxSteps"),
        ({"learningRate": -1.0}, "learningRate"),
        ({"device": "cuda"}, "device"),
        ({"maxStep": 5}, "maxStep"),
        ({"maxNewTokens": 256}, "maxNewTokens is 256, but the context of tiny is 256"),
        ({"rewardModel": "reuse"}, "none to reuse"),
        ({"baseModel": "gpt9"}, "gpt9"),
        ({"rewardModelConfig": {"numEpochs": 0}}, "rewardModelConfig: numEpochs is 0"),
        ({"rewardModelConfig": {"epochs": 2}}, "epochs"),
    ):
        answer = api.post("/train_policy/settings", json={"dryRun": True} | settings)
        assert answer.status_code == 422, answer.text
        assert word in answer.json()["detail"]
    assert api.post("/train_policy/settings", json={"startFrom": "v99"}).status_code == 404
    assert api.post("/train_policy/settings", json={"maxNewTokens": 400}).status_code == 422


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"maxSteps": -1}, "maxSteps"),
        ({"max_steps": -1}, "max_steps"),
        ({"learningRate": 0}, "learningRate"),
        ({"device": "cuda"}, "device"),
        ({"mixedPrecision": "bf16"}, "mixedPrecision"),
        ({"baseModel": "gpt9"}, "baseModel"),
        ({"rewardModel": "reuse"}, "rewardModel"),
        ({"rewardModelConfig": {"loraR": 0}}, "rewardModelConfig.loraR"),
        ({"maxNewTokens": 400}, "maxNewTokens"),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_sent(api: httpx.Client, settings: dict[str, object], field: str) -> None:
    submit(api, "spelled", scores(10))
    answer = api.post("/train_policy/spelled", json={"dryRun": True} | settings)
    assert answer.status_code == 422, answer.text
    [error] = answer.json()["errors"]
    assert error["field"] == field and error["message"] == answer.json()["detail"]
    assert field.rpartition(".")[2] in error["message"]


@pytest.fixture(scope="module")
def trained(service: FeedbackService) -> FeedbackService:
    """The service with an agent of three versions: v15, v25 and v25.1."""
    with service.client() as api:
        submit(api, "bot", scores(15))
        for more, settings in ((10, {}), (0, {"rewardModel": "retrain"}), (0, {"rewardModel": "reuse"})):
            answer = api.post("/train_policy/bot", json=QUICK | settings)
            assert answer.status_code == 200, answer.text
            if more:
                submit(api, "bot", scores(more, 15))
    return service


def test_versions_are_named_by_their_feedback(trained: FeedbackService, api: httpx.Client) -> None:
    policies = api.get("/bot").json()
    assert [each["version"] for each in policies] == ["v15", "v25", "v25.1"]
    for each, count in zip(policies, (15, 25, 25)):
        assert set(each) == {"id", "agentId", "version", "createdAt", "metrics"}
        assert set(each["metrics"]) == {"feedbackCount", "rewardMean", "rewardStd"}
        assert each["metrics"]["feedbackCount"] == count
    folder = trained.folder / "models" / "bot"
    for version in ("v15", "v25", "v25.1"):
        assert (folder / version / "policy" / "config.json").is_file()
    assert (folder / "v25" / "reward_model").is_dir() and not (folder / "v25.1" / "reward_model").exists()
    assert len((folder / "v25" / "feedback.jsonl").read_text().splitlines()) == 25


def test_preferences_train_a_version(service: FeedbackService, api: httpx.Client) -> None:
    settings = {"method": "dpo", "maxSteps": 6, "batchSize": 4, "learningRate": 1e-2, "maxNewTokens": 4, "beta": 0.5}
    rows = [{"prompt": f"Say {n % 3}", "responses": [f"yes {n}", f"no {n}"]} for n in range(9)]
    assert api.post("/rankings/pairs", json=rows).status_code == 201
    refused = api.post("/train_policy/pairs", json=settings)
    assert refused.status_code == 422 and "9 preferences" in refused.json()["detail"]
    alike = {"prompt": "p", "response": "yes", "others": [{"response": "yes"}], "ask": "ranking"}
    refused = api.post("/items/pairs", json=alike)
    assert refused.status_code == 422 and "two of the answers are the same" in refused.text
    more = api.post("/rankings/pairs", json={"prompt": "Say 9", "responses": ["yes", "yes?", "no"], "notes": "short"})
    assert more.json()[0]["ranks"] == [1, 2, 3]
    assert len(api.get("/pairs/pairs").json()) == 12
    for settings_of_ppo, name in (({"ppoEpochs": 2}, "ppoEpochs"), ({"rewardModel": "reuse"}, "rewardModel")):
        refused = api.post("/train_policy/pairs", json=settings | settings_of_ppo)
        assert refused.status_code == 422 and name in refused.json()["detail"], refused.text
    refused = api.post("/train_policy/pairs", json={"beta": 0.1})
    assert refused.status_code == 422 and "beta is a setting of method" in refused.json()["detail"]

    answer = api.post("/train_policy/pairs", json=settings)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["version"], made["trainingSteps"], made["rewardModelPath"], made["rewardMean"]) == (
        "v12",
        6,
        None,
        None,
    )
    folder = service.folder / "models" / "pairs" / "v12"
    found = PreferenceResult.load(folder)
    assert found.held_out > 0 and found.curves["loss"][-1] < found.curves["loss"][0] == pytest.approx(math.log(2))
    assert found.before["rewardMargin"] == pytest.approx(0, abs=1e-6) and found.after["accuracy"] >= 0
    assert len((folder / "feedback.jsonl").read_text().splitlines()) == 12
    report = api.get("/pairs/versions/v12/report").json()
    assert (report["method"], report["startedFrom"], report["rewardModel"]) == ("dpo", "base", None)
    assert report["preferences"]["heldOut"] == found.held_out and len(report["curves"]["accuracy"]) == 6
    assert len(report["examples"]) == 4 and all(each["afterScore"] is None for each in report["examples"])
    ranking = api.get("/pairs/rankings", params={"limit": 1}).json()[0]
    assert api.delete(f"/pairs/rankings/{ranking['id']}").json()["withdrawn"]
    assert len(api.get("/pairs/pairs").json()) == 9

    refused = api.post("/train_policy/pairs", json=QUICK | {"rewardModel": "reuse"})
    assert refused.status_code == 422
    generated = api.post("/pairs/generate", json={"prompt": "Say 1", "maxNewTokens": 4})
    assert generated.status_code == 200, generated.text


def test_a_training_tells_what_it_did(trained: FeedbackService, api: httpx.Client) -> None:
    report = api.get("/bot/versions/v25/report").json()
    assert (report["method"], report["startedFrom"], report["preferences"]) == ("ppo", "v15", None)
    found = report["rewardModel"]
    assert found["numRatings"] > 0 and found["meanSquaredError"] > 0 and found["baselineError"] > 0
    assert set(report["curves"]) == {"reward", "kl", "loss", "valueError"}
    assert [len(values) for values in report["curves"].values()] == [2] * 4
    assert report["predictedReward"] == pytest.approx(sum(report["curves"]["reward"][-1:]))
    assert (report["ratedReward"], report["ratedAnswers"]) == (None, 0)
    examples = report["examples"]
    assert [each["prompt"] for each in examples] == ["Say 0", "Say 1", "Say 2", "Say 3"]
    assert all(isinstance(each[name], float) for each in examples for name in ("beforeScore", "afterScore"))
    assert any(each["before"] for each in examples)
    assert api.get("/bot/versions/v26/report").status_code == 404
    assert api.get("/bot/versions/newest/report").status_code == 422


def test_a_dry_run_measures_and_makes_nothing(trained: FeedbackService, api: httpx.Client) -> None:
    answer = api.post("/train_policy/bot", json=QUICK | {"dryRun": True, "maxSteps": 1000})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["status"], found["feedbackCount"], found["estimatedSteps"]) == ("dry_run", 25, 1000)
    assert found["estimatedTimeMinutes"] > 0 and found["estimatedMemoryGib"] > 0
    assert found["scoreMean"] == pytest.approx(sum(row["score"] for row in scores(25)) / 25)
    assert set(found["modelConfig"]) == set(TrainingConfig.__dataclass_fields__)
    # Each dry run measures anew, on a machine that may be busy then: what is compared differs by far.
    longer = api.post("/train_policy/bot", json=QUICK | {"dryRun": True, "maxSteps": 20_000}).json()
    assert longer["estimatedTimeMinutes"] > 5 * found["estimatedTimeMinutes"]
    brief = {"dryRun": True, "maxSteps": 1}
    short = api.post("/train_policy/bot", json=QUICK | brief).json()
    settings = brief | {"rewardModelConfig": {"numEpochs": 1000}}
    thorough = api.post("/train_policy/bot", json=QUICK | settings).json()
    assert thorough["estimatedTimeMinutes"] > 5 * short["estimatedTimeMinutes"], "13,000 steps of the reward model"
    refused = api.post("/train_policy/bot", json=QUICK | settings | {"rewardModel": "reuse"})
    assert refused.status_code == 422 and "leave out one of the two" in refused.json()["detail"]
    assert len(api.get("/bot").json()) == 3
    assert not any((trained.folder / "models" / ".probes").iterdir())


def test_a_job_is_followed_and_holds_the_agent(trained: FeedbackService, api: httpx.Client) -> None:
    submit(api, "followed", scores(12))
    begun = api.post("/train_policy/followed", json=QUICK, headers={"Prefer": "respond-async"})
    assert begun.status_code == 202 and begun.json()["status"] == "queued"
    job = begun.json()["id"]
    assert begun.headers["location"] == f"/api/policies/jobs/{job}"
    second = api.post("/train_policy/followed", json=QUICK)
    assert second.status_code == 409 and job in second.json()["detail"]
    with api.stream("GET", f"/jobs/{job}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    events = [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in pairs(lines)]
    assert [kind for kind, _ in events[:-1]] == ["progress"] * (len(events) - 1) and events[-1][0] == "end"
    stages = [event["progress"]["stage"] for _, event in events if event["progress"]]
    assert stages == sorted(stages, key=["reward_model", "policy", "export"].index)
    result = events[-1][1]["result"]
    assert result["status"] == "trained" and result["version"] == "v12" and result["trainingSteps"] == 2
    assert api.get(f"/jobs/{job}").json()["status"] == "succeeded"
    assert api.get("/jobs/" + "0" * 32).status_code == 404


def pairs(lines: list[str]) -> list[tuple[str, str]]:
    kept = [line for line in lines if line.startswith(("event:", "data:"))]
    return list(zip(kept[::2], kept[1::2]))


def test_a_cancelled_job_leaves_nothing(trained: FeedbackService, api: httpx.Client) -> None:
    submit(api, "cancelled", scores(12))
    begun = api.post("/train_policy/cancelled", json=QUICK | {"maxSteps": 10_000}, headers={"Prefer": "respond-async"})
    job = begun.json()["id"]
    with api.stream("GET", f"/jobs/{job}/events") as stream:
        for line in stream.iter_lines():
            if '"stage": "policy"' in line:
                assert api.delete(f"/jobs/{job}").status_code == 200
    assert api.get(f"/jobs/{job}").json()["status"] == "cancelled"
    assert api.get("/cancelled").json() == []
    assert not (trained.folder / "models" / "cancelled" / "v12").exists()
    again = api.post("/train_policy/cancelled", json=QUICK)
    assert again.status_code == 200 and again.json()["version"] == "v12"


def test_traffic_is_split_sticky_and_compared(trained: FeedbackService, api: httpx.Client) -> None:
    assert api.get("/bot/deployment").json()["weights"] == {"base": 1.0}
    assert api.put("/bot/deployment", json={"v15": 0.5, "v25": 0.4}).status_code == 422
    assert api.put("/bot/deployment", json={"v15": 0.5, "v99": 0.5}).status_code == 404
    assert api.put("/bot/deployment", json={"v15": 0.5, "v25": 0.5}).status_code == 200
    versions = {}
    for user in range(60):
        answers = [ask(api, f"user-{user}") for _ in range(2 if user < 5 else 1)]
        assert len({answer["version"] for answer in answers}) == 1
        versions[user] = answers[0]["version"]
        score = 1.0 if versions[user] == "v25" else 0.0
        body = {"prompt": "Say 1", "response": answers[0]["response"], "score": score, "runId": answers[0]["runId"]}
        assert submit(api, "bot", body).status_code == 201
    assert set(versions.values()) == {"v15", "v25"}
    found = api.get("/bot/comparison").json()
    assert {each["version"]: (each["mean"], each["count"]) for each in found["versions"]} == {
        version: (mean, list(versions.values()).count(version)) for version, mean in (("v15", 0.0), ("v25", 1.0))
    }
    (gap,) = found["differences"]
    assert gap["difference"] == 1.0 and gap["interval"][0] > 0 and gap["better"] == "v25"
    assert found["settled"] and found["sampleRatio"]["ok"] and sum(found["sampleRatio"]["observed"].values()) == 60
    assert api.post("/bot/rollback").json()["weights"] == {"v15": 1.0}
    assert api.get("/bot/comparison").json()["settled"], "the result stays after the test"
    assert api.post("/bot/rollback").json()["weights"] == {"base": 1.0}
    assert api.post("/bot/rollback").status_code == 409


def ask(api: httpx.Client, user: str) -> dict[str, str]:
    answer = api.post("/bot/generate", json={"prompt": "Say 1", "userId": user, "maxNewTokens": 4})
    assert answer.status_code == 200, answer.text
    assert set(answer.json()) == {"runId", "agentId", "version", "response"}
    return dict(answer.json())


def test_a_seed_gives_the_same_answer_again(trained: FeedbackService, api: httpx.Client) -> None:
    api.put("/bot/deployment", json={"v15": 1.0})
    seeds = (1, 1, 2**53 - 1)
    bodies = [{"prompt": "Say 1", "maxNewTokens": 12, "temperature": 2, "seed": seed} for seed in seeds]
    answers = [api.post("/bot/generate", json=body).json() for body in bodies]
    assert answers[0]["response"] == answers[1]["response"] != answers[2]["response"]
    assert answers[0]["runId"] != answers[1]["runId"]
    assert api.post("/bot/generate", json={"prompt": "Say 1", "seed": -1}).status_code == 422


def test_a_deployed_version_answers_as_its_folder_does(trained: FeedbackService, api: httpx.Client) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = Path(api.get("/bot").json() and trained.folder / "models" / "bot" / "v25" / "policy")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    api.put("/bot/deployment", json={"v25": 1.0})
    answer = api.post("/bot/generate", json={"prompt": "Say 1", "temperature": 0, "maxNewTokens": 6}).json()
    ids = tokenizer("Say 1", return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert answer["version"] == "v25" and answer["response"] == tokenizer.decode(out, skip_special_tokens=True)


def test_ratings_are_corrected_and_withdrawn_with_their_history(trained: FeedbackService, api: httpx.Client) -> None:
    newest, *_, oldest = api.get("/bot/ratings", params={"limit": 1000}).json()[-25:]
    assert (newest["versions"], oldest["versions"]) == (["v25", "v25.1"], ["v15", "v25", "v25.1"])
    path = f"/bot/ratings/{oldest['id']}"
    corrected = api.patch(path, json={"score": 0.45}).json()
    assert (corrected["score"], corrected["withdrawn"]) == (0.45, False)
    assert [(each["change"], each["score"]) for each in corrected["history"]] == [("corrected", oldest["score"])]
    before = api.post("/train_policy/bot", json=QUICK | {"dryRun": True}).json()
    withdrawn = api.delete(path).json()
    assert [each["change"] for each in withdrawn["history"]] == ["corrected", "withdrawn"]
    assert withdrawn["versions"] == oldest["versions"], "they stay as they are"
    after = api.post("/train_policy/bot", json=QUICK | {"dryRun": True}).json()
    assert after["feedbackCount"] == before["feedbackCount"] - 1
    assert api.delete(path).status_code == 409 and api.patch(path, json={"score": 1}).status_code == 409
    assert api.delete(f"/other/ratings/{oldest['id']}").status_code == 404
    assert api.patch(path, json={"score": 2}).status_code == 422
    again = api.post("/train_policy/bot", json=QUICK)
    assert again.status_code == 200, again.text
    listed = {each["id"]: each["versions"] for each in api.get("/bot/ratings").json()}
    assert again.json()["version"] in listed[newest["id"]] and again.json()["version"] not in listed[oldest["id"]]
