"""OpenAI's fine-tuning API, by the `openai` package as it is, on a real server with a tiny model."""

from __future__ import annotations

import csv
import hashlib
import http.client
import http.server
import io
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest
from gradwire.recipes import evaluate
from gradwire_proto.v1 import jobs_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import KeyFile, Quota
from gradwire_server.doors.http.openai.fine_tuning.hyperparameters import resolve
from openai.types.fine_tuning import FineTuningJob
from support.chats import chat_model
from support.server import free_port
from support.tinker import HttpServer
from support.web import Quiet, serving

DOCUMENTED = "Qwen/Qwen3-0.6B"
WORD = "four"
NUMBERS = {"n_epochs": 2, "batch_size": 8, "learning_rate_multiplier": 8}
QUOTA = 300_000
"""Bytes of dora's files."""
LEARNED = {"n_epochs": 2, "batch_size": 2, "learning_rate_multiplier": 50}
"""All weights learn the word in 32 steps: each token of it is over 6 nats likelier than any other, whatever the seed.

At two or three times the multiplier the loss jumps, and rounding decides whether it has come down again at the end.
"""


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(map(json.dumps, rows)).encode()


def talks(count: int = 32, answer: str = WORD) -> bytes:
    return lines(
        [
            {"messages": [{"role": "user", "content": f"{a} and two?"}, {"role": "assistant", "content": answer}]}
            for a in range(count)
        ]
    )


def pairs(count: int = 16) -> bytes:
    def said(text: str) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": text}]

    return lines(
        [
            {
                "input": {"messages": [{"role": "user", "content": f"{a}?"}], "tools": [], "parallel_tool_calls": True},
                "preferred_output": said(f"four {a}"),
                "non_preferred_output": said(f"two {a}"),
            }
            for a in range(count)
        ]
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("tuning")
    (folder / "state").mkdir()
    made = {name: KeyFile(folder / "state").create(name) for name in ("anna", "bert")}
    made["vera"] = KeyFile(folder / "state").create("vera", role="viewer")
    made["dora"] = KeyFile(folder / "state").create("dora", quota=Quota(file_bytes=QUOTA))
    return {"folder": str(folder), **made}


class Receiver(Quiet):
    """Refuses the first news, and keeps the headers and the body of each."""

    news: ClassVar[list[tuple[dict[str, str], str]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self.news.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(503 if len(self.news) == 1 else 204)
        self.end_headers()


@pytest.fixture(scope="module")
def receiver() -> Iterator[str]:
    """Where the server tells of the jobs' ends."""
    with serving(Receiver) as address:
        yield f"http://{address}/hook"


@pytest.fixture(scope="module")
def server(keys: dict[str, str], receiver: str) -> Iterator[HttpServer]:
    folder = Path(keys["folder"])
    model = chat_model(folder / "marked", "marked")
    options = ("--threads", "1", "--model", f"{DOCUMENTED}={model}", "--webhook", receiver)
    running = HttpServer(model, folder / "state", free_port(), *options, name="org/marked")
    running.start()
    yield running
    assert running.end() == 0


@pytest.fixture(scope="module")
def client(server: HttpServer, keys: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["anna"], max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def other(server: HttpServer, keys: dict[str, str]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys["bert"], max_retries=0, timeout=120) as client:
        yield client


def upload(client: openai.OpenAI, content: bytes, name: str = "talks.jsonl") -> str:
    file = client.files.create(file=(name, content), purpose="fine-tune")
    return client.files.wait_for_processing(file.id, poll_interval=0.1).id


def ended(client: openai.OpenAI, job_id: str, state: str = "succeeded") -> FineTuningJob:
    job = client.fine_tuning.jobs.retrieve(job_id)
    deadline = time.monotonic() + 240
    while job.status not in ("succeeded", "failed", "cancelled"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        job = client.fine_tuning.jobs.retrieve(job_id)
    assert job.status == state, job.error
    return job


@pytest.fixture(scope="module")
def data(client: openai.OpenAI) -> str:
    return upload(client, talks())


@pytest.fixture(scope="module")
def supervised(client: openai.OpenAI, data: str) -> FineTuningJob:
    """A job that has succeeded."""
    job = client.fine_tuning.jobs.create(
        model="openai/org/marked",
        training_file=data,
        validation_file=upload(client, talks(10)),
        suffix="my answers",
        seed=7,
        metadata={"team": "red"},
        method={"type": "supervised", "supervised": {"hyperparameters": dict(LEARNED)}},
        extra_body={"gradwire": {"full": True}},
    )
    assert job.status in ("queued", "running") and job.fine_tuned_model is None and job.trained_tokens is None
    return ended(client, job.id)


@pytest.mark.long
def test_a_supervised_job_tells_everything(client: openai.OpenAI, supervised: FineTuningJob, data: str) -> None:
    job = supervised
    assert job.hyperparameters is not None and job.method is not None and job.method.supervised is not None
    assert job.hyperparameters.model_dump() == LEARNED
    assert job.method.supervised.hyperparameters is not None
    assert job.method.supervised.hyperparameters.model_dump() == LEARNED
    assert (job.seed, job.metadata, job.training_file) == (7, {"team": "red"}, data)
    assert job.fine_tuned_model == f"ft:org/marked:anna:my-answers:{job.id.removeprefix('ftjob-')}"
    assert job.trained_tokens and job.finished_at and job.error is None
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=3))  # pages of three
    assert [event.id for event in events] == list(dict.fromkeys(event.id for event in events))
    assert events[0].message == "The job has successfully completed"
    assert events[-1].message == f"Created fine-tuning job: {job.id}"
    steps = [event for event in reversed(events) if event.type == "metrics"]
    curve: list[Any] = [event.data for event in steps]
    assert [each["step"] for each in curve] == list(range(1, 33))
    assert curve[-1]["train_loss"] < curve[0]["train_loss"] and "valid_loss" in curve[15]
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [each.step_number for each in checkpoints] == [32, 16]  # each epoch's end
    assert checkpoints[0].metrics.full_valid_loss == checkpoints[0].metrics.valid_loss == curve[31]["valid_loss"]
    assert checkpoints[0].fine_tuned_model_checkpoint == f"{job.fine_tuned_model}:ckpt-step-32"
    table = client.files.content(job.result_files[0]).text
    rows = list(csv.DictReader(io.StringIO(table)))
    assert float(rows[31]["train_loss"]) == curve[31]["train_loss"] and rows[0]["valid_loss"] == ""
    assert client.files.retrieve(job.result_files[0]).purpose == "fine-tune-results"


@pytest.mark.long
def test_what_a_job_made_answers_like_any_model(
    client: openai.OpenAI, other: openai.OpenAI, supervised: FineTuningJob
) -> None:
    name = supervised.fine_tuned_model
    assert name is not None
    asked: list[Any] = [{"role": "user", "content": "3 and two?"}]
    known = {model.id for model in client.models.list()}
    assert {name, f"{name}:ckpt-step-16", f"{name}:ckpt-step-32"} <= known
    for each in (name, f"openai/{name}", f"{name}:ckpt-step-32"):
        answer = client.chat.completions.create(model=each, messages=asked, max_tokens=8, temperature=0)
        assert answer.choices[0].message.content == WORD and answer.model == each
    untrained = client.chat.completions.create(model="org/marked", messages=asked, max_tokens=8, temperature=0)
    assert untrained.choices[0].message.content != WORD
    assert client.completions.create(model=name, prompt="1", max_tokens=2).choices[0].finish_reason
    assert client.models.retrieve(name).owned_by == "anna"
    assert name not in {model.id for model in other.models.list()}
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        other.chat.completions.create(model=name, messages=asked)
    with pytest.raises(openai.NotFoundError, match="there is no job"):
        other.fine_tuning.jobs.retrieve(supervised.id)
    with pytest.raises(openai.NotFoundError, match="ckpt-step-5"):
        client.chat.completions.create(model=f"{name}:ckpt-step-5", messages=asked)


@pytest.mark.long
def test_evaluate_compares_a_checkpoint_with_its_base(
    server: HttpServer, keys: dict[str, str], supervised: FineTuningJob, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("GRADWIRE_API_KEY", keys["anna"])
    checkpoint = supervised.model_extra["gradwire"]["checkpoints"][-1]  # type: ignore[index]
    (tmp_path / "prompts.jsonl").write_bytes(lines([{"prompt": f"{n} and two?", "answer": WORD} for n in range(4)]))
    (tmp_path / "own.py").write_text("def size(response, ground_truth):\n    return len(response) / 100\n")
    needs = {"type": "python", "name": "needs", "source": "def grade(sample, item): return item['absent']"}
    config = {
        "model": "org/marked", "checkpoints": [checkpoint], "data": str(tmp_path / "prompts.jsonl"),
        "folder": str(tmp_path / "out"), "answer_tokens": 8, "address": server.address,
        "graders": [{**RIGHT, "operation": "eq"}, needs, "last_number", f"{tmp_path}/own.py:size"],
    }  # fmt: skip
    file = tmp_path / "evaluate.yaml"
    file.write_text(json.dumps(config))
    evaluate.main([str(file)])
    told = capsys.readouterr()
    columns, base, trained = (line.split() for line in told.out.splitlines()[:3])
    assert columns == ["model", "right", "needs", "last_number", "size"]
    assert base[:5] == ["org/marked", "0.000", "±0.000", "-", "-"]
    assert trained == [checkpoint, "1.000", "±0.000", "-", "-", "0.040", "±0.000"]
    assert "last_number could not grade 4 answers, the first because last_number: ValueError: the ground tr" in told.err
    assert "org/marked: needs could not grade 4 answers, the first because " in told.err and "KeyError" in told.err
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [each["answer"] for each in answers if each["model"] == checkpoint] == [WORD] * 4
    for wrong, sentence in [
        ("graders=[]", "graders is empty"),
        ("graders=[{type: magic}]", "graders: type is 'magic'"),
        ("graders=[last_numbr]", "reward has 'last_numbr'; it must be one of last_number"),
        ("graders=[environment]", "here there is none"),
        ("model=gpt-9", "has no model 'gpt-9'"),
        ("checkpoints=[run-none/a]", "run-none"),
        ("answer=3", "did you mean answers?"),
    ]:
        with pytest.raises(SystemExit):
            evaluate.main([str(file), "--set", wrong])
        assert sentence in capsys.readouterr().err


@pytest.mark.long
def test_dpo_and_the_end_of_its_model(client: openai.OpenAI) -> None:
    job = client.fine_tuning.jobs.create(
        model="org/marked",
        training_file=upload(client, pairs(), "pairs.jsonl"),
        method={"type": "dpo", "dpo": {"hyperparameters": {**NUMBERS, "beta": 0.5}}},
    )
    job = ended(client, job.id)
    assert job.method is not None and job.method.dpo is not None and job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.5
    steps: list[Any] = [event.data for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    assert steps[0]["train_loss"] < steps[-1]["train_loss"] and job.fine_tuned_model in {
        m.id for m in client.models.list()
    }


RIGHT = {
    "type": "string_check", "name": "right", "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}",
    "operation": "ilike",
}  # fmt: skip
SHORT = {
    "type": "python",
    "name": "short",
    "source": "def grade(sample, item):\n    text = sample['output_text']\n    return text.count(item['answer']) / 8",
}
SCORE: dict[str, Any] = {
    "type": "score_model", "name": "judged", "model": "org/marked", "range": [0, 10],
    "input": [{"role": "user", "content": "How good is {{ sample.output_text }}?"}],
}  # fmt: skip
BOTH = {"type": "multi", "graders": {"right": RIGHT, "short": SHORT}, "calculate_output": "0.2 * right + short"}


def reinforced(client: openai.OpenAI, count: int, grader: Any, hyperparameters: Any, **gradwire: int) -> FineTuningJob:
    """A reinforcement job on so many problems that has succeeded."""
    rows = [{"messages": [{"role": "user", "content": f"{a} and"}], "answer": "e"} for a in range(count)]
    job = client.fine_tuning.jobs.create(
        model="org/marked",
        training_file=upload(client, lines(rows), "problems.jsonl"),
        method={
            "type": "reinforcement",
            "reinforcement": {"grader": grader, "hyperparameters": hyperparameters},
        },
        seed=1,
        extra_body={"gradwire": gradwire},
    )
    return ended(client, job.id)


@pytest.mark.slow
def test_reinforcement_learns_by_its_graders(client: openai.OpenAI) -> None:
    numbers = {"n_epochs": 4, "batch_size": 8, "learning_rate_multiplier": 6500}
    job = reinforced(client, 16, BOTH, numbers, answer_tokens=8, lora_rank=0)
    method = job.method
    assert method is not None and method.reinforcement is not None
    assert method.reinforcement.grader.model_dump(exclude_unset=True) == BOTH
    events = [event for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    rewards: list[float] = [event.data["train_reward_mean"] for event in reversed(events)]  # type: ignore[index]
    assert len(rewards) == 8 and sum(rewards[-2:]) > 2 * sum(rewards[:2]), rewards
    assert all(event.data["rewards/not_scored"] == 0 for event in events)  # type: ignore[index]
    assert job.fine_tuned_model in {model.id for model in client.models.list()}


@pytest.mark.long
def test_graders_are_tried(client: openai.OpenAI) -> None:
    graders: Any = client.fine_tuning.alpha.graders
    for grader, sample, reward in [(RIGHT, "five", 1.0), (SHORT, "ee", 0.25), (BOTH, "ee", 0.45)]:
        assert graders.validate(grader=grader).grader.type == grader["type"]
        run = graders.run(grader=grader, model_sample=sample, item={"answer": "e"})
        assert run.reward == pytest.approx(reward)
        assert (run.metadata.type, any(run.metadata.errors.model_dump().values())) == (grader["type"], False)
    assert graders.run(grader=BOTH, model_sample="ee", item={"answer": "e"}).sub_rewards == {"right": 1, "short": 0.25}
    broken = graders.run(grader=SHORT, model_sample="e", item={})
    assert broken.metadata.errors.python_grader_runtime_error
    assert "KeyError" in broken.metadata.errors.python_grader_runtime_error_details
    assert graders.run(grader=RIGHT, model_sample="e", item={}).metadata.errors.other_error
    for wrong, sentence in [
        ({"type": "magic"}, "type is 'magic'; it must be one of string_check, text_similarity, python, score_model"),
        (RIGHT | {"operation": "is"}, "operation must be one of eq, ne, like, ilike"),
        (RIGHT | {"input": "{{ secret.x }}"}, "there are item.FIELD, sample.output_text"),
        (SHORT | {"source": "def grade(:"}, "source is no Python"),
        (SHORT | {"source": "x = 1"}, "no function grade"),
        (BOTH | {"calculate_output": "right + wrong"}, "names 'wrong'; there are right, short"),
        (BOTH | {"calculate_output": "__import__('os')"}, "no arithmetic on the graders' names"),
        (SCORE | {"range": [1, 0]}, "range must be two numbers"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            graders.validate(grader=wrong)
        assert caught.value.param == "grader" and sentence in caught.value.message
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-9' here"):
        graders.validate(grader=SCORE | {"model": "gpt-9"})


@pytest.mark.long
def test_the_end_is_told_until_it_is_taken(
    client: openai.OpenAI, supervised: FineTuningJob, keys: dict[str, str]
) -> None:
    deadline = time.monotonic() + 60
    while not (mine := [each for each in Receiver.news[1:] if supervised.id in each[1]]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    headers, body = mine[0]
    secret = (Path(keys["folder"]) / "state" / "webhook.secret").read_text().strip()
    event = client.webhooks.unwrap(body, headers, secret=secret)
    assert event.type == "fine_tuning.job.succeeded" and event.data.id == supervised.id
    assert Receiver.news[0][0]["webhook-id"] == Receiver.news[1][0]["webhook-id"]  # the refused one came again
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.replace("succeeded", "failed"), headers, secret=secret)


@pytest.mark.long
@pytest.mark.parametrize("name", ["anna", "vera"])
def test_no_model_is_listed_twice(
    server: HttpServer, keys: dict[str, str], supervised: FineTuningJob, name: str
) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=keys[name], max_retries=0, timeout=120) as client:
        found = [model.id for model in client.models.list()]
    assert str(supervised.fine_tuned_model) in found and len(set(found)) == len(found)


@pytest.mark.long
def test_what_a_job_made_is_shared_and_trained_further(
    client: openai.OpenAI, other: openai.OpenAI, supervised: FineTuningJob, data: str
) -> None:
    name = str(supervised.fine_tuned_model)

    def asked(by: openai.OpenAI, model: str) -> str:
        messages: Any = [{"role": "user", "content": "3 and two?"}]
        answer = by.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=8)
        return str(answer.choices[0].message.content)

    with pytest.raises(openai.NotFoundError):
        asked(other, name)
    permissions = client.fine_tuning.checkpoints.permissions
    with pytest.raises(openai.BadRequestError, match="'carl' is not the name of another key"):
        permissions.create(name, project_ids=["carl"])
    (given,) = permissions.create(name, project_ids=["bert"])
    assert [each.id for each in permissions.list(name)] == [given.id] and given.project_id == "bert"
    assert asked(other, name) == WORD and name in {model.id for model in other.models.list()}
    with pytest.raises(openai.PermissionDeniedError):
        other.fine_tuning.checkpoints.permissions.create(name, project_ids=["anna"])
    with pytest.raises(openai.PermissionDeniedError, match="only its owner can delete it"):
        other.models.delete(name)
    with pytest.raises(openai.BadRequestError, match=f"a checkpoint goes with its model: delete {name}"):
        client.models.delete(f"{name}:ckpt-step-16")
    mine = upload(other, talks(10, "nine"))
    job = other.fine_tuning.jobs.create(
        model=name,
        training_file=mine,
        hyperparameters={"n_epochs": 2, "batch_size": 5, "learning_rate_multiplier": 150},
    )
    job = ended(other, job.id)
    assert job.model == name and str(job.fine_tuned_model).startswith("ft:org/marked:bert:")
    first = [each for each in other.fine_tuning.jobs.list_events(job.id) if each.type == "metrics"][-1]
    assert first.data["train_loss"] > 1  # type: ignore[index]  # it begins with the other word
    assert asked(other, str(job.fine_tuned_model)) != WORD and asked(client, name) == WORD
    assert permissions.delete(given.id, fine_tuned_model_checkpoint=name).deleted
    with pytest.raises(openai.NotFoundError):
        asked(other, name)


@pytest.mark.long
def test_a_file_arrives_in_parts(client: openai.OpenAI, other: openai.OpenAI) -> None:
    content = talks()
    size, half = len(content), len(content) // 2
    announced: Any = {"filename": "talks.jsonl", "purpose": "fine-tune", "mime_type": "text/jsonl"}
    upload = client.uploads.create(bytes=size, **announced)
    second, first = (client.uploads.parts.create(upload.id, data=part).id for part in (content[half:], content[:half]))
    with pytest.raises(openai.BadRequestError, match="have more than the announced"):
        client.uploads.parts.create(upload.id, data=b"x")
    for wrong, sentence in (([first], "were announced"), ([first, first], "is twice"), (["part_x"], "no part of this")):
        with pytest.raises(openai.BadRequestError, match=sentence):
            client.uploads.complete(upload.id, part_ids=wrong)
    with pytest.raises(openai.BadRequestError, match="another MD5"):
        client.uploads.complete(upload.id, part_ids=[first, second], md5="0" * 32)
    with pytest.raises(openai.NotFoundError):
        other.uploads.complete(upload.id, part_ids=[first, second])
    digest = hashlib.md5(content).hexdigest()
    for _ in range(2):  # a repeated one is the same
        done = client.uploads.complete(upload.id, part_ids=[first, second], md5=digest)
        assert done.status == "completed" and done.file is not None
        assert client.files.content(done.file.id).content == content
    assert client.uploads.cancel(client.uploads.create(bytes=9, **announced).id).status == "cancelled"


class Sending:
    """An upload that has sent its beginning, and is sending."""

    def __init__(self, url: str, key: str, path: str, announced: int) -> None:
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
        self.connection.putrequest("POST", path)
        self.connection.putheader("Authorization", f"Bearer {key}")
        self.connection.putheader("Content-Type", "multipart/form-data; boundary=b")
        self.connection.putheader("Content-Length", str(announced))
        field = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s'
        purpose = field % (b"purpose", b"", b"fine-tune\r\n") if path == "/v1/files" else b""
        name = b"file" if purpose else b"data"
        self.connection.endheaders(purpose + field % (name, b'; filename="a.jsonl"', b""))

    def send(self, size: int) -> None:
        """Send so many bytes of the file."""
        self.connection.send(b"x" * size)

    def answer(self) -> tuple[int, str]:
        """Status and message of the answer; the upload ends."""
        response = self.connection.getresponse()
        message = json.loads(response.read())["error"]["message"]
        self.connection.close()
        return response.status, message


@pytest.mark.long
def test_an_upload_beyond_the_quota_ends_while_it_arrives(server: HttpServer, keys: dict[str, str]) -> None:
    """None of these ends its body: the answer comes before."""
    key, most = keys["dora"], 1 << 30
    first, second = (Sending(server.url, key, "/v1/files", most) for _ in range(2))
    second.send(2 * QUOTA)
    status, message = second.answer()
    assert status == 400 and "this key has files of 0 bytes, and is sending" in message, message
    first.send(5 * QUOTA // 6)  # of which 64 KiB may be the form's other fields
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60) as dora:
        announced: Any = {"filename": "a.jsonl", "purpose": "fine-tune", "mime_type": ""}
        half = b"x" * (QUOTA // 2)
        with pytest.raises(openai.BadRequestError, match=f"its quota is {QUOTA}"):  # beside what is being sent
            for _ in range(1000):  # which may not have arrived yet
                dora.files.delete(dora.files.create(file=("a.txt", half), purpose="fine-tune").id)
        first.connection.close()
        for _ in range(1000):
            try:
                parts = dora.uploads.create(bytes=QUOTA, **announced)
            except openai.BadRequestError:  # the server has not seen the end yet
                continue
            break
        with pytest.raises(openai.BadRequestError):  # all of it is promised
            dora.files.create(file=b"1", purpose="fine-tune")
        part = Sending(server.url, key, f"/v1/uploads/{parts.id}/parts", most)
        part.send(2 * QUOTA)
        status, message = part.answer()
        assert status == 400 and f"more than the announced {QUOTA} bytes" in message
        assert dora.uploads.cancel(parts.id).status == "cancelled"
        dora.files.create(file=("a.txt", half), purpose="fine-tune")


@pytest.mark.long
def test_models_grade(client: openai.OpenAI, supervised: FineTuningJob) -> None:
    graders: Any = client.fine_tuning.alpha.graders
    run = graders.run(grader=SCORE, model_sample="four", item={})
    assert 0 <= run.reward <= 10 and run.metadata.sampled_model_name == "org/marked" and run.metadata.token_usage > 0
    label = {"type": "label_model", "name": "kind", "model": supervised.fine_tuned_model, "input": SCORE["input"],
             "labels": ["good", "bad"], "passing_labels": ["good", "bad"]}  # fmt: skip
    both = {"type": "multi", "graders": {"score": SCORE, "kind": label}, "calculate_output": "score * 0 + kind"}
    run = graders.run(grader=both, model_sample="four", item={})
    assert run.reward == 1 and set(run.sub_rewards) == {"score", "kind"}, run
    assert len(run.model_grader_token_usage_per_model) == 2
    job = reinforced(client, 10, both, {"n_epochs": 1, "batch_size": 5}, answer_tokens=4, group_size=2)
    events = [event for event in client.fine_tuning.jobs.list_events(job.id) if event.type == "metrics"]
    assert [event.data["train_reward_mean"] for event in events] == [1.0, 1.0]  # type: ignore[index]
    assert [each.step_number for each in client.fine_tuning.jobs.checkpoints.list(job.id)] == [2]
    assert not any("ckpt-step-0" in model.id for model in client.models.list())
    assert all(event.data["rewards/not_scored"] == 0 for event in events)  # type: ignore[index]


@pytest.mark.long
def test_a_job_is_paused_resumed_and_cancelled(client: openai.OpenAI, data: str) -> None:
    job = client.fine_tuning.jobs.create(model="org/marked", training_file=data, hyperparameters={"n_epochs": 50})
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"  # type: ignore[comparison-overlap]
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled and cannot be cancelled"):
        client.fine_tuning.jobs.cancel(job.id)


@pytest.mark.long
def test_a_repeated_creation_is_one_job(
    client: openai.OpenAI, server: HttpServer, keys: dict[str, str], data: str
) -> None:
    body: dict[str, Any] = {"model": "org/marked", "training_file": data, "suffix": "once"}
    headers = {"Authorization": f"Bearer {keys['anna']}"}

    def create(**more: str) -> str:
        answer = httpx.post(f"{server.url}/v1/fine_tuning/jobs", json=body, headers=headers | more, timeout=60)
        return str(answer.json()["id"])

    first = create(**{"x-stainless-retry-count": "0"})
    assert create(**{"x-stainless-retry-count": "1"}) == first
    second = create(**{"Idempotency-Key": "k"})
    assert second != first and create(**{"Idempotency-Key": "k"}) == second
    for job_id in (first, second):
        client.fine_tuning.jobs.cancel(job_id)
    key = {"Idempotency-Key": "f"}
    kept = client.files.create(file=("a.txt", b"1"), purpose="fine-tune", extra_headers=key)
    assert client.files.create(file=("a.txt", b"1"), purpose="fine-tune", extra_headers=key).id == kept.id
    asked = time.monotonic()
    with pytest.raises(openai.ConflictError, match=f"made the file {kept.id} with other content") as caught:
        client.files.create(file=("a.txt", b"2"), purpose="fine-tune", extra_headers=key)
    assert caught.value.response.headers["x-should-retry"] == "false" and time.monotonic() - asked < 20
    client.files.delete(kept.id)


@pytest.mark.long
def test_jobs_are_listed_by_page_and_metadata(client: openai.OpenAI, supervised: FineTuningJob, data: str) -> None:
    client.fine_tuning.jobs.cancel(client.fine_tuning.jobs.create(model="org/marked", training_file=data).id)
    found = list(client.fine_tuning.jobs.list(limit=1))
    assert supervised.id in [job.id for job in found] and len({job.id for job in found}) == len(found) > 1
    assert [job.id for job in client.fine_tuning.jobs.list(metadata={"team": "red"})] == [supervised.id]
    assert list(client.fine_tuning.jobs.list(metadata={"team": "blue"})) == []


@pytest.mark.long
def test_files(client: openai.OpenAI, other: openai.OpenAI) -> None:
    content = talks(12)
    file = client.files.create(
        file=("a.jsonl", content), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.bytes, file.filename, file.status, file.purpose) == (len(content), "a.jsonl", "processed", "fine-tune")
    assert file.expires_at == pytest.approx(file.created_at + 3600, abs=1)
    assert client.files.content(file.id).content == content
    unnamed = client.files.create(file=content, purpose="fine-tune")
    assert unnamed.status == "processed"
    assert [each.id for each in client.files.list(limit=1, order="asc")][-2:] == [file.id, unnamed.id]
    assert list(client.files.list(purpose="other")) == []
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        other.files.retrieve(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    bad = client.files.create(file=("b.jsonl", content + b'\n{"messages": []}\nno json'), purpose="fine-tune")
    nothing = client.files.create(file=("n.jsonl", b"[]"), purpose="fine-tune")
    assert nothing.status == "error" and not re.search(r"of 0|line 0", nothing.status_details or "of 0")
    assert bad.status == "error" and "2 of 14 rows cannot be used: line 13: " in (bad.status_details or "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (talks(9), "the file has 9 rows; 10 at least"),
        (
            talks(12) + b'\n{"messages": 1}',
            "1 of 13 rows cannot be used: line 13: messages is 1; it must be a list of messages",
        ),
        (
            talks(12).replace(b'"assistant"', b'"assistant", "weight": 0'),
            "12 of 12 rows cannot be used: line 1: no message of the assistant is learned",
        ),
        (talks(12).replace(b'"messages"', b'"weight": 0, "messages"'), "nothing of it is trained on"),
        (pairs(), "line 1: no column is recognised as completion"),
    ],
)
def test_data_that_cannot_be_used_fails_the_job(client: openai.OpenAI, content: bytes, sentence: str) -> None:
    file = client.files.create(file=("x.jsonl", content), purpose="fine-tune")
    job = ended(client, client.fine_tuning.jobs.create(model="org/marked", training_file=file.id).id, "failed")
    assert job.error is not None and (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
    assert sentence in job.error.message and file.id not in job.error.message and job.finished_at
    last = next(iter(client.fine_tuning.jobs.list_events(job.id)))
    assert last.level == "error" and sentence in last.message


MISTAKES: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "gpt-9"}, 404, "model", f"there is no model 'gpt-9' here; there are {DOCUMENTED}, org/marked"),
    ({"training_file": "file-none"}, 404, "training_file", "there is no file 'file-none'"),
    ({"validation_file": "file-none"}, 404, "validation_file", "there is no file"),
    ({"suffix": "x" * 65}, 400, "suffix", "at most 64 characters"),
    ({"seed": "one"}, 400, "seed", "valid integer"),
    ({"metadata": {str(key): "" for key in range(17)}}, 400, "metadata", "there are 17 pairs; 16 at most"),
    ({"metadata": {"a": "x" * 513}}, 400, "metadata", "no text of at most 512 characters"),
    ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters.n_epochs", "a whole number from 1 to 50"),
    ({"hyperparameters": {"n_epochs": "2"}}, 400, "hyperparameters.n_epochs", 'is "2"; it must be'),
    ({"hyperparameters": {"n_epochs": 51}}, 400, "hyperparameters.n_epochs", "is 51"),
    ({"hyperparameters": {"batch_size": 1.5}}, 400, "hyperparameters.batch_size", 'must be "auto" or a whole number'),
    ({"hyperparameters": {"learning_rate_multiplier": 0}}, 400, "hyperparameters.learning_rate_multiplier", "above 0"),
    ({"method": {"type": "magic"}}, 400, "method", "'supervised', 'dpo' or 'reinforcement'"),
    (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}},
        400,
        "method.dpo.hyperparameters.beta",
        "is 3",
    ),
    ({"method": {"type": "supervised", "dpo": {"hyperparameters": {"n_epochs": 1}}}}, 400, "method.dpo", "supervised"),
    ({"method": {"type": "dpo", "supervised": {}}}, 400, "method.supervised", "takes no settings of supervised"),
    (
        {
            "method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 1}}},
            "hyperparameters": {"n_epochs": 2},
        },
        400,
        "hyperparameters",
        "are in method.supervised as well",
    ),
    ({"integrations": [{"type": "wandb"}]}, 400, "integrations", "Field required"),
    ({"integrations": [{"type": "neptune"}]}, 400, "integrations", "'wandb'"),
    ({"n_epochs": 3}, 400, "n_epochs", "is not a parameter that this server knows"),
    ({"gradwire": {"folder": "/"}}, 400, "folder", "the server's to choose"),
    ({"gradwire": {"seed": 1}}, 400, "gradwire", "by OpenAI's name"),
    ({"gradwire": {"lora_rnk": 4}}, 400, "gradwire", "did you mean lora_rank"),
    ({"gradwire": {"lora": "x"}}, 400, "gradwire", "must be a whole number"),
    ({"gradwire": {"lora": 4, "full": True}}, 400, "gradwire", "gradwire has lora and full, which say the same"),
    ({"gradwire": {"full": 1}}, 400, "gradwire", "must be true or false"),
]


@pytest.mark.long
@pytest.mark.parametrize(("wrong", "status", "param", "sentence"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_told(
    client: openai.OpenAI, data: str, wrong: dict[str, Any], status: int, param: str, sentence: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.fine_tuning.jobs.create(**({"model": "org/marked", "training_file": data} | _as_extra(wrong)))  # type: ignore[arg-type]
    error: Any = caught.value.body
    assert (caught.value.status_code, error["param"]) == (status, param), error
    assert sentence in error["message"] and set(error) == {"message", "type", "param", "code"}


def _as_extra(wrong: dict[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in wrong.items() if name in ("n_epochs", "gradwire")}
    return {name: value for name, value in wrong.items() if name not in extra} | (
        {"extra_body": extra} if extra else {}
    )


@pytest.mark.long
def test_other_mistakes_are_told(
    client: openai.OpenAI, supervised: FineTuningJob, server: HttpServer, keys: dict[str, str]
) -> None:
    calls: list[tuple[Any, int, str | None]] = [
        (lambda: client.fine_tuning.jobs.retrieve("ftjob-none"), 404, "job_id"),
        (lambda: list(client.fine_tuning.jobs.list(after="ftjob-none")), 400, "after"),
        (lambda: list(client.fine_tuning.jobs.list(limit=0)), 400, "limit"),
        (lambda: list(client.fine_tuning.jobs.list_events(supervised.id, after="ftevent-1")), 400, "after"),
        (lambda: list(client.fine_tuning.jobs.checkpoints.list(supervised.id, after="x")), 400, "after"),
        (lambda: client.files.create(file=b"", purpose="fine-tune"), 400, "file"),
        (lambda: client.files.create(file=b"1", purpose="vision"), 400, "purpose"),
        (lambda: client.files.delete("file-none"), 404, "file_id"),
        (
            lambda: client.files.create(
                file=b"1", purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 5}
            ),
            400,
            "expires_after",
        ),
    ]
    for call, status, param in calls:
        with pytest.raises(openai.APIStatusError) as caught:
            call()
        error: Any = caught.value.body
        assert (caught.value.status_code, error["param"]) == (status, param), error
    headers = {"Authorization": f"Bearer {keys['anna']}"}
    no_form = httpx.post(f"{server.url}/v1/files", json={}, headers=headers)
    assert no_form.status_code == 400 and "multipart/form-data" in no_form.json()["error"]["message"]
    assert httpx.post(f"{server.url}/v1/files", files={"file": b"1"}).status_code == 401


@pytest.mark.long
def test_an_unknown_hyperparameter_is_a_warning(client: openai.OpenAI, data: str) -> None:
    job = client.fine_tuning.jobs.create(model="org/marked", training_file=data, hyperparameters={"momentum": 1})  # type: ignore[typeddict-unknown-key]
    client.fine_tuning.jobs.cancel(job.id)
    said = [event.message for event in client.fine_tuning.jobs.list_events(job.id) if event.level == "warn"]
    assert said == ["momentum is no hyperparameter of supervised; it has no effect"]
    numbers = job.hyperparameters
    assert numbers is not None and (numbers.n_epochs, numbers.batch_size, numbers.learning_rate_multiplier) == (
        10,
        4,
        1,
    )


@pytest.mark.long
def test_the_code_of_the_page_runs(
    server: HttpServer, keys: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", keys["anna"])
    page = (Path(__file__).parents[3] / "docs" / "openai_fine_tuning.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, {})
    assert "The job has successfully completed" in capsys.readouterr().out


def test_auto_follows_the_written_rules() -> None:
    for rows, tokens, batch, epochs in [
        (10_000, 200, 32, 1),  # 8192 / 200 = 41 rows, at most 32
        (10_000, 2_000, 4, 1),
        (100, 10, 8, 8),  # an eighth of the rows; ceil(100 / 13)
        (10, 9_000, 1, 10),
    ]:
        file = jobs_pb2.File(num_lines=rows, size_bytes=rows * tokens * 4)
        model = pb.ModelInfo(context_length=4096)
        found = resolve("supervised", {}, file, model, "hyperparameters", evaluates=True)
        assert (found.numbers["batch_size"], found.numbers["n_epochs"]) == (batch, epochs)
        assert found.settings["learning_rate_multiplier"] == 1 and "learning_rate" not in found.settings
        assert found.settings["eval_every"] == math.ceil(rows / batch)
