"""Makes an archive of a state folder as the present version writes it:

``PYTHONPATH=tests:examples python tests/support/make_state_folder.py OUT.tar.xz``

The server is killed in the middle of its work, so the folder holds what a crash leaves: a write-ahead log, results that
nobody fetched, checkpoints with operations behind them. Beside the folder lies ``expected.json``: what a server of any
later version has to make of it.
"""

from __future__ import annotations

import json
import signal
import sys
import tarfile
import tempfile
from pathlib import Path

import gradwire

from support.server import Server
from support.tiny import tiny_model

ROW = [5, 9, 23, 7, 40, 11]
SETTINGS = {"seed": 7, "lora": {"rank": 2, "dropout": 0.1}}


def train(run: gradwire.sync.TrainingClient, count: int) -> list[float]:
    """Take steps and return their losses."""
    losses = []
    for _ in range(count):
        losses.append(run.forward_backward({"input_ids": [ROW]}, "causal_lm").result().loss)
        run.optim_step(learning_rate=1e-2).result()
    return losses


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(tiny_model(folder / "tiny"), folder / "state", "--threads", "1").start()
        with gradwire.sync.connect(server.address) as service:
            run = service.create_run("tiny", name="first", tags={"kept": "yes"}, **SETTINGS)
            losses = train(run, 3)
            run.save_checkpoint("three").result()
            losses += train(run, 2)
            other = service.create_run("tiny", lora=2, seed=3)
            [scored] = train(other, 1)
            server.end(signal.SIGKILL)
            expected = {
                "run_id": run.run_id, "losses": losses, "step": 5, "accepted_seq": 11,
                "other_run_id": other.run_id, "other_loss": scored,
            }  # fmt: skip
        (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        with tarfile.open(out, "w:xz") as archive:
            for part in ("state", "expected.json"):
                archive.add(folder / part, arcname=part)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
