"""TRL's side of a comparison, in TRL's own environment: a trainer that takes steps on command.

Started by ``benchmarks.against_trl`` as a child process. A line on stdin is how many steps to take; the answer is a
line of JSON on stdout: ``seconds``, ``cpu_seconds``, ``losses``. Between two lines the trainer waits inside a callback,
so that what is timed is TRL's own loop: its collator, forward, loss, backward, clipping, AdamW. Nothing is logged or
saved, nothing tokenized; all defaults of TRL that cost time without training more are off (gradient checkpointing).
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
from peft import LoraConfig
from torch.utils.data import Sampler, SequentialSampler
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

PAD = 0


class Commands(TrainerCallback):  # type: ignore[misc]  # transformers is untyped here
    """Callback that waits for a line before the first step of a turn, and answers after the last."""

    def __init__(self, losses: list[torch.Tensor]) -> None:
        self._losses = losses
        self._left = 0
        self._before = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self._left:
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self._left = int(line)
            self._losses.clear()
            self._before = (time.perf_counter(), time.process_time())

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._left -= 1
        if not self._left:
            wall, cpu = self._before
            answer = {
                "seconds": time.perf_counter() - wall,
                "cpu_seconds": time.process_time() - cpu,
                "losses": [loss.item() for loss in self._losses],
            }
            print(json.dumps(answer), flush=True)


class InOrder:
    """A trainer that takes the rows in order and keeps the loss of each step, to compare both sides."""

    losses: list[torch.Tensor]

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        return SequentialSampler(self.train_dataset if dataset is None else dataset)  # type: ignore[attr-defined]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.losses.append(loss.detach())
        return loss


class SFT(InOrder, SFTTrainer):  # type: ignore[misc]
    pass


class DPO(InOrder, DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
        return dataset  # the ids are there already


class GRPO(InOrder, GRPOTrainer):  # type: ignore[misc]
    """GRPO's loss step on fixed completions and rewards, without generation.

    As in ``_generate_and_score_completions`` prompts are padded on the left, completions on the right, and the
    reference's log-probabilities are computed for each batch, by the trainer's own method.
    """

    batches: list[dict[str, torch.Tensor]]

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, torch.Tensor]:
        inputs = self.batches[self._step]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with torch.no_grad():
            reference, _, _ = self._get_per_token_logps_and_entropies(
                self.ref_model, ids, mask, inputs["completion_ids"].size(1), batch_size=len(ids)
            )
        return {**inputs, "ref_per_token_logps": reference}


def padded(rows: list[list[int]], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad ragged rows; return ids and mask."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, place] = torch.tensor(row)
        mask[index, place] = 1
    return ids, mask


def grpo_inputs(groups: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    prompts = [group["prompt"] for group in groups for _ in group["responses"]]
    prompt_ids, prompt_mask = padded(prompts, "left")
    completion_ids, completion_mask = padded([one for group in groups for one in group["responses"]], "right")
    rewards = torch.tensor([group["rewards"] for group in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": completion_mask.sum(),
    }


def arguments(plan: dict[str, Any], rows: int) -> dict[str, Any]:
    """Arguments that all three trainers share: precision, optimizer, no logs, no files, no gradient checkpointing."""
    return {
        "output_dir": plan["folder"],
        "per_device_train_batch_size": rows,
        "max_steps": len(plan["batches"]),
        "learning_rate": plan["learning_rate"],
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": plan["device"] != "cpu" and plan["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "use_cpu": plan["device"] == "cpu",
        "dataloader_pin_memory": plan["device"] != "cpu",
        "dataloader_num_workers": 0,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "model_init_kwargs": {"dtype": "float32"} | plan.get("model_init_kwargs", {}),
    } | plan.get("arguments", {})


def trainer(plan: dict[str, Any]) -> Any:
    batches, model, tokenizer = plan["batches"], plan["model"], AutoTokenizer.from_pretrained(plan["model"])
    flat = [row for batch in batches for row in batch]
    common: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if rank := plan.get("lora_rank"):
        common["peft_config"] = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    if plan["kind"] == "sft":
        data = datasets.Dataset.from_dict({"input_ids": flat, "labels": flat})
        return SFT(args=SFTConfig(**arguments(plan, len(batches[0]))), train_dataset=data, **common)
    if plan["kind"] == "dpo":
        data = datasets.Dataset.from_list(
            [{f"{name}_ids": pair[name] for name in ("prompt", "chosen", "rejected")} for pair in flat]
        )
        config = DPOConfig(beta=plan["beta"], **arguments(plan, len(batches[0])))
        return DPO(args=config, train_dataset=data, **common)
    if plan["kind"] == "grpo-loop":
        return grpo_loop(plan, flat, common)
    inputs = [grpo_inputs(groups) for groups in batches]
    rows = len(inputs[0]["advantages"])
    config = GRPOConfig(
        beta=plan["beta"],
        loss_type="grpo",
        num_generations=rows // len(batches[0]),
        **arguments(plan, rows),
    )
    data = datasets.Dataset.from_dict({"prompt": ["x"] * (rows * len(batches))})
    made = GRPO(args=config, train_dataset=data, reward_funcs=lambda **_: [], **common)
    made.batches = [{name: value.to(made.accelerator.device) for name, value in each.items()} for each in inputs]
    return made


def even_share(completion_ids: list[list[int]], **others: Any) -> list[float]:
    """Reward: the share of even token ids."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Losses(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer as it is, generation included, that keeps the loss of each step."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach())
        return loss


def grpo_loop(plan: dict[str, Any], prompts: list[str], common: dict[str, Any]) -> Any:
    samples, answer = plan["samples"], plan["answer_tokens"]
    config = GRPOConfig(
        beta=0.0,
        loss_type="grpo",
        num_generations=samples,
        max_completion_length=answer,
        generation_kwargs={"min_new_tokens": answer},
        shuffle_dataset=False,
        **arguments(plan, samples * len(plan["batches"][0])),
    )
    data = datasets.Dataset.from_dict({"prompt": prompts})
    return Losses(args=config, train_dataset=data, reward_funcs=even_share, **common)


def main() -> None:
    """Reads the plan, a JSON file named by the one argument: ``kind``, ``model``, ``batches``, ``beta``, …"""
    with open(sys.argv[1]) as file:
        plan = json.load(file)
    if plan["threads"]:
        torch.set_num_threads(plan["threads"])
    datasets.disable_progress_bars()
    made = trainer(plan)
    made.losses = []
    made.add_callback(Commands(made.losses))
    made.train()


if __name__ == "__main__":
    main()
