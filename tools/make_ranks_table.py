"""Print the table of ``docs/ranks.md``: the fewest GPUs on which models are trained, by the estimate."""

from __future__ import annotations

import logging
import tempfile
import warnings

import torch
from gradwire_server.engine.sizing.estimate import Device, Workload, fewest_ranks, meta_model
from gradwire_server.engine.sizing.parts import GIB
from make_sizing_table import MODELS, TOKENS

DEVICES = (24, 80)
MOST = 16
WAYS = {"LoRA": 32, "all weights": 0}


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    columns = [(way, size) for way in WAYS for size in DEVICES]
    print("| model | " + " | ".join(f"{way}, {size} GiB" for way, size in columns) + " |")
    print("| --- " * (1 + len(columns)) + "|")
    for model in MODELS:
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            model.config.save_pretrained(folder)
            for rank in WAYS.values():
                workload = Workload(folder, rank, TOKENS, dtype=torch.bfloat16, checkpointing=True)
                sizes = meta_model(workload, "cuda")
                for size in DEVICES:
                    found = fewest_ranks(workload, Device("cuda", size * GIB), MOST, sizes)
                    each = f"{found.workload.ranks} ({found.total_bytes / GIB:.0f} GiB)" if found else "—"
                    cells.append(each)
        print(f"| {model.name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
