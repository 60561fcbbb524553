"""A bare loop on peft: the adapter that our run began with, a forward, a backward and a step, in this process."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.rivals.workload import BETAS, EPS, LEARNING_RATE
from benchmarks.workload import Rows


class PeftLoop:
    """The model and its optimizer; ``step`` takes rows of equal length and gives the summed loss."""

    def __init__(self, model: Path, adapter: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter, is_trainable=True).train()
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
        )

    def step(self, rows: Rows) -> float:
        ids = torch.tensor(rows)
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()
