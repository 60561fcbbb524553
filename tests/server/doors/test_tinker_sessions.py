"""Sessions of the Tinker door by what was said of them, and prompts that fill the context."""

from __future__ import annotations

import uuid

import numpy as np
from gradwire_proto.v1 import tinker_pb2 as pb
from support.tinker import TinkerClient, datum, forward_backward


async def test_sessions_are_found_by_what_was_said_of_them(tinker: TinkerClient) -> None:
    project = str(uuid.uuid4())
    said = {"tags": [], "sdk_version": "0.38.0", "project_id": project, "user_metadata": {"a": "b"}}
    names = ("First Try of Cats", "second try of cats", "dogs")
    ids = [(await tinker.post("create_session", said | {"display_name": name}))["session_id"] for name in names]
    tinker.session_id = ids[0]
    model = await tinker.model()
    saved = {"model_id": model, "seq_id": 1, "path": "one"}
    await tinker.done("save_weights", saved)
    await tinker.post(f"sessions/{ids[2]}/finish", {"reason": {"type": "errored"}})

    async def found(**asked: object) -> list[str]:
        answer = await tinker.post("sessions/search", {"project_ids": [project], "owner": {"type": "own"}} | asked)
        return [session["session_id"] for session in answer["sessions"]]

    assert await found() == ids[::-1]
    assert await found(display_name="CATS try") == ids[1::-1] and await found(session_id=ids[2]) == [ids[2]]
    assert await found(user_metadata={"a": "c"}) == [] and await found(project_ids=["none"]) == []
    assert await found(statuses=[{"type": "active"}]) == ids[1::-1]
    finished = {"type": "client_finished", "reasons": ["errored", "success"]}
    assert await found(statuses=[finished]) == [ids[2]] and await found(statuses=[{"type": "failed"}]) == []
    pages, cursor = [], None
    for _ in ids:
        asked = {"project_ids": [project], "limit": 1} | ({"cursor": cursor} if cursor else {})
        page = await tinker.post("sessions/search", asked)
        pages += page["sessions"]
        cursor = page["next_cursor"]
    assert cursor is None and [page["session_id"] for page in pages] == ids[::-1]
    assert pages[0]["status"] == {"type": "client_finished", "reason": {"type": "errored"}}
    assert [page["checkpoints_count"] for page in pages] == [0, 0, 1] and pages[2]["checkpoint_storage_bytes"] > 1000
    runs = await tinker.send("GET", "training_runs", params={"project_id": project})
    assert [run["training_run_id"] for run in runs["training_runs"]] == [model]
    assert runs["training_runs"][0]["last_checkpoint"]["base_model"] == "tiny"
    none = await tinker.send("GET", "training_runs", params={"project_id": "none"})
    assert none["training_runs"] == [] and none["cursor"]["total_count"] == 0
    other = str(uuid.uuid4())
    await tinker.send("PUT", f"sessions/{ids[0]}/project", json={"project_id": other})
    await tinker.send("PUT", f"sessions/{ids[0]}/project", 422, json={"project_id": ""})
    moved = await tinker.send("GET", "training_runs", params={"project_id": other})
    assert [run["training_run_id"] for run in moved["training_runs"]] == [model] and await found() == ids[:0:-1]


async def test_a_prompt_that_fills_the_context_is_scored(tinker: TinkerClient) -> None:
    sampler = {"session_id": tinker.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = (await tinker.post("create_sampling_session", sampler))["sampling_session_id"]
    asked = {"sampling_session_id": sampler_id, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
    rows = []
    for number, length in enumerate((256, 255)):
        chunk = {"type": "encoded_text", "tokens": [5] * length}
        body = asked | {"seq_id": number, "prompt": {"chunks": [chunk]}}
        answer = pb.SampleResponse.FromString(await tinker.done("asample", body))
        assert [len(sequence.tokens) // 4 for sequence in answer.sequences] == [256 - length]
        rows.append(np.frombuffer(answer.prompt_logprobs, np.float32))
    assert len(rows[0]) == 256 and np.allclose(rows[0][1:255], rows[1][1:], atol=1e-4)


async def test_two_clients_on_one_session_cannot_mix_their_numbers(tinker: TinkerClient) -> None:
    """What the second one repeats is answered as to the first; other content under a used number is refused."""
    other = TinkerClient(tinker._http)
    other.session_id = tinker.session_id
    model = await tinker.model()
    assert await other.model() == model
    rows, others = [datum(1)], [datum(2)]
    promise = await tinker.post("forward_backward", forward_backward(model, 1, rows))
    assert await other.post("forward_backward", forward_backward(model, 1, rows)) == promise
    refused = await other.post("forward_backward", forward_backward(model, 1, others), status=422)
    assert "1" in refused["detail"]
    ahead = await other.step(model, 3)
    await other.post("forward_backward", forward_backward(model, 2, others))
    steps = [await client.wait(await client.step(model, 3)) for client in (tinker, other)]
    assert [step["metrics"]["step:max"] for step in steps] == [1, 1]
    assert (await tinker.wait(ahead))["metrics"]["step:max"] == 1
