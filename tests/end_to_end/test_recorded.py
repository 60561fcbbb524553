"""Recorded batches and rollouts, the operations of a run, and a viewer's key, over a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import sync
from gradwire_server.journal.recorded_files import LEAST_BYTES
from support.server import Server

pytestmark = pytest.mark.long

GROUPS: dict[str, Any] = {
    "prompt_ids": [[5, 6, 7], [8, 9]],
    "response_ids": [[[10, 11], [12, 13, 14]], [[15], [16, 17]]],
    "response_masks": [[[1, 1], [1, 0, 1]], [[1], [1, 1]]],
    "rewards": [[1.0, 0.0], [0.5, 0.25]],
    "sampler_log_probs": [[[-1.0, -2.0], [-3.0, -4.0, -5.0]], [[-6.0], [-7.0, -8.0]]],
}


@pytest.fixture(scope="module")
def served(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, dict[str, str]]]:
    from gradwire_server.access.key_file import KeyFile

    state = tmp_path_factory.mktemp("recorded")
    keys = {name: KeyFile(state).create(name, role) for name, role in (("ada", "user"), ("eve", "viewer"))}
    server = Server(tiny_model_path, state, "--limit", f"max_recorded_bytes={3 * LEAST_BYTES}").start()
    yield server, keys
    server.end()


@pytest.fixture
def service(served: tuple[Server, dict[str, str]]) -> Iterator[sync.ServiceClient]:
    with gradwire.sync.connect(served[0].address, api_key=served[1]["ada"]) as service:
        yield service


def test_a_recorded_batch_is_what_its_loss_saw_and_changes_no_bit(service: sync.ServiceClient) -> None:
    results = []
    for share in (1.0, 0.0):
        run = service.create_run("tiny", lora={"rank": 2}, seed=3, record_batches=share)
        losses = []
        for _ in range(2):
            losses.append(run.forward_backward(GROUPS, "grpo").result(60).loss)
            run.optim_step(learning_rate=1e-2).result(60)
        rows = {"input_ids": [[5, 6, 7, 8]], "loss_mask": [[0, 0, 1, 1]]}
        seen = run.forward_backward(rows, "causal_lm", outputs=["logprobs"]).result(60)
        results.append((losses, seen.loss, seen.outputs["logprobs"][0].tolist()))
        if not share:
            assert run.list_recordings() == []
            continue
        recordings = run.list_recordings()
        assert [(each.kind, each.number, each.step) for each in recordings] == [
            ("batch", 1, 0),
            ("batch", 3, 1),
            ("batch", 5, 2),
        ]
        batch = run.recorded_batch(5)
        (sequence,) = batch.sequences
        assert sequence.token_ids.tolist() == [5, 6, 7, 8] and sequence.scored.tolist() == [False, False, True, True]
        np.testing.assert_array_equal(sequence.logprobs[2:], seen.outputs["logprobs"][0])
        assert np.isnan(sequence.logprobs[:2]).all()
    assert results[0] == results[1], "recording changed what was computed"


def test_a_recorded_group_has_its_rewards_and_both_log_probabilities(service: sync.ServiceClient) -> None:
    run = service.create_run("tiny", lora={"rank": 2}, record_batches=1.0)
    result = run.forward_backward(GROUPS, "grpo").result(60)
    assert result.outputs == {}, "the log-probabilities are the recording's alone"
    batch = run.recorded_batch(1)
    assert batch.recording.loss_fn == "grpo" and batch.recording.loss == result.loss
    assert [(each.row, each.part, each.reward) for each in batch.sequences] == [
        (0, "sample 1", 1.0),
        (0, "sample 2", 0.0),
        (1, "sample 1", 0.5),
        (1, "sample 2", 0.25),
    ]
    second = batch.sequences[1]
    assert second.token_ids.tolist() == [5, 6, 7, 12, 13, 14]
    assert second.scored.tolist() == [False, False, False, True, False, True]
    assert second.sampler_logprobs[second.scored].tolist() == [-3.0, -5.0]
    assert np.isfinite(second.logprobs[second.scored]).all()
    np.testing.assert_allclose(second.ratios[3], np.exp(second.logprobs[3] + 3.0))
    for each, (reward, other) in zip(batch.sequences, [(1, 0), (0, 1), (0.5, 0.25), (0.25, 0.5)], strict=True):
        expected = (reward - other) / 2 / (np.std([reward, other], ddof=1) + 1e-4)
        np.testing.assert_allclose(each.advantages[each.scored], expected, rtol=1e-5)
        assert np.isnan(each.advantages[~each.scored]).all()
    rewards = {"input_ids": [[5, 6, 7, 8], [9, 10, 11]], "rewards": [1.0, -0.5]}
    result = run.forward_backward(rewards, "reinforce").result(60)
    batch = run.recorded_batch(2)
    assert [each.advantages[1:].tolist() for each in batch.sequences] == [[1.0] * 3, [-0.5] * 2]
    assert result["advantage_mean"] == pytest.approx((3 * 1.0 - 2 * 0.5) / 5)
    with pytest.raises(gradwire.NotFoundError, match="no recording batch 7"):
        run.recorded_batch(7)
    with pytest.raises(gradwire.InvalidArgumentError, match="a share from 0 to 1"):
        service.create_run("tiny", lora={"rank": 2}, record_batches=1.5)


def test_recordings_are_bounded_and_go_with_their_run(
    service: sync.ServiceClient, served: tuple[Server, dict[str, str]]
) -> None:
    run = service.create_run("tiny", lora={"rank": 2})
    for iteration in range(4):
        assert run.record_rollouts(iteration, [{"task": "t", "reward": float(iteration), "text": "x" * 500}]) == 1
    assert [each.number for each in run.list_recordings()] == [1, 2, 3]
    assert run.recorded_rollouts(3)[0]["reward"] == 3.0
    with pytest.raises(gradwire.LimitExceededError, match="max_recorded_bytes"):
        run.record_rollouts(9, [{"text": "x" * 3 * LEAST_BYTES}])
    folder = served[0].state_dir / "recorded" / run.run_id
    assert folder.is_dir()
    service.delete_run(run.run_id)
    assert not folder.exists()


def test_the_newest_operations_say_what_became_of_them(service: sync.ServiceClient) -> None:
    run = service.create_run("tiny", lora={"rank": 2})
    run.forward_backward({"input_ids": [[5, 6, 7]]}, "causal_lm").result(60)
    run.optim_step().result(60)
    with pytest.raises(gradwire.InvalidBatchError):
        run.forward_backward({"input_ids": [[5, 6, 700_000]]}, "causal_lm").result(60)
    found = run.activity()
    assert [(each.seq, each.operation, each.state) for each in found.operations] == [
        (3, "forward_backward", "failed"),
        (2, "optim_step", "succeeded"),
        (1, "forward_backward", "succeeded"),
    ]
    assert "input_ids" in found.operations[0].error and found.operations[2].engine_s > 0
    assert found.recoveries == 0 and found.replay_s > 0
    assert run.info().engine_s > 0
    assert service.list_queues() == []


def test_a_viewer_reads_everything_and_changes_nothing(
    service: sync.ServiceClient, served: tuple[Server, dict[str, str]], tmp_path: Path
) -> None:
    """Every RPC that the server knows is called by hand with a viewer's key."""
    import grpc
    from gradwire_proto.v1 import jobs_pb2, sessions_pb2
    from gradwire_proto.v1 import training_pb2 as pb
    from gradwire_server.access.calls import RPCS, VIEWED

    server, keys = served
    run = service.create_run("tiny", lora={"rank": 2}, name="hers")
    run.forward_backward({"input_ids": [[5, 6, 7]]}, "causal_lm").result(60)
    run.save_checkpoint("kept").result(60)
    with gradwire.sync.connect(server.address, api_key=keys["eve"]) as viewer:
        assert "hers" in {each.name for each in viewer.list_runs()}
        seen = viewer.get_training_client(run.run_id)
        assert len(seen.history()) == 2 and seen.list_checkpoints()[0].name == "kept"
        assert viewer.server_info().role == "viewer" and viewer.server_info().key_name == "eve"
        with pytest.raises(gradwire.PermissionDeniedError, match="a viewer's: it reads everything and changes"):
            viewer.delete_run(run.run_id)
    before = json.dumps([str(each) for each in service.list_runs()])
    metadata = (("authorization", f"Bearer {keys['eve']}"),)
    allowed = set()
    with grpc.insecure_channel(server.address) as channel:
        for file in (pb.DESCRIPTOR, jobs_pb2.DESCRIPTOR, sessions_pb2.DESCRIPTOR):
            for name, declared in file.services_by_name.items():
                for method in declared.methods:
                    call = channel.stream_stream(f"/gradwire.v1.{name}/{method.name}")
                    try:
                        for _ in call(iter([b""]), metadata=metadata, timeout=2):
                            break
                        refused = False
                    except grpc.RpcError as error:
                        refused = error.code() is grpc.StatusCode.PERMISSION_DENIED
                    if not refused:
                        allowed.add(method.name)
    assert allowed == {name for name, kind in RPCS.items() if kind in VIEWED}
    assert not any(name.startswith(("Create", "Delete", "Submit", "Cancel", "Save", "Open")) for name in allowed)
    assert json.dumps([str(each) for each in service.list_runs()]) == before
