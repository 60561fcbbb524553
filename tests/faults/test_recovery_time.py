"""What a recovery costs: the server says it beforehand, and keeps it within ``--max-recovery-seconds``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gradwire
import pytest
from gradwire.cli.app import app
from support.server import Server
from typer.testing import CliRunner

pytestmark = pytest.mark.long

EACH_S = 0.3
COUNT = 10
SLOW = f"""
import time

from gradwire_losses.fields import INPUT_IDS
from gradwire_losses.outputs import LossOutput, Term
from gradwire_losses.registry import register_loss

@register_loss("slow", fields=[INPUT_IDS], metrics={{}}, reference="none", formula="none", streams=True)
def slow(batch, scores, config):
    time.sleep({EACH_S})
    return LossOutput({{"nll": Term(-scores.logprobs.sum(), batch.num_scored, "tokens")}})
"""
BATCH = {"input_ids": [[5, 9, 23, 7]]}


@pytest.fixture
def serve(tiny_model_path: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    losses = tmp_path / "slow.py"
    losses.write_text(SLOW)
    servers: list[Server] = []

    def start(*flags: str) -> Server:
        server = Server(tiny_model_path, tmp_path / "state", "--losses", str(losses), *flags)
        servers.append(server)
        return server.start()

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.end()


def shown(address: str) -> str:
    """What ``gradwire status`` prints."""
    printed = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["status", "--address", address])
    assert printed.exit_code == 0, printed.output
    return printed.output


@pytest.mark.slow
def test_a_recovery_takes_about_as_long_as_the_server_said(serve: Callable[..., Server]) -> None:
    server = serve("--checkpoint-every-steps", "0", "--max-recovery-seconds", "0")
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        futures = [run.forward_backward(BATCH, "slow") for _ in range(COUNT)]
        measured = sum(future.result().timings.engine_s for future in futures)
        said = run.info().recovery_s
        assert COUNT * EACH_S < measured <= said < measured + 30
        run.sample([[5, 9, 23]] * 8, max_tokens=200, ignore_eos=True).result()
        run.forward(BATCH, outputs=["logprobs"]).result()
        assert run.info().recovery_s == said
        assert service.server_info().engines[0].start_s > 0
        assert f"runs {said:.1f} s)" in shown(server.address)
    server.end(signal.SIGKILL)
    server.start()
    with gradwire.sync.connect(server.address) as service:
        run = service.get_training_client(run.run_id)
        assert run.info().recovery_s == pytest.approx(measured)
        began = time.monotonic()
        run.forward(BATCH, outputs=["logprobs"]).result()
        took = time.monotonic() - began
    print(f"a recovery said to take {said:.2f} s took {took:.2f} s")
    assert COUNT * EACH_S < took < 2 * said + 10


def test_slow_operations_get_a_checkpoint_before_a_recovery_would_take_too_long(serve: Callable[..., Server]) -> None:
    bound_s = 3.5 * EACH_S
    server = serve("--checkpoint-every-steps", "0", "--max-recovery-seconds", str(bound_s))
    with gradwire.sync.connect(server.address) as service:
        run = service.create_run("tiny", lora=2)
        loading_s = run.info().recovery_s
        costs: list[float] = []
        while sum(costs) < bound_s:
            assert run.list_checkpoints() == []
            costs.append(run.forward_backward(BATCH, "slow").result().timings.engine_s)
        run.forward(BATCH, outputs=["logprobs"]).result()  # after the checkpoint
        assert [saved.name for saved in run.list_checkpoints()] == [f"auto-{len(costs)}"]
        assert run.info().recovery_s == loading_s  # nothing would be repeated
