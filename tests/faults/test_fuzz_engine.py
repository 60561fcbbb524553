"""The real engine with batches, arguments and operations that are nearly right: each fails with a code of its own or
succeeds, nothing is a fault of the server, and the run goes on."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire_losses.registry import LossSpec, all_losses
from gradwire_proto.codec import CodecError, Column, encode
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.operation_kinds import KINDS, loss_call
from support.engine import LocalEngine, token_rows
from support.fuzz import FLOATS, Fuzzer
from support.keyed import code_of

from tests.server.engine.conftest import RandomBatches

pytestmark = pytest.mark.long

SHORT, LONG = 120, 10_000
RUNS: dict[str, dict[str, Any]] = {
    "run-plain": {"lora": 2},
    "run-value": {"head": "value", "lora": 2},
    "run-reward": {"head": "reward", "lora": 2},
}
FUZZED = [name for name, kind in KINDS.items() if not kind.writes_files]
"""The kinds of operations; names of files are checked before the engine."""


def spoil(rng: random.Random, columns: dict[str, Column]) -> dict[str, Column]:
    """A batch with something wrong in it, or not."""
    name = rng.choice(list(columns))
    column = columns[name]
    values, levels = column.values.copy(), column.levels
    how = rng.choice(("none", "drop", "value", "dtype", "unlevel", "extra", "cut", "move", "empty"))
    if how == "drop":
        return {other: kept for other, kept in columns.items() if other != name}
    if how == "value" and values.size:
        place = rng.randrange(values.size)
        bad = rng.choice(FLOATS) if values.dtype.kind == "f" else rng.choice((-1, 2, 10**6, -(2**31)))
        with np.errstate(over="ignore"):
            values.reshape(-1)[place] = bool(bad) if values.dtype.kind == "b" else bad
    elif how == "dtype":
        kinds = (np.int32, np.int64, np.float32, np.float64, np.bool_, np.uint8)
        values = np.clip(np.nan_to_num(values), 0, 100).astype(rng.choice(kinds))
    elif how == "unlevel":
        levels = levels[1:] if levels else (np.array([len(values)], np.uint32),)
    elif how == "extra":
        return columns | {rng.choice(("nonsense", "input_ids", "loss_mask", "rewards", "advantages")): column}
    elif how == "cut" and levels and len(levels[-1]) > 1:
        values = values[: int(levels[-1][0])]
        levels = (np.array([1], np.uint32),) * (len(levels) - 1) + (levels[-1][:1],)
    elif how == "move" and levels and len(levels[-1]) > 1 and levels[-1][0]:
        moved = levels[-1].copy()
        moved[0], moved[1] = moved[0] - 1, moved[1] + 1
        levels = (*levels[:-1], moved)
    elif how == "empty":
        values, levels = values[:0], tuple(level[:0] for level in levels)
    return columns | {name: Column(values, levels)}


def arguments(rng: random.Random, loss: LossSpec, fuzzer: Fuzzer) -> str:
    """Arguments of a loss: its own names mostly, with values of any kind."""
    known = list(loss.config.model_json_schema().get("properties", {}))
    found: dict[str, Any] = {}
    for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2))):
        name = rng.choice(known) if known and rng.random() < 0.9 else fuzzer.text()
        found[name] = rng.choice(
            (rng.choice(FLOATS), rng.randrange(-2, 5), fuzzer.text(), None, True, [], {}, [1, "x"])
        )
    return json.dumps(found)


def fuzz(tmp_path: Path, model: Path, rng: random.Random, count: int) -> None:
    engine = LocalEngine({"tiny": model}, tmp_path)
    for run_id, config in RUNS.items():
        engine.create(run_id, **config)
    fuzzer = Fuzzer(rng, ["tiny", "base", "ema", "run-plain/none"])
    batches = RandomBatches(np.random.default_rng(rng.randrange(2**32)))
    results = Counter[str]()
    for _ in range(count):
        run_id, kind = (
            rng.choice(list(RUNS)),
            rng.choices(FUZZED, [6 if name == "forward_backward" else 1 for name in FUZZED])[0],
        )
        loss = rng.choice(all_losses())
        columns = spoil(rng, batches.columns(loss, rng.randrange(1, 4), 2, 12))
        asked = pb.Operation()
        filled = getattr(asked, kind)
        filled.SetInParent()
        fuzzer.fill(filled)
        call = loss_call(asked)
        if call is not None:
            call.CopyFrom(pb.LossCall(loss_fn=loss.name, loss_kwargs_json=arguments(rng, loss, fuzzer)))
            if rng.random() < 0.2:
                call.outputs.append(rng.choice(("logprobs", "entropy", "values", "rewards", fuzzer.text())))
            if kind == "forward" and rng.random() < 0.3:
                call.model, call.temperature = fuzzer.text(), rng.choice(FLOATS)
        elif KINDS[kind].samples:
            filled.max_tokens, filled.n = filled.max_tokens % 9, filled.n % 4
            columns = token_rows([[4, 5], [6]], "prompt_ids") if rng.random() < 0.7 else {}
        operation: dict[str, Any] = {kind: filled}
        try:
            encode(columns)
        except CodecError:
            columns = {}
        result = engine.op(run_id, columns, **operation).proto
        code = "ok" if result.status == pb.STATUS_SUCCEEDED else code_of(result.error)
        what = (run_id, operation, {name: (column.values, column.levels) for name, column in columns.items()})
        assert code != "internal", (what, result.error)
        assert code == "ok" or result.error.message, what
        results[code] += 1
    for run_id in RUNS:
        engine.op(run_id, zero_grad=pb.ZeroGrad())
        ids = token_rows([[4, 5, 6, 7], [8, 9, 10]])
        assert np.isfinite(engine.logprobs(run_id, ids)).all(), "a refused operation changed the weights"
    print(f"{count} operations over {len(all_losses())} losses: {dict(results.most_common())}")
    assert results["ok"] > count / 20 and len(results) > 3


def test_operations_that_are_nearly_right(
    tmp_path: Path, tiny_model_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    fuzz(tmp_path, tiny_model_path, rng, SHORT)


@pytest.mark.faults
@pytest.mark.timeout(3600)
def test_thousands_of_operations_that_are_nearly_right(
    tmp_path: Path, tiny_model_path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    fuzz(tmp_path, tiny_model_path, rng, LONG)
