"""Against TRL 1.16: SFTTrainer, DPOTrainer with a reference model, GRPOTrainer's loss step with KL, on the same rows.

TRL runs in an environment of its own (``make .venv-parity/.installed``), one training process a trainer, in turns with
ours: same model, rows, float32, fused AdamW, threads. Both sides' losses are compared step by step, so that it is the
same arithmetic that is timed. Rows are new in every step: no reference log-probability is found in a cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gradwire

from benchmarks import ROOT
from benchmarks.other_side import OtherSide
from benchmarks.report import Figure, Size, run_alone
from benchmarks.training import BETA, KINDS, LEARNING_RATE, train
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, num_tokens, standard_model

TRL_PYTHON = Path(os.environ.get("GRADWIRE_TRL_PYTHON", ROOT / ".venv-parity/bin/python"))


@dataclass(frozen=True)
class Rival:
    """One of TRL's trainers, and the target relative to it.

    Attributes:
        kind: Kind of training.
        name: Name in the table.
        target: None if it is only reported.
        arguments: Arguments of its config, in addition to the common ones.
    """

    kind: str
    name: str
    target: float | None
    arguments: Mapping[str, Any] = field(default_factory=dict)


RIVALS = {
    "sft": Rival("sft", "SFTTrainer", 2.2),
    "dpo": Rival("dpo", "DPOTrainer with a reference", 2.5),
    "grpo": Rival("grpo", "GRPOTrainer's step", 2.2),
    # Without flash attention its rows are one long sequence under a mask.
    "sft-padding-free": Rival("sft", "SFTTrainer, padding_free", None, {"padding_free": True, "max_length": None}),
}


class Trainer(OtherSide):
    """A TRL trainer in a process of its own.

    Args:
        plan: as ``trl_side`` reads it, less ``folder``.
        folder: for its files.
        python: of TRL's environment.
    """

    def __init__(self, plan: dict[str, Any], folder: Path, python: str | Path = TRL_PYTHON) -> None:
        folder.mkdir(parents=True)
        file = folder / "plan.json"
        file.write_text(json.dumps(plan | {"folder": str(folder / "out")}))
        super().__init__(
            "TRL's process", [str(python), str(Path(__file__).with_name("trl_side.py")), str(file)], folder
        )

    def steps(self, count: int) -> dict[str, Any]:
        """Take this many steps; return ``seconds``, ``cpu_seconds`` and ``losses``.

        Raises:
            RuntimeError: As for :meth:`ask`.
        """
        return self.ask(str(count))


def draw(kind: str, source: Draw, count: int | None = None) -> Sequence[Any]:
    """Draw a batch for a kind of training: this many rows, pairs or groups, or the workload's number of them."""
    drawn = {"sft": source.rows, "dpo": source.pairs, "grpo": source.groups}[kind]
    return drawn() if count is None else drawn(count)


async def race(rival: Rival, model: Path, batches: Sequence[Any], steps: int) -> Turns:
    """Train a model on these batches on both sides, in turns of so many steps; the first turn is dropped."""
    kind = rival.kind
    turns = Turns("ours", "TRL")
    plan = {
        "kind": kind,
        "model": str(model),
        "batches": [*batches, batches[0]],  # the last step's end is the trainer's, and not waited for
        "beta": BETA.get(kind),
        "learning_rate": LEARNING_RATE,
        "threads": 0,
        "device": "cpu",
        "dtype": "float32",
        "arguments": dict(rival.arguments),
    }
    with tempfile.TemporaryDirectory() as folder:
        async with gradwire.connect(models=[f"m={model}"]) as service:
            run = await service.create_run("m")
            with Trainer(plan, Path(folder) / "trl") as trainer:
                for first in range(0, len(batches), steps):
                    chosen = batches[first : first + steps]
                    tokens = sum(map(num_tokens, chosen))
                    theirs = await asyncio.to_thread(trainer.steps, steps)
                    turns.add("TRL", tokens, theirs["seconds"], theirs["cpu_seconds"])
                    with turns.turn("ours", tokens):
                        ours = await train(run, KINDS[kind], [KINDS[kind].batch(batch) for batch in chosen])
                    check_losses(ours, theirs["losses"])
    turns.drop_first()
    return turns


async def compare(rival: Rival, size: Size) -> Figure:
    steps = 2
    source = Draw.of(2, smoke=size.smoke)
    batches = [draw(rival.kind, source) for _ in range((size.repeats + 1) * steps)]
    with tempfile.TemporaryDirectory() as folder:
        turns = await race(rival, standard_model(Path(folder) / "model", smoke=size.smoke), batches, steps)
    detail = f"{turns.said('tokens')}; losses equal"
    return Figure(f"against TRL's {rival.name}", turns.ratio(), "x", rival.target, detail=detail, samples=turns.rates)


def check_installed() -> None:
    """Check that TRL's environment exists.

    Raises:
        FileNotFoundError: It does not.
    """
    if not TRL_PYTHON.exists():
        raise FileNotFoundError(f"{TRL_PYTHON} is not there: make .venv-parity/.installed, or set GRADWIRE_TRL_PYTHON")


def measure(size: Size) -> list[Figure]:
    """Measure one figure per trainer.

    Raises:
        FileNotFoundError: TRL's environment does not exist.
    """
    check_installed()
    return [asyncio.run(compare(rival, size)) for name, rival in RIVALS.items() if size.wants(name)]


if __name__ == "__main__":
    run_alone(measure, __doc__)
