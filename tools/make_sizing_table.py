"""Write the table of ``docs/memory.md``: what trains models of 0.6 to 70 billion parameters on GPUs of four sizes.

    python tools/make_sizing_table.py [--check] [MODEL ...]

Every cell is an estimate of ``gradwire estimate`` from the model's configuration, which is written here because nothing
is downloaded. A cell names the first way of training, the most thorough first, that fits rows of 4,096 tokens.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gradwire_server.engine.sizing.estimate import USABLE, Device, Workload, estimate, held_parts, meta_model
from gradwire_server.engine.sizing.parts import GIB
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

PAGE = Path(__file__).parents[1] / "docs/memory.md"
BEGIN, END = "<!-- table: begin (python tools/make_sizing_table.py) -->", "<!-- table: end -->"
DEVICES = (24, 48, 80, 141)
TOKENS = 4096
QWEN: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8}


@dataclass(frozen=True)
class Model:
    """A model of the table.

    Attributes:
        name: Its name on the hub, whose published configuration this is.
        config: Its shape.
    """

    name: str
    config: PreTrainedConfig


def qwen(name: str, hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Model:
    return Model(
        name,
        Qwen3Config(
            hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            tie_word_embeddings=tied, **QWEN,
        ),
    )  # fmt: skip


MODELS = (
    qwen("Qwen3-0.6B", 1024, 3072, 28, 16, tied=True),
    qwen("Qwen3-1.7B", 2048, 6144, 28, 16, tied=True),
    qwen("Qwen3-4B", 2560, 9728, 36, 32, tied=True),
    qwen("Qwen3-8B", 4096, 12_288, 36, 32),
    qwen("Qwen3-14B", 5120, 17_408, 40, 40),
    qwen("Qwen3-32B", 5120, 25_600, 64, 64),
    Model(
        "Llama-3.1-70B",
        LlamaConfig(
            vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
            num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, max_position_embeddings=131_072,
        ),
    ),
)  # fmt: skip
WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("all weights", {"lora_rank": 0}),
    ("all weights, checkpointing", {"lora_rank": 0, "checkpointing": True}),
    ("LoRA", {}),
    ("LoRA, checkpointing", {"checkpointing": True}),
    ("QLoRA, checkpointing", {"checkpointing": True, "quantize": "nf4"}),
)


def cells(model: Model, devices: Sequence[int] = DEVICES) -> list[str]:
    """A model's cells, one for each device, whose size is in GiB."""
    by_device = dict.fromkeys(devices, "—")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        base = Workload(folder, tokens=TOKENS, rows=8, dtype=torch.bfloat16)
        for words, changes in WAYS:
            workload = replace(base, **changes)
            sizes = meta_model(workload, "cuda")
            held = sum(held_parts(workload, sizes).values())
            for size in devices:
                if held > USABLE * size * GIB or by_device[size] != "—":
                    continue
                if (each := estimate(workload, Device("cuda", size * GIB), sizes)).fits:
                    total = each.total_bytes / GIB
                    by_device[size] = f"{words}: {total:.0f}" if total > 10 else f"{words}: {total:.1f}"
    return list(by_device.values())


def table(names: Collection[str]) -> str:
    """The table as Markdown, with these models' rows computed and the others' as written."""
    known = {line.split(" | ")[0].removeprefix("| "): line for line in written().splitlines()}
    head = ["model", *(f"{size} GiB" for size in DEVICES)]
    lines = [_line(head), _line(["---"] * len(head))]
    for model in MODELS:
        if model.name in names:
            lines.append(_line([model.name, *cells(model)]))
        elif model.name in known:
            lines.append(known[model.name])
    return "\n".join(lines)


def _line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def written() -> str:
    """The table of the page."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    asked = [argument for argument in sys.argv[1:] if argument != "--check"]
    for name in asked or [model.name for model in MODELS]:
        made = table([name])
        if "--check" in sys.argv[1:]:
            if made != written():
                return 1
            continue
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + f"\n\n{made}\n\n" + text[text.index(END) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
