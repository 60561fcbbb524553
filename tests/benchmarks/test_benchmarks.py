"""The benchmarks run: every row at its smallest, as a user starts it, and what they count is counted right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.__main__ import BEGIN, END, ROWS, markdown
from benchmarks.growth import FACTORS, deviation
from benchmarks.qwen import SMOKE, Shape
from benchmarks.report import Figure, line
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, num_tokens

TRL_PYTHON = Path(os.environ.get("GRADWIRE_TRL_PYTHON", ROOT / ".venv-parity/bin/python"))
QUICK = [row for row in ROWS if row not in ("against_trl", "rl_rollouts", "growth")]


def run(module: str, *args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *args], cwd=ROOT, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def figures(file: Path) -> list[Figure]:
    return [Figure(**figure) for figure in json.loads(file.read_text())]


@pytest.mark.parametrize("row", QUICK)
def test_rows_run(row: str, tmp_path: Path) -> None:
    run(f"benchmarks.{row}", "--smoke", "--repeats", "1", "--json", str(tmp_path / "figures.json"))
    found = figures(tmp_path / "figures.json")
    assert found
    assert all(figure.value >= 0 and figure.detail for figure in found)


@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="no TRL here: make .venv-parity/.installed")
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trl_computes_the_same_losses(kind: str, tmp_path: Path) -> None:
    args = ("--smoke", "--repeats", "1", "--only", kind, "--json", str(tmp_path / "figures.json"))
    run("benchmarks.against_trl", *args)  # an AssertionError inside where a loss differs
    (figure,) = figures(tmp_path / "figures.json")
    assert "losses equal" in figure.detail


@pytest.mark.timeout(240)
def test_gpu_cases_run_at_tiny_shapes_and_are_not_run_twice(tmp_path: Path) -> None:
    results = tmp_path / "gpu.json"
    args = ("--smoke", "--results", str(results), "--models", str(tmp_path / "models"), "--only", "0.6B:full:")
    run("benchmarks.gpu", *args, "--only", "0.6B:lora:ours")
    first: dict[str, Any] = json.loads(results.read_text())["cases"]
    done = {name for name, case in first.items() if case.get("tokens_per_second", 0) > 0}
    assert {"0.6B:full:ours", "0.6B:full:padded", "0.6B:lora:ours"} <= done
    run("benchmarks.gpu", *args, "--only", "0.6B:lora:ours")
    again = json.loads(results.read_text())["cases"]
    assert {name: again[name] for name in done} == {name: first[name] for name in done}


def test_the_arithmetic_of_a_step_is_what_torch_counts() -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape, length = Shape(**SMOKE), 24
    config = Qwen3Config(**vars(shape), tie_word_embeddings=True, attn_implementation="eager")
    model = Qwen3ForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        ids = torch.randint(0, shape.vocab_size, (1, length))
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    # Eager attention multiplies every token with every other; causal attention needs half of that.
    unneeded = 6.0 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * length**2
    rotations = 2.0 * length * shape.head_dim / 2  # the rotary angles are a matrix product, too
    assert counter.get_total_flops() == pytest.approx(
        shape.step_flops([length], lora=False) + unneeded + rotations, rel=1e-3
    )


def test_an_adapter_needs_two_thirds_and_a_little() -> None:
    shape = Shape(1024, 3072, 28, 16, 8, 128, 151_936)
    share = shape.step_flops([512] * 8, lora=True) / shape.step_flops([512] * 8, lora=False)
    assert 0.66 < share < 0.75


def test_rows_are_padded_to_twice_their_tokens() -> None:
    draw = Draw.of(0)
    batches = [draw.rows() for _ in range(200)]
    lengths = [[len(row) for row in rows] for rows in batches]
    assert min(map(min, lengths)) >= 32
    assert max(map(max, lengths)) <= 512
    padded = sum(max(each) * len(each) for each in lengths)
    assert padded / sum(map(num_tokens, batches)) == pytest.approx(2.1, abs=0.05)


def test_pairs_and_groups_have_rows_lengths() -> None:
    draw = Draw.of(1)
    for batch in (draw.pairs(), draw.groups()):
        assert 16 * 32 <= num_tokens(batch) <= 16 * 512


def test_a_ratio_is_that_of_the_middle_turn() -> None:
    turns = Turns("ours", "theirs")
    for ours, theirs in ((9, 1), (2, 1), (4, 2), (9, 3)):
        turns.add("ours", ours, 1, 1)
        turns.add("theirs", theirs, 1, 1)
    turns.drop_first()
    assert turns.ratio() == 2


def test_losses_that_differ_are_not_compared_in_speed() -> None:
    check_losses([1.0, 0.0], [1.0001, 0.0])
    with pytest.raises(AssertionError, match="step 1"):
        check_losses([1.0, 2.0], [1.0, 2.1])


def test_a_straight_line_has_no_deviation() -> None:
    assert deviation(FACTORS, [1.5, 3.0, 9.0]) == pytest.approx(0, abs=1e-9)
    assert deviation(FACTORS, [1.0, 16.0, 256.0]) > 30


def test_a_figure_says_whether_it_was_reached() -> None:
    assert "MISSED" in line(Figure("a", 5.0, "ms", 4.0, at_least=False))
    assert "reached" in line(Figure("a", 5.0, "x", 4.0))
    assert Figure("a", 5.0, "%").reached is None


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "docs/performance.md").read_text()
    assert page.count(BEGIN) == page.count(END) == 1
    table = markdown([Figure("speed", 2.0, "x", 1.9, detail="d")], {"memory": "why"}, "a machine", 5)
    assert "| speed | 2.00 x | ≥ 1.9 | reached | d |" in table
    assert "| memory | none | | failed | why |" in table
