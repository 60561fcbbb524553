"""The engine as the process that a server starts, over its link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine_client.launcher import environment
from support.engine import EngineProcess, token_rows

ROWS = [[1, 20, 30, 40, 50], [1, 9, 8, 7, 6, 5, 4], [1, 60]]


@pytest.mark.parametrize(
    ("said", "waiting"),
    [
        ({}, ("PASSIVE", "10000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
        ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
    ],
)
def test_its_threads_spin_for_a_moment_where_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str], waiting: tuple[str, str | None]
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    found = environment()
    assert (found["OMP_WAIT_POLICY"], found.get("GOMP_SPINCOUNT")) == waiting


@pytest.mark.parametrize("module", ["gradwire_server.engine.process", "gradwire_server.engine.process.follower"])
def test_a_process_whose_parent_is_gone_ends_before_it_imports(module: str) -> None:
    words = [sys.executable, "-X", "importtime", "-m", module, str(os.getppid())]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0 and "process.parent" in ended.stderr and "torch" not in ended.stderr


def test_a_process_ends_with_its_parent_while_it_imports() -> None:
    code = (
        "import os, subprocess, sys, time\n"
        "engine = subprocess.Popen([sys.executable, '-m', 'gradwire_server.engine.process', str(os.getpid())])\n"
        "print(engine.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        end = time.monotonic() + 30
        while "libtorch" not in Path(f"/proc/{engine.pid}/maps").read_text():  # its imports have begun
            assert time.monotonic() < end and engine.is_running()
            time.sleep(0.002)
        parent.kill()
    end = time.monotonic() + 1
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def engine(tiny_model_path: Path, state: Path) -> Iterator[EngineProcess]:
    engine = EngineProcess({"tiny": tiny_model_path}, state)
    yield engine
    assert engine.shut_down() == 0


@pytest.mark.long
def test_it_says_what_it_holds(engine: EngineProcess, tiny_model_path: Path) -> None:
    hello = engine.hello.hello
    assert hello.device == "cpu"
    (model,) = hello.models
    assert (model.name, model.context_length, model.has_tokenizer) == ("tiny", 256, True)
    assert model.vocab_size > 90
    assert list(model.eos_token_ids) == [2]
    assert hello.tokenizer_files["tiny"] == str(tiny_model_path / "tokenizer.json")
    losses = {loss.name: loss for loss in hello.losses}
    assert losses["causal_lm"].fields[0].padding_mask == "attention_mask"
    assert "beta" in json.loads(losses["dpo"].config_schema_json)["properties"]
    assert losses["dpo"].metrics and losses["dpo"].summary


@pytest.fixture(scope="module")
def another(tiny_model_path: Path, state: Path) -> Iterator[EngineProcess]:
    """A second process over the same folder."""
    engine = EngineProcess({"tiny": tiny_model_path}, state)
    yield engine
    engine.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "config"), [("full", {}), ("lora", {"lora": {"rank": 4, "dropout": 0.2}, "head": "value"})]
)
def test_a_checkpoint_goes_on_bit_for_bit_in_another_process(
    engine: EngineProcess, another: EngineProcess, run: str, config: dict[str, object], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    batches = [token_rows([generator.integers(3, 90, length) for length in (3, 12, 7)]) for _ in range(7)]
    assert engine.create(run, seed=5, **config).run_created.num_trainable_parameters > 0
    engine.train(run, batches[0])
    engine.do(run, update_reference=pb.UpdateReference(ema=0.5))
    engine.train(run, batches[1])
    engine.do(run, update_reference=pb.UpdateReference(ema=0.5))
    engine.do(run, batches[2], forward_backward=pb.LossCall(loss_fn="causal_lm"))  # accumulated, not stepped
    saved = engine.do(run, save_checkpoint=pb.SaveCheckpoint(name="mid", note="a note")).proto.checkpoint
    assert (saved.path, saved.step, saved.seq, saved.note) == (f"{run}/mid", 2, 8, "a note")

    def go_on(engine: EngineProcess) -> list[object]:
        told: list[object] = [engine.train(run, batch) for batch in batches[3:6]]
        sampled = engine.do(
            run, token_rows(ROWS, "prompt_ids"), sample=pb.SampleCall(max_tokens=5, temperature=1, seed=3)
        )
        told.append(sampled.columns["token_ids"].values.tolist())
        told.append(engine.logprobs(run, batches[6]).tolist())
        told.append(engine.logprobs(run, batches[6], model="ema").tolist())
        return told

    expected = go_on(engine)
    assert expected[-1] != expected[-2]
    created = another.create(run, seed=5, checkpoint=f"{run}/mid", **config).run_created
    assert (created.step, created.seq) == (2, 8)
    assert go_on(another) == expected
    loaded = another.do(run, load_checkpoint=pb.LoadCheckpoint(checkpoint="mid")).proto.checkpoint
    assert loaded.step == 2
    assert go_on(another) == expected


@pytest.mark.long
def test_replies_come_in_order_and_a_broken_payload_fails_its_operation_only(engine: EngineProcess) -> None:
    engine.create("run-a", lora=4)
    specs, buffers = codec.encode(token_rows([[1, 2, 3]]))
    for number in range(1, 41):
        operation = engine_pb2.EngineOperation(
            run_id="run-a",
            seq=number,
            operation=pb.Operation(forward=pb.LossCall(outputs=["logprobs"])),
            tensors=specs,
        )
        payload = [b"\x09\0\0\0" + bytes(12)] if number == 20 else buffers  # a row of 9 tokens among 3
        engine.link.send(engine_pb2.EngineRequest(id=1000 + number, operation=operation), payload)
    replies = [engine.receive()[0] for _ in range(40)]
    assert [reply.id for reply in replies] == list(range(1001, 1041))
    failed = [reply.result for reply in replies if reply.result.status == pb.STATUS_FAILED]
    assert [(result.seq, result.error.code, result.error.field) for result in failed] == [
        (20, pb.ERROR_CODE_INVALID_BATCH, "input_ids")
    ]


@pytest.mark.long
def test_operations_do_not_wait_while_a_checkpoint_is_read_back(engine: EngineProcess, state: Path) -> None:
    engine.create("run-b", lora=4)
    engine.do("run-b", save_checkpoint=pb.SaveCheckpoint(name="slow"))
    manifest = next(state.rglob("slow/manifest.json"))
    content = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)  # the disk does not answer
    verify = engine_pb2.EngineVerifyCheckpoint(checkpoint="run-b/slow")
    for number in (1001, 1002):
        engine.link.send(engine_pb2.EngineRequest(id=number, verify_checkpoint=verify))
    engine.do("run-b", zero_grad=pb.ZeroGrad())
    engine.create("run-c", lora=4)
    for number in (1001, 1002):
        manifest.write_bytes(content)
        reply, _ = engine.receive()
        assert (reply.id, reply.result.checkpoint.path) == (number, "run-b/slow")
    manifest.unlink()
    assert engine.request(verify_checkpoint=verify)[0].error.code == pb.ERROR_CODE_CHECKPOINT_CORRUPT


@pytest.mark.long
def test_a_model_that_cannot_be_used_is_reported_and_not_retried(tmp_path: Path) -> None:
    engine = EngineProcess({"none": tmp_path / "nowhere"}, tmp_path)
    assert engine.hello.error.code == pb.ERROR_CODE_UNSUPPORTED
    assert "model 'none'" in engine.hello.error.message
    assert "nowhere" not in engine.hello.error.message  # its path is for the log
    assert engine.process.wait(120) == 1
    engine.link.close()


@pytest.mark.long
def test_it_ends_when_its_parent_is_killed(tiny_model_path: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from support.engine import EngineProcess;"
        f"engine = EngineProcess({{'tiny': Path({str(tiny_model_path)!r})}}, Path({str(tmp_path)!r}));"
        "print(engine.process.pid, flush=True); sys.stdin.read()"
    )
    tests = Path(__file__).parents[2]
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(tests), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    parent.stdin.close()
    deadline = time.monotonic() + 60
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
