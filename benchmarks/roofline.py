"""Where each millisecond on a GPU should go: the least time of each part, from operations and bytes.

    python -m benchmarks.roofline        # writes the table of docs/performance.md; needs no GPU

The engine's own forward, backward and decoding run on tensors without numbers, as for ``gradwire estimate``. Each
operation takes at least its floating-point operations over the rate of a bfloat16 matrix product, and the bytes that it
reads and writes over the memory's bandwidth; the longer of the two counts. What is not a matrix product or attention is
counted as torch's plain operations, one after the other: kernels that do several at once read and write less.
"""

from __future__ import annotations

import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from gradwire_server.engine.model.meta_device import estimating
from gradwire_server.engine.model.policy import Policy
from gradwire_server.engine.sampling.drawing.draw import draw
from gradwire_server.engine.sampling.pages.pages import Pages
from gradwire_server.engine.sampling.samplers.sampler import SamplingParams
from gradwire_server.engine.scoring.token_scores import token_logits
from gradwire_server.engine.sizing.estimate import Device, Workload, estimate, meta_model
from gradwire_server.engine.sizing.meta_model import SHORT
from gradwire_server.engine.sizing.meta_step import step_bytes
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config

from benchmarks import ROOT
from benchmarks.qwen import shape

PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- roofline: begin (python -m benchmarks.roofline) -->", "<!-- roofline: end -->"
PRODUCTS = 788e12
"""Operations a second of a bfloat16 matrix product, as measured on an H200; an H100 has the same arithmetic."""
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12}
"""Bytes a second of the memory, by the makers' sheets."""
OPTIMIZER_BYTES = 30
"""Of a trained weight: gradient, master and moments are read, the last three and the bfloat16 weight written."""
LEFT = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}
"""Matrix products, and which argument is the left matrix."""
PARTS = ("products", "attention", "vocabulary", "other", "optimizer")


@dataclass(frozen=True)
class Case:
    """A line of the table.

    Attributes:
        title: What is computed.
        size: Of the model.
        lora: Rank of the adapter; 0 trains all weights.
        rows: Tokens of each row of a step, or of each sample so far.
        measured: Milliseconds on an H200.
        samples: Whether one token of every row is sampled instead.
    """

    title: str
    size: str
    lora: int
    rows: tuple[int, ...]
    measured: float
    samples: bool = False


def _step(size: str, lora: int, rows: tuple[int, ...], rate: float) -> Case:
    words = f"LoRA of rank {lora}" if lora else "full"
    title = f"{size}, {words}, {len(rows)} rows of {rows[0]:,}"
    return Case(title, size, lora, rows, 1000 * sum(rows) / rate)


CASES = (
    _step("8B", 32, (4096,) * 8, 14_051),
    _step("4B", 32, (4096,) * 8, 20_388),
    _step("4B", 32, (16_384,) * 2, 14_341),
    _step("4B", 0, (4096,) * 8, 16_224),
    _step("0.6B", 0, (4096,) * 8, 59_684),
    Case("4B with LoRA, a token of 64 samples", "4B", 32, (128,) * 64, 10.7, samples=True),
)


class Tally(TorchDispatchMode):
    """Add up the least time of every operation on the device, by part.

    Args:
        vocabulary: Operations on tensors of this size are the vocabulary's.
        bandwidth: Bytes a second.

    Attributes:
        seconds: By part.
    """

    def __init__(self, vocabulary: int, bandwidth: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._vocabulary, self._bandwidth = vocabulary, bandwidth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = _on_device((args, kwargs))
        made = _on_device(result)
        name = func._schema.name.removeprefix("aten::")
        if not made or name in ("empty_like", "new_empty", "empty") or (given and _is_view(func)):
            return result
        sizes = [size for each in given + made for size in each.shape]
        seconds = max(_flops(name, args, given, made) / PRODUCTS, _bytes(name, given, made) / self._bandwidth)
        self.seconds[part_of([name], sizes, self._vocabulary)] += seconds
        return result


def part_of(names: Sequence[str], sizes: Sequence[int], vocabulary: int) -> str:
    """The part of an operation.

    Args:
        names: The operation's, without ``aten::``, and of those that it is a step of.
        sizes: Of its tensors' dimensions.
        vocabulary: The vocabulary's size.
    """
    if "optimizer" in names:
        return "optimizer"
    if vocabulary in sizes and "embedding" not in names:
        return "vocabulary"
    if any(word in name.lower() for name in names for word in ("attention", "attn")):
        return "attention"
    return "products" if names[0] in LEFT else "other"


def _on_device(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_meta]


def _is_view(func: Any) -> bool:
    aliases = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    return bool(aliases) and not any(each.is_write for each in aliases)


def _flops(name: str, args: Sequence[Any], given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """An operation's floating-point operations."""
    if "scaled_dot_product" in name:
        backward = "backward" in name
        q, k = given[1:3] if backward else given[:2]  # the backward has the output's gradient before them
        causal = 0.5 if q.shape[2] == k.shape[2] else 1.0
        pairs = math.prod(q.shape[:3]) * k.shape[2]
        return causal * (10.0 if backward else 4.0) * pairs * q.shape[3]
    if name in LEFT:
        return 2.0 * made[0].numel() * args[LEFT[name]].shape[-1]
    return 0.0


def _bytes(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    if name in ("embedding", "gather", "index_select", "slice"):
        return 2.0 * sum(each.nbytes for each in made)
    if name in ("index_copy_", "scatter_add_"):
        return 2.0 * given[-1].nbytes
    return float(sum(each.numel() * each.itemsize for each in [*given, *made]))


@cache
def milliseconds(case: Case, bandwidth: float = BANDWIDTH["H200"]) -> dict[str, float]:
    """The least time of each of :data:`PARTS`."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = vars(shape(case.size, smoke=False))
        Qwen3Config(**sizes, tie_word_embeddings=True, max_position_embeddings=40_960).save_pretrained(folder)
        return _milliseconds(case, folder, bandwidth)


def _milliseconds(case: Case, folder: str, bandwidth: float) -> dict[str, float]:
    workload = Workload(folder, lora_rank=case.lora, tokens=case.rows[0], rows=len(case.rows))
    model = meta_model(workload, "cuda")
    found = estimate(workload, Device("cuda", 141 << 30), model)
    layers = shape(case.size, smoke=False).num_hidden_layers
    tallies: list[dict[str, float]] = []
    for policy in model._policies:
        tally = Tally(shape(case.size, smoke=False).vocab_size, bandwidth)
        with warnings.catch_warnings(), estimating("cuda"):
            if case.samples:
                policy.compute(partial(_sampled, policy, case.rows, tally))
            else:
                with tally:
                    rows = found.microbatch_rows
                    step_bytes(policy, rows, case.rows[0], {"logprobs"}, found.budget, kind="cuda")
        tallies.append(tally.seconds)
    times = 1.0 if case.samples else len(case.rows) / found.microbatch_rows
    short, longer = tallies
    whole = {part: short[part] + (longer[part] - short[part]) * (layers - SHORT[0]) for part in PARTS[:-1]}
    optimizer = 0.0 if case.samples else OPTIMIZER_BYTES * found.trained_parameters / bandwidth
    return {part: 1000 * times * seconds for part, seconds in whole.items()} | {"optimizer": 1000 * optimizer}


@torch.no_grad()
def _sampled(policy: Policy, lengths: Sequence[int], tally: Tally) -> None:
    """Tally one token of every row, whose samples have so many tokens."""
    pages, policies = Pages(), [policy] * len(lengths)
    pages.prefill(policies, [[row] * length for row, length in enumerate(lengths)], np.arange(len(lengths)))
    with tally:
        states = pages.decode(policies, np.zeros(len(lengths), np.int64), np.array(lengths))
        logits = token_logits(states, policy.output_head())
        uniform = torch.empty(len(logits), dtype=torch.float64, device=logits.device)
        draw(logits, uniform, SamplingParams(max_tokens=1, seed=0))


def line(case: Case) -> str:
    """A line of the table."""
    least = milliseconds(case)
    total = sum(least.values())
    on_h100 = sum(milliseconds(case, BANDWIDTH["H100"]).values())
    milli = [f"{each:,.1f}" for each in (*least.values(), total, case.measured)]
    return "| " + " | ".join([case.title, *milli, f"{total / case.measured:.0%}", f"{on_h100:,.1f}"]) + " |"


def table() -> str:
    """The table as Markdown."""
    head = ["ms", *PARTS, "sum", "measured", "sum / measured", "sum on an H100"]
    lines = ["| " + " | ".join(each) + " |" for each in (head, ["---"] * len(head))]
    return "\n".join([*lines, *map(line, CASES)])


def written() -> str:
    """The table of the page."""
    text = PAGE.read_text()
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + f"\n\n{table()}\n\n" + text[text.index(END) :])
    return 0


if __name__ == "__main__":
    sys.exit(main())
