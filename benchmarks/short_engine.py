"""The engine's own cost of a short step, against a bare peft loop in the same process, by turns.

One row of 32 tokens, LoRA of rank 8 on a model of 128 hidden units and 2 layers: a ``train_step`` of the engine, driven
without a server, and the common loop: ``model(labels=...)``, backward, clipping, AdamW. Both with one thread; CPU
seconds, because the steps are short and the machine may have other work. Losses are compared step by step.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from gradwire_proto.v1 import training_pb2 as pb
from support.engine import LocalEngine, token_rows
from transformers import AutoModelForCausalLM

from benchmarks.report import Figure, Size, run_alone
from benchmarks.turns import check_losses
from benchmarks.workload import small_model

RUN, TOKENS, RANK, LEARNING_RATE = "run", 32, 8, 1e-4


class Engine:
    """The engine in this process, with one LoRA run; ``step`` takes a row and gives the loss."""

    def __init__(self, model: Path, state_dir: Path) -> None:
        self.engine = LocalEngine({"m": model}, state_dir)
        self.engine.create(RUN, base_model="m", lora={"rank": RANK, "alpha": float(RANK)})
        step = pb.OptimStep(learning_rate=LEARNING_RATE, beta1=0.9, beta2=0.999, eps=1e-8, max_grad_norm=1.0)
        self.call = pb.TrainStep(loss=pb.LossCall(loss_fn="causal_lm"), optim_step=step)

    def step(self, row: list[int]) -> float:
        return self.engine.do(RUN, token_rows([row]), train_step=self.call).proto.train_step.loss.loss

    def adapter(self) -> dict[str, torch.Tensor]:
        return dict(self.engine.context.runs[RUN].policy.trainable_parameters())


class BareLoop:
    """transformers, peft and AdamW as they are commonly used."""

    def __init__(self, model: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config).train()
        self.parameters = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def start_from(self, adapter: dict[str, torch.Tensor]) -> None:
        """Take over the weights of an adapter whose parameters have the base model's names."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                ours = name.removeprefix("base_model.model.").replace(".default.", ".")
                parameter.data.copy_(adapter[ours].detach())

    def step(self, row: list[int]) -> float:
        ids = torch.tensor([row])
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def measure(size: Size) -> list[Figure]:
    steps, rng = size.pick(100, 3), np.random.default_rng(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    milliseconds: dict[str, list[float]] = {"engine": [], "bare": []}
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = small_model(Path(folder) / "model", hidden_size=128, num_layers=2)
            engine, bare = Engine(model, Path(folder) / "state"), BareLoop(model)
            bare.start_from(engine.adapter())
            sides: dict[str, Any] = {"engine": engine, "bare": bare}
            for _ in range(size.repeats + 1):
                rows = rng.integers(4, 60, (steps, TOKENS)).tolist()
                losses: dict[str, list[float]] = {}
                for name, side in sides.items():
                    began = time.process_time()
                    losses[name] = [side.step(row) for row in rows]
                    milliseconds[name].append((time.process_time() - began) / steps * 1e3)
                check_losses(losses["engine"], losses["bare"])
    finally:
        torch.set_num_threads(threads)
    for values in milliseconds.values():
        del values[0]  # warm-up
    ratios = [ours / theirs for ours, theirs in zip(*milliseconds.values(), strict=True)]
    said = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in milliseconds.items())
    return [
        Figure(
            "a short step in the engine, against a bare peft loop", statistics.median(ratios), "x", 1.2, at_least=False,
            detail=f"{said} CPU ms a step of {TOKENS} tokens, LoRA rank {RANK}", samples=milliseconds,
        )
    ]  # fmt: skip


if __name__ == "__main__":
    run_alone(measure, __doc__)
