"""TRL's side of ``benchmarks.learn``, in its environment: the same adapter, batches and rates; prints the losses."""

from __future__ import annotations

import json
import sys
from typing import Any

import datasets
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import DPOConfig, RewardConfig, RewardTrainer, SFTConfig
from trl_side import DPO, SFT, InOrder, arguments

AT_ONCE = 2
"""Rows of a forward: TRL keeps the logits of all of them, in float32, several times over."""


class Rates(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Callback that gives each step its learning rate."""

    def __init__(self, rates: list[float]) -> None:
        self._rates = rates

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._rates[state.global_step]


class Reward(InOrder, RewardTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset  # the ids are there already


def split(row: dict[str, Any], side: str) -> tuple[list[int], list[int]]:
    """The ids of a pair's prompt, and of one of its answers, as far as they are learned."""
    ids, mask = row[f"{side}_input_ids"], row[f"{side}_loss_mask"]
    learned = [place for place, each in enumerate(mask) if each]
    return ids[: learned[0]], ids[learned[0] : learned[-1] + 1]  # what the template writes behind is not learned


def rows_of(kind: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if kind == "sft":
        return [
            {
                "input_ids": row["input_ids"],
                "labels": [token if learned else -100 for token, learned in zip(row["input_ids"], row["loss_mask"])],
            }
            for row in rows
        ]
    if kind == "reward":
        return [{f"{side}_ids": row[f"{side}_input_ids"] for side in ("chosen", "rejected")} for row in rows]
    return [
        {"prompt_ids": split(row, "chosen")[0]}
        | {f"{side}_ids": split(row, side)[1] for side in ("chosen", "rejected")}
        for row in rows
    ]


def main() -> None:
    plan = json.load(sys.stdin)
    kind, batches = plan["kind"], plan["batches"]
    parts = len(batches[0]) // AT_ONCE
    shared = arguments(plan, AT_ONCE) | {"gradient_accumulation_steps": parts}
    shared.pop("model_init_kwargs")
    if kind == "reward":
        base: Any = AutoModelForSequenceClassification.from_pretrained(
            f"{plan['folder']}/start_merged", num_labels=1, dtype=torch.float32
        )
    else:
        base = AutoModelForCausalLM.from_pretrained(plan["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, f"{plan['folder']}/start", is_trainable=True)
    model.train()
    config = {
        "sft": lambda: SFTConfig(**shared),
        "dpo": lambda: DPOConfig(beta=plan["beta"], **shared),
        "reward": lambda: RewardConfig(**shared),
    }[kind]()
    rows = datasets.Dataset.from_list(rows_of(kind, [row for batch in batches for row in batch]))
    tokenizer = AutoTokenizer.from_pretrained(plan["model"])
    made = {"sft": SFT, "dpo": DPO, "reward": Reward}[kind](
        model=model, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Rates(plan["rates"])]
    )
    made.losses = []
    made.train()
    losses = [loss.item() for loss in made.losses]  # of parts, each divided by their number
    print(json.dumps([sum(losses[at : at + parts]) for at in range(0, len(losses), parts)]))


if __name__ == "__main__":
    main()
