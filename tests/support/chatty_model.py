"""A tiny model that answers in a few forms at random, so that reinforcement learning has something to choose from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from support.tiny import tiny_model

FORMS = ("\\boxed{%d}\n\nUser:", "Guess: %d\n\nUser:", "%d\n\nUser:", "hm hm hm hm hm hm hm hm hm")
"""The last one never ends within the few tokens that the tests sample."""
QUESTIONS = (
    "What is %d + %d?\n\nAssistant:",
    "Too low %d %d\n\nAssistant:",
    "How many? %d %d. Provide a numerical answer without units, written inside \\boxed{}.\n\nAssistant:",
    "Your job is to guess a integer between %d and %d. Guess: <guess> and say nothing else.\n\nAssistant:",
)


def chatty_model(path: Path, *, steps: int = 250, context_length: int = 4096) -> Path:
    """Write a model that answers whatever is asked in one of :data:`FORMS`, with a number from 1 to 5."""
    tiny_model(path, context_length=context_length, hidden_size=64)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    rng = np.random.default_rng(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(path)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 * (1 - step / steps)
            rows, labels = [], []
            for _ in range(16):
                asked = "".join(
                    "User: " + QUESTIONS[rng.integers(4)] % tuple(rng.integers(0, 100, 2)) + _answer(rng)[:-5]
                    for _ in range(rng.integers(0, 3))
                )
                asked += "User: " + QUESTIONS[rng.integers(4)] % tuple(rng.integers(0, 100, 2))
                prompt = tokenizer(asked, add_special_tokens=False).input_ids[-160:]
                answer = tokenizer(_answer(rng), add_special_tokens=False).input_ids
                rows.append(prompt + answer)
                labels.append([-100] * len(prompt) + answer)
            width = max(map(len, rows))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            wanted = torch.tensor([row + [-100] * (width - len(row)) for row in labels])
            model(input_ids=ids, labels=wanted).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def _answer(rng: np.random.Generator) -> str:
    form = FORMS[rng.integers(len(FORMS))]
    return " " + (form % rng.integers(1, 6) if "%d" in form else form)
