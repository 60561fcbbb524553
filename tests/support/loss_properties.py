"""Properties of every loss: each is a function of a case and a random generator, and asserts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire_losses.batch import Scores

from support.losses import PER_SEQUENCE, SIDES, VOCAB, Case, Columns, Drawn, merged, read, values_of

CLOSE = {"rel": 1e-9, "abs": 1e-11}


def equals_the_plain_reference(case: Case, rng: np.random.Generator) -> None:
    drawn = case.draw(rng)
    output = drawn.output()
    loss, metrics = case.reference(drawn.examples(), drawn.config)
    assert output.loss().item() == pytest.approx(loss, **CLOSE)
    assert values_of(output.metrics) == pytest.approx(metrics, nan_ok=True, **CLOSE)
    assert set(output.metrics) == set(drawn.spec.metrics)


def passes_gradcheck(case: Case, rng: np.random.Generator) -> None:
    if not case.gradcheck:
        pytest.skip("part of this loss is held constant on purpose: its gradient has a test of its own")
    drawn = case.draw(rng)
    names = [name for name, values in drawn.scores.items() if values.requires_grad]
    fixed = {name: values for name, values in drawn.scores.items() if name not in names}
    batch = _frozen(drawn)

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return drawn.output(batch=batch, scores=fixed | dict(zip(names, values, strict=True))).loss()

    leaves = [drawn.scores[name] for name in names]
    # A difference of two losses is exact to their size times float64's precision, over the step.
    tolerance = max(1e-6, 1e-8 * abs(loss(*leaves).item()))
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-7, atol=tolerance, rtol=1e-5)


def _frozen(drawn: Drawn) -> Any:
    """The batch with what the loss would detach from the scores given as numbers: old policy, values for GAE."""
    fields, levels = dict(drawn.batch.fields), dict(drawn.batch.levels)
    accepted = {spec.name for spec in drawn.spec.fields}
    for name, score in (("old_log_probs", "logprobs"), ("old_values", "values")):
        if name in accepted and name not in fields and score in drawn.scores and "values" not in fields:
            fields[name], levels[name] = drawn.scores[score].detach().clone(), "token"
    return replace(drawn.batch, fields=fields, levels=levels)


def is_the_same_in_parts(case: Case, rng: np.random.Generator) -> None:
    """A streaming loss, over a random partition of the examples in random order, one part being empty of scores."""
    drawn = case.draw(rng)
    if not drawn.spec.streams(drawn.config, frozenset(drawn.batch.fields)):
        return _needs_the_whole_batch(case, rng)
    order = rng.permutation(drawn.batch.num_examples)
    cuts = sorted(rng.integers(0, len(order), 2))
    parts = [part for part in np.split(order, cuts) if len(part)]
    loss, metrics = merged([drawn.part(part) for part in parts])
    whole = drawn.output()
    assert loss == pytest.approx(whole.loss().item(), **CLOSE)
    assert metrics == pytest.approx(values_of(whole.metrics), nan_ok=True, **CLOSE)

    gradients = _term_gradients(drawn, whole)
    pieces = [_term_gradients(drawn, drawn.part(part)) for part in parts]
    for name, gradient in gradients.items():
        total = sum((piece[name] for piece in pieces), torch.zeros_like(gradient))
        torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-12)


def _needs_the_whole_batch(case: Case, rng: np.random.Generator) -> None:
    """The declaration is no mere caution: for some batch, its parts give something else."""

    def differs(drawn: Drawn) -> bool:
        loss, _ = merged([drawn.part([example]) for example in range(drawn.batch.num_examples)])
        return loss != pytest.approx(drawn.output().loss().item(), rel=1e-6)

    within = "conservative" in case.loss and case.draw(rng).output().terms["conservative"].sum.item() == 0
    assert within or any(differs(case.draw(rng)) for _ in range(20))


def _term_gradients(drawn: Drawn, output: Any) -> dict[str, torch.Tensor]:
    leaves = {name: values for name, values in drawn.scores.items() if values.requires_grad}
    total = torch.stack([term.sum for term in output.terms.values()]).sum()
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


def ignores_what_is_not_scored(case: Case, rng: np.random.Generator) -> None:
    """NaN at unscored tokens of a field, or those entries left out, changes nothing at all."""
    drawn = case.draw(rng)
    spoiled, compact = dict(drawn.columns), dict(drawn.columns)
    for spec in drawn.spec.fields:
        if spec.dtype == "float" and spec.name in drawn.columns and _per_token(drawn.columns[spec.name]):
            scored = _scored(drawn, spec.name)
            spoiled[spec.name] = _map(
                drawn.columns[spec.name], scored, lambda entry, on: [entry if on else _nan(entry)]
            )
            compact[spec.name] = _map(drawn.columns[spec.name], scored, lambda entry, on: [entry] if on else [])
    expected = drawn.output()
    for columns in (spoiled, compact):
        output = drawn.output(batch=read(drawn.spec, columns, vocab_size=VOCAB))
        assert output.loss().item() == expected.loss().item()
        assert values_of(output.metrics) == pytest.approx(values_of(expected.metrics), nan_ok=True, rel=0, abs=0)


def _per_token(rows: list[Any]) -> bool:
    return isinstance(rows[0], list)


def _scored(drawn: Drawn, name: str) -> list[Any]:
    """1 or 0 for each entry of a field."""
    rows = drawn.columns[name]
    if drawn.spec.layout == "groups":
        masks = drawn.columns.get("response_masks", [[[]]] * len(rows))
        return [masks[row] if isinstance(rows[row][0], list) else [1] * len(rows[row]) for row in range(len(rows))]
    from support.losses import scored_positions

    side = next((each for each in SIDES[1:] if name.startswith(each) and f"{each}input_ids" in drawn.columns), "")
    if "labels" in drawn.columns:
        return [[int(t > 0 and label != -100) for t, label in enumerate(row)] for row in drawn.columns["labels"]]
    return [
        [int(t in scored_positions(drawn.columns, side, row)) for t in range(len(entries))]
        for row, entries in enumerate(rows)
    ]


def _map(rows: Any, scored: Any, change: Any) -> Any:
    if scored and isinstance(scored[0], list):
        return [_map(row, on, change) for row, on in zip(rows, scored, strict=True)]
    return [entry for pair in zip(rows, scored, strict=True) for entry in change(*pair)]


def _nan(entry: Any) -> Any:
    return [math.nan] * len(entry) if isinstance(entry, list) else math.nan


def counts_no_row_that_has_nothing_scored(case: Case, rng: np.random.Generator) -> None:
    """Taking such rows out changes neither sums nor counts (groups keep theirs: their rewards are a baseline)."""
    drawn = case.draw(rng)
    if drawn.spec.layout == "groups" or "logprobs" not in drawn.scores:
        return
    counts = drawn.batch.row_lengths.view(drawn.batch.num_examples, -1)
    counts = counts.amin(dim=1) if drawn.spec.layout == "pairs" else counts.amax(dim=1)
    kept = [example for example in range(len(counts)) if counts[example] > 0]
    assert len(kept) < len(counts), "the builder is to make empty rows"
    whole, part = drawn.output(), drawn.part(kept)
    assert {name: (term.count, term.unit) for name, term in whole.terms.items()} == {
        name: (term.count, term.unit) for name, term in part.terms.items()
    }
    assert part.loss().item() == pytest.approx(whole.loss().item(), **CLOSE)
    assert values_of(part.metrics) == pytest.approx(values_of(whole.metrics), nan_ok=True, **CLOSE)


def is_a_differentiable_zero_over_nothing(case: Case, rng: np.random.Generator) -> None:
    drawn = case.draw(rng)
    if "logprobs" not in drawn.scores:
        return
    empty = torch.zeros(drawn.batch.num_examples, dtype=torch.bool)
    columns = _all_masked(drawn.columns)
    batch = read(drawn.spec, columns, vocab_size=VOCAB)
    assert batch.num_scored == 0 and len(empty) == batch.num_examples
    leaves = {
        name: values.new_zeros(batch.num_sequences if name in PER_SEQUENCE else 0, *values.shape[1:]).requires_grad_(
            values.requires_grad
        )
        for name, values in drawn.scores.items()
    }
    output = drawn.spec.function(batch, Scores(leaves), drawn.config)
    loss = output.loss()
    assert loss.item() == 0.0
    loss.backward()
    assert all(math.isfinite(term.sum.item()) for term in output.terms.values())


def _all_masked(columns: Columns) -> Columns:
    masks = {f"{side}loss_mask" for side in SIDES} | {"response_masks", "mask"}
    changed = {
        name: _map(rows, rows, lambda entry, _: [0]) if name in masks else rows for name, rows in columns.items()
    }
    if "input_ids" in changed and "prompt_lengths" in changed:
        changed["prompt_lengths"] = [len(row) for row in changed["input_ids"]]
    for name in {"labels", "step_labels", "token_labels"} & set(changed):
        changed[name] = [[-100] * len(row) for row in changed[name]]
    return changed


def is_accurate_in_float32(case: Case, rng: np.random.Generator) -> None:
    """The same numbers, each a float32, computed in both precisions."""
    drawn = case.draw(rng)
    losses = []
    for dtype in (torch.float32, torch.float64):
        scores, fields = (
            {n: v.detach().float().to(dtype) if v.is_floating_point() else v for n, v in given.items()}
            for given in (drawn.scores, drawn.batch.fields)
        )
        losses.append(drawn.output(batch=replace(drawn.batch, fields=fields), scores=scores).loss().item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-5)


def waits_for_no_device(case: Case, rng: np.random.Generator) -> None:
    """On the device "meta" there are shapes and no numbers: asking for one raises, and so does what mixes devices."""
    drawn, device = case.draw(rng), torch.device("meta")
    scores = {name: values.detach().to(device) for name, values in drawn.scores.items()}
    leaves = [values.requires_grad_() for name, values in scores.items() if drawn.scores[name].requires_grad]
    output = drawn.output(drawn.batch.to(device), scores)
    total = torch.stack([term.sum for term in output.terms.values()]).sum()
    assert all(
        gradient is None or gradient.is_meta for gradient in torch.autograd.grad(total, leaves, allow_unused=True)
    )


PROPERTIES = [
    equals_the_plain_reference,
    passes_gradcheck,
    is_the_same_in_parts,
    ignores_what_is_not_scored,
    counts_no_row_that_has_nothing_scored,
    is_a_differentiable_zero_over_nothing,
    is_accurate_in_float32,
    waits_for_no_device,
]
