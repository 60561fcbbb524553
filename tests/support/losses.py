"""Random ragged batches for losses, and the same batches as plain Python lists for the references.

Columns here are nested lists, one entry a row: a number, a list (tokens), or a list of lists (samples of tokens).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gradwire_losses.batch import Batch, Scores
from gradwire_losses.layouts import read_batch
from gradwire_losses.outputs import LossOutput, merge_metrics
from gradwire_losses.registry import LossConfig, LossSpec, get_loss, load_builtin_losses

VOCAB = 50
NUM_CLASSES = 4
SIDES = ("", "chosen_", "rejected_", "gold_", "kl_", "teacher_")
"""Prefixes of the fields of a row's sequences, in the sequences' order."""
PER_SEQUENCE = frozenset({"rewards", "class_logits"})
Columns = dict[str, list[Any]]

load_builtin_losses()


# ------------------------------------------------------------------ columns


@dataclass(frozen=True)
class Column:
    values: np.ndarray
    levels: tuple[np.ndarray, ...]


def column(rows: Sequence[Any], dtype: Any = None) -> Column:
    """Nested lists as a column: a ragged level for each list within a row."""
    levels: list[np.ndarray] = []
    flat: list[Any] = list(rows)
    while flat and isinstance(flat[0], list):
        levels.append(np.array([len(item) for item in flat], np.uint32))
        flat = [entry for item in flat for entry in item]
    if not flat and rows:
        return Column(np.zeros(0, dtype or np.float64), tuple(levels))
    return Column(np.array(flat, dtype), tuple(levels))


def read(loss: str | LossSpec, columns: Mapping[str, Sequence[Any]], **limits: Any) -> Batch:
    """The batch that a loss sees, with its numbers in float64, so that references agree to the last digits."""
    spec = get_loss(loss) if isinstance(loss, str) else loss
    dtypes = {
        field.name: {"int": np.int64, "float": np.float64, "bool": np.int64}[field.dtype] for field in spec.fields
    }
    batch = read_batch(spec, {name: column(rows, dtypes.get(name)) for name, rows in columns.items()}, **limits)
    return as_double(batch)


def as_double(batch: Batch) -> Batch:
    fields = {name: values.double() if values.is_floating_point() else values for name, values in batch.fields.items()}
    return replace(batch, fields=fields)


def tokens(rng: np.random.Generator, length: int) -> list[int]:
    return [int(token) for token in rng.integers(0, VOCAB, length)]


def numbers(rng: np.random.Generator, like: Any, scale: float = 1.0, shift: float = 0.0) -> Any:
    """A float32 number for every token of nested lists."""
    if isinstance(like, list):
        return [numbers(rng, item, scale, shift) for item in like]
    return float(np.float32(rng.normal(shift, scale)))


def logps(rng: np.random.Generator, like: Any, scale: float = 0.5, shift: float = -1.4) -> Any:
    """A log-probability, at most 0, for every token of nested lists."""
    if isinstance(like, list):
        return [logps(rng, item, scale, shift) for item in like]
    return min(0.0, numbers(rng, like, scale, shift))


def per_row(rng: np.random.Generator, rows: int, scale: float = 1.0) -> list[float]:
    return numbers(rng, [0] * rows, scale)


def bits(rng: np.random.Generator, like: Any, share: float = 0.7) -> Any:
    if isinstance(like, list):
        return [bits(rng, item, share) for item in like]
    return int(rng.random() < share)


def row_columns(rng: np.random.Generator, rows: int = 6) -> Columns:
    """Rows of 1 to 9 tokens; the second has one token, the third's mask is empty, the fourth's is all ones."""
    ids = [tokens(rng, int(length)) for length in rng.integers(2, 10, rows)]
    ids[1] = tokens(rng, 1)
    mask = bits(rng, ids)
    mask[2] = [0] * len(ids[2])
    mask[3] = [1] * len(ids[3])
    return {"input_ids": ids, "loss_mask": mask}


def pair_columns(rng: np.random.Generator, rows: int = 6) -> Columns:
    """Pairs with prompts; the second's rejected side has one token, the third's chosen mask is empty."""
    columns: Columns = {}
    for side in ("chosen", "rejected"):
        ids = [tokens(rng, int(length)) for length in rng.integers(3, 10, rows)]
        columns[f"{side}_input_ids"], columns[f"{side}_loss_mask"] = ids, bits(rng, ids, 0.9)
        columns[f"{side}_loss_mask"][0] = columns[f"{side}_loss_mask"][4] = [1] * 20
        for row in (0, 4):
            columns[f"{side}_loss_mask"][row] = [1] * len(ids[row])
    columns["rejected_input_ids"][1], columns["rejected_loss_mask"][1] = tokens(rng, 1), [1]
    columns["chosen_loss_mask"][2] = [0] * len(columns["chosen_input_ids"][2])
    columns["prompt_lengths"] = [1 if row == 1 else int(rng.integers(0, 3)) for row in range(rows)]
    return columns


def group_columns(rng: np.random.Generator, rows: int = 5) -> Columns:
    """Groups of 1 to 4 samples; one of a single sample, one of equal rewards, an empty response, an empty mask."""
    samples = [4, 1, 3, *(int(count) for count in rng.integers(2, 5, rows - 3))]
    responses = [[tokens(rng, int(rng.integers(1, 7))) for _ in range(count)] for count in samples]
    responses[0][1] = []
    masks = bits(rng, responses)
    masks[2][0] = [0] * len(responses[2][0])
    rewards = numbers(rng, [[0] * count for count in samples])
    rewards[3] = [float(np.float32(0.1))] * samples[3]  # whose mean is not exactly 0.1
    return {
        "prompt_ids": [tokens(rng, int(length)) for length in rng.integers(1, 5, rows)],
        "response_ids": responses,
        "response_masks": masks,
        "rewards": rewards,
    }


# ------------------------------------------------------------------ scores


def random_scores(rng: np.random.Generator, batch: Batch, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Scores in float64; all but the reference's and ``correct`` are leaves that require a gradient."""
    count, sequences = batch.num_scored, batch.num_sequences
    make: dict[str, Callable[[], np.ndarray]] = {
        "logprobs": lambda: -rng.gamma(2.0, 0.7, count),
        "ref_logprobs": lambda: -rng.gamma(2.0, 0.7, count),
        "entropy": lambda: rng.gamma(2.0, 0.5, count),
        "values": lambda: rng.normal(0, 1, count),
        "rewards": lambda: rng.normal(0, 1.5, sequences),
        "correct": lambda: rng.random(count) < 0.5,
        "candidate_logprobs": lambda: np.log(rng.dirichlet([1.0] * (batch["candidates"].shape[1] + 1), count))[:, :-1],
        "divergence": lambda: rng.gamma(1.0, 0.5, count),
        "collision": lambda: -rng.gamma(2.0, 0.5, count),
        "mean_logprobs": lambda: -4 - rng.gamma(2.0, 0.5, count),
        "token_rewards": lambda: rng.normal(0, 1.5, count),
        "class_logits": lambda: rng.normal(0, 1.5, (sequences, NUM_CLASSES)),
        "token_class_logits": lambda: rng.normal(0, 1.5, (count, NUM_CLASSES)),
    }
    scores = {}
    for name in sorted(names):
        values = torch.from_numpy(make[name]())
        scores[name] = values if name in ("ref_logprobs", "correct", "collision") else values.requires_grad_()
    return scores


def pick(batch: Batch, scores: Mapping[str, torch.Tensor], examples: torch.Tensor) -> dict[str, torch.Tensor]:
    """The scores of some examples, as the engine would compute them for a micro-batch."""
    marked = replace(
        batch,
        fields={"token": torch.arange(batch.num_scored), "sequence": torch.arange(batch.num_sequences)},
        levels={"token": "token", "sequence": "sequence"},
    ).select(examples)
    return {name: values[marked["sequence" if name in PER_SEQUENCE else "token"]] for name, values in scores.items()}


# ------------------------------------------------------------------ the same as plain lists


def scored_positions(columns: Mapping[str, Any], side: str, row: int) -> list[int]:
    """The scored tokens of a row of whole sequences, by the documented rules."""
    ids = columns[f"{side}input_ids"][row]
    if "target_tokens" in columns:
        return [t for t in range(len(ids)) if columns.get("mask", [[1] * len(ids)] * (row + 1))[row][t]]
    for labels in ("step_labels", "token_labels"):
        if labels in columns:
            return [t for t in range(len(ids)) if columns[labels][row][t] != -100]
    if "labels" in columns:
        return [t for t in range(1, len(ids)) if columns["labels"][row][t] != -100]
    mask = columns.get(f"{side}loss_mask")
    prompt = columns.get("prompt_lengths", [0] * (row + 1))[row]
    return [t for t in range(1, len(ids)) if (mask is None or mask[row][t]) and t >= prompt]


def plain_examples(loss: LossSpec, columns: Columns, scores: Mapping[str, torch.Tensor]) -> list[list[SimpleNamespace]]:
    """Examples of sequences, each with lists of its scored tokens' scores and fields, and its own numbers."""
    lists = {name: values.detach().tolist() for name, values in scores.items()}
    cursor, examples = 0, []
    layout, prefixes = loss.layout, tuple(side for side in SIDES[1:] if f"{side}input_ids" in columns)
    for row in range(len(next(iter(columns.values())))):
        group = []
        sides = [(side, row) for side in SIDES if f"{side}input_ids" in columns]
        if layout == "groups":
            sides = [("", sample) for sample in range(len(columns["response_ids"][row]))]
        for side, index in sides:
            if layout == "groups":
                own = columns["response_ids"][row][index]
                mask = columns["response_masks"][row][index] if "response_masks" in columns else [1] * len(own)
                positions = [t for t in range(len(mask)) if mask[t]]
            else:
                positions = scored_positions(columns, side, row)
            sequence = SimpleNamespace(n=len(positions), positions=positions)
            for name, values in lists.items():
                whole = name in PER_SEQUENCE
                entry = (
                    values[sum(map(len, examples)) + len(group)] if whole else values[cursor : cursor + len(positions)]
                )
                setattr(sequence, f"score_{name}", entry)
            for name, rows in columns.items():
                if not name.startswith(side) or (not side and name.startswith(prefixes)):
                    continue
                entry = (
                    rows[row][index]
                    if layout == "groups" and isinstance(rows[row], list) and name != "prompt_ids"
                    else rows[row]
                )
                if isinstance(entry, list) and name not in ("prompt_ids",):
                    entry = [entry[t] for t in positions]
                setattr(sequence, name.removeprefix(side), entry)
            if layout == "pairs":
                for name, rows in columns.items():
                    if not name.startswith(prefixes):
                        setattr(sequence, name, rows[row])
            cursor += len(positions)
            group.append(sequence)
        examples.append(group)
    return examples


def flat(examples: list[list[SimpleNamespace]]) -> list[SimpleNamespace]:
    return [sequence for example in examples for sequence in example]


# ------------------------------------------------------------------ a loss's case, and what is computed from it


@dataclass(frozen=True)
class Case:
    """A loss, a way to make batches for it, arguments, and the plain reference.

    ``reference(examples, config)`` gives the loss, and metrics by name. ``without``: optional scores that are left
    out. ``gradcheck`` is False where part of the loss is held constant on purpose; a test of its own checks that one.
    """

    loss: str
    build: Callable[[np.random.Generator], Columns]
    kwargs: dict[str, Any]
    reference: Callable[[list[list[SimpleNamespace]], Any], tuple[float, dict[str, float]]]
    label: str = ""
    without: frozenset[str] = field(default_factory=frozenset)
    gradcheck: bool = True

    @property
    def id(self) -> str:
        return f"{self.loss}-{self.label}" if self.label else self.loss

    def draw(self, rng: np.random.Generator) -> Drawn:
        spec = get_loss(self.loss)
        columns = self.build(rng)
        batch = read(spec, columns, vocab_size=VOCAB)
        config = spec.config(**self.kwargs)
        present = frozenset(batch.fields)
        names = (spec.scores(config, present) | spec.optional_scores) - self.without
        return Drawn(spec, config, columns, batch, random_scores(rng, batch, names))


@dataclass(frozen=True)
class Drawn:
    spec: LossSpec
    config: LossConfig
    columns: Columns
    batch: Batch
    scores: dict[str, torch.Tensor]

    def output(self, batch: Batch | None = None, scores: Mapping[str, torch.Tensor] | None = None) -> LossOutput:
        return self.spec.function(
            self.batch if batch is None else batch, Scores(self.scores if scores is None else scores), self.config
        )

    def part(self, examples: Sequence[int]) -> LossOutput:
        index = torch.tensor(list(examples), dtype=torch.long)
        return self.output(self.batch.select(index), pick(self.batch, self.scores, index))

    def examples(self) -> list[list[SimpleNamespace]]:
        return plain_examples(self.spec, self.columns, self.scores)


def merged(parts: Sequence[LossOutput]) -> tuple[float, dict[str, float]]:
    """The loss and metrics of a batch from those of its parts, as the engine puts them together."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        for name, term in part.terms.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += term.sum.item()
            entry[1] = 1.0 if term.unit == "sum" else entry[1] + float(term.count)
    loss = math.fsum(total / count for total, count in sums.values() if count)
    return loss, values_of(merge_metrics([part.metrics for part in parts]))


def values_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: metric.value() for name, metric in metrics.items()}
