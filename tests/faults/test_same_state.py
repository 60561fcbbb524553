"""A restored run is the run that it was: what it is computed with, and what its operations give, is compared."""

from __future__ import annotations

import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import gradwire
import pytest
from gradwire.cli.app import app
from gradwire_server.journal.same_state import differences
from support.server import Server, free_port
from support.stage import wait_for
from support.tiny import tiny_model
from typer.testing import CliRunner

pytestmark = pytest.mark.long

ROW = {"input_ids": [[5, 9, 23, 7, 40, 11]]}
LOSS = """
import random

from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.registry import register_loss

@register_loss("mine", fields=[INPUT_IDS], metrics={}, reference="none", formula="none", streams=True)
def mine(batch, scores, config):
    return LossOutput({"mine": Term(-FACTOR * scores.logprobs.sum(), batch.num_scored, "tokens")})
"""


def test_what_is_new_or_gone_is_a_difference_but_for_losses() -> None:
    before = {"dtype": "float32", "kernels": "ab", "loss mine": "12", "loss theirs": "34"}
    now = {"dtype": "float32", "quantize": "nf4", "loss mine": "13", "loss new": "56"}
    found = ["kernels was ab, is none", "loss mine was 12, is 13", "quantize was none, is nf4"]
    assert differences(before, now) == found
    assert differences({}, now) == []


class Restarted:
    """A server that is killed and started again on the same folder, with other flags.

    Args:
        folder: Gets a model and a state folder.
    """

    def __init__(self, folder: Path) -> None:
        self.model, self.state = tiny_model(folder / "model"), folder / "state"
        self.address = f"127.0.0.1:{free_port()}"
        self.server: Server | None = None

    def start(self, *flags: str) -> None:
        self.kill()
        threads = () if "--threads" in flags else ("--threads", "1")
        self.server = Server(self.model, self.state, "--address", self.address, *threads, *flags).start()

    def kill(self) -> None:
        if self.server is not None and self.server.process.poll() is None:
            self.server.end(signal.SIGKILL)

    def train(self, loss: str = "causal_lm") -> str:
        """Take two steps of a run, and leave a third half-way."""
        with gradwire.sync.connect(self.address) as service:
            run = service.create_run("tiny", seed=3, lora={"rank": 2, "dropout": 0.1})
            for _ in range(2):
                run.forward_backward(ROW, loss).result()
                run.optim_step(learning_rate=1e-2).result()
            run.forward_backward(ROW, loss).result()
            return str(run.run_id)

    def parked(self, run_id: str) -> str:
        """Submit an operation, and wait until the run says why it does not go on."""
        with gradwire.sync.connect(self.address) as service:
            run = service.get_training_client(run_id)
            run.optim_step(learning_rate=1e-2)
            return str(wait_for("the run to be parked", lambda: run.info().parked, 60))

    def step(self, run_id: str) -> int:
        """Go on with the run, whose step may have been submitted before; returns its number of steps."""
        with gradwire.sync.connect(self.address) as service:
            run = service.get_training_client(run_id)
            for future in run.earlier_operations().values():
                future.result(60)
            run.forward_backward(ROW, "causal_lm").result(60)
            return int(run.optim_step(learning_rate=1e-2).result(60).step)

    def notes(self, run_id: str) -> list[str]:
        """What the run's history says of changes."""
        with closing(sqlite3.connect(self.state / "gradwire.db")) as database:
            query = "SELECT note FROM computed_with WHERE run_id = ? ORDER BY position"
            return [note for (note,) in database.execute(query, (run_id,))]


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Restarted]:
    server = Restarted(tmp_path)
    yield server
    server.kill()


def changed(weights: Path) -> None:
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)


@pytest.mark.slow  # four starts
def test_replaced_base_weights_park_the_run_until_they_are_accepted(
    restarted: Restarted, caplog: pytest.LogCaptureFixture
) -> None:
    restarted.start()
    run_id = restarted.train()
    restarted.kill()
    changed(restarted.model / "model.safetensors")
    restarted.start()
    reason = restarted.parked(run_id)
    assert "base model was" in reason and "--accept-changes" in reason
    caplog.clear()
    with gradwire.sync.connect(restarted.address) as service:
        assert service.get_training_client(run_id).earlier_operations()
        wait_for("the client to say it", lambda: "accepted operations wait" in caplog.text, 60)
        time.sleep(2)  # it has asked for results and reopened the run several times since
        assert caplog.text.count("accepted operations wait") == 1
    restarted.start("--accept-changes")
    assert restarted.step(run_id) == 4
    assert "base model was" in restarted.notes(run_id)[-1]


@pytest.mark.slow  # the servers of one test more
def test_replaced_base_weights_park_the_run_until_they_are_back(restarted: Restarted, tmp_path: Path) -> None:
    restarted.start()
    run_id = restarted.train()
    restarted.kill()
    weights = restarted.model / "model.safetensors"
    shutil.copy(weights, tmp_path / "kept")
    changed(weights)
    restarted.start()
    assert "base model was" in restarted.parked(run_id)
    restarted.kill()
    shutil.copy(tmp_path / "kept", weights)
    restarted.start()
    assert restarted.step(run_id) == 4 and restarted.notes(run_id) == [""]


@pytest.mark.slow
def test_the_owner_lets_a_run_go_on_with_what_changed_and_others_stay_parked(restarted: Restarted) -> None:
    restarted.start()
    run_id, other = restarted.train(), restarted.train()
    restarted.kill()
    changed(restarted.model / "model.safetensors")
    restarted.start()
    with (
        gradwire.sync.connect(restarted.address) as service,
        pytest.raises(gradwire.UnsupportedError, match="it is not parked"),
    ):
        service.get_training_client(run_id).accept_changes()
    reason = restarted.parked(run_id)
    assert "base model was" in reason and f"gradwire runs accept {run_id}" in reason
    assert "base model was" in restarted.parked(other)
    done = CliRunner().invoke(app, ["runs", "accept", run_id, "--address", restarted.address])
    assert done.exit_code == 0 and run_id in done.output
    assert restarted.step(run_id) == 4
    with gradwire.sync.connect(restarted.address) as service:
        changes = service.get_training_client(run_id).info().changes
        assert "base model was" in changes[0].note and "(accepted by its owner)" in changes[0].note
        other_info = service.get_training_client(other).info()
        assert "base model was" in other_info.parked and other_info.changes == ()
    restarted.start()  # killed: what was accepted stays accepted
    assert restarted.step(run_id) == 5
    with gradwire.sync.connect(restarted.address) as service:
        assert service.get_training_client(run_id).info().changes == changes


@pytest.mark.faults
@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--dtype", "float64"), "dtype was float32"),
        (("--threads", "2"), "threads was 1, is 2"),
        (("--quantize", "int8"), "quantize was none, is int8"),
        (("--kernels", "plain", "--compile"), "compile was none, is on"),
    ],
)
def test_other_arithmetic_parks_the_run(restarted: Restarted, flags: tuple[str, ...], named: str) -> None:
    restarted.start()
    run_id = restarted.train()
    restarted.start(*flags)
    assert named in restarted.parked(run_id)


def with_loss(folder: Path, factor: str) -> tuple[str, str]:
    file = folder / "mine.py"
    file.write_text(LOSS.replace("FACTOR", factor))
    return "--losses", str(file)


@pytest.mark.faults
def test_another_definition_of_a_loss_parks_the_run(restarted: Restarted, tmp_path: Path) -> None:
    restarted.start(*with_loss(tmp_path, "1.0"))
    run_id = restarted.train("mine")
    restarted.start(*with_loss(tmp_path, "2.0"))
    assert "loss mine was" in restarted.parked(run_id)


@pytest.mark.faults
def test_an_operation_that_gives_another_result_when_it_is_repeated_parks_the_run(
    restarted: Restarted, tmp_path: Path
) -> None:
    """A loss that draws random numbers of its own: no recovery can repeat it."""
    flags = with_loss(tmp_path, "random.random()")
    restarted.start(*flags)
    run_id = restarted.train("mine")
    restarted.start(*flags)
    reason = restarted.parked(run_id)
    assert "its operation 1 was repeated, and its loss was" in reason
    restarted.start(*flags, "--accept-changes")
    assert restarted.step(run_id) == 4


@pytest.mark.slow  # the servers of one test more
def test_a_replay_splits_and_recomputes_as_the_first_time_whatever_memory_there_is(restarted: Restarted) -> None:
    batch = {"input_ids": [[5 + 7 * place % 90 for place in range(length)] for length in (30, 6, 5, 4)]}
    restarted.start("--microbatch-tokens", "10", "--activation-budget-gib", "0.00001")
    with gradwire.sync.connect(restarted.address) as service:
        run = service.create_run("tiny", seed=3)
        result = run.forward_backward(batch, "causal_lm").result()
        assert dict(result.activations) == {"recompute+chunk": 1, "keep": 2}
        run.optim_step(learning_rate=1e-2).result()
        before, run_id = run.forward(ROW, outputs=["logprobs"]).result().outputs["logprobs"][0], run.run_id
    restarted.start()  # by itself this server would compute the batch at once, and keep everything
    with gradwire.sync.connect(restarted.address) as service:
        run = service.get_training_client(run_id)
        again = run.forward(ROW, outputs=["logprobs"]).result(60).outputs["logprobs"][0]
        assert again.tolist() == before.tolist()
        assert dict(run.forward_backward(batch, "causal_lm").result(60).activations) == {"keep": 1}
    assert restarted.notes(run_id) == [""]
