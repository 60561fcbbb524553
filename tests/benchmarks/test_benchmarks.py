"""The benchmarks run: every row at its smallest, as a user starts it, and what they count is counted right."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ROOT, roofline
from benchmarks.__main__ import BEGIN, END, LONG_BEGIN, LONG_END, LONG_ROWS, ROWS, markdown
from benchmarks.gpu_cases import Case, run_case
from benchmarks.qwen import SMOKE, Shape
from benchmarks.qwen import shape as shape_of
from benchmarks.report import Figure, Size, line
from benchmarks.turns import Turns, check_losses
from benchmarks.workload import Draw, num_tokens

TRL_PYTHON = Path(os.environ.get("GRADWIRE_TRL_PYTHON", ROOT / ".venv-parity/bin/python"))
TINKER_PYTHON = Path(os.environ.get("GRADWIRE_TINKER_PYTHON", ROOT / ".venv-tinker/bin/python"))
APART = ("against_trl", "real_shapes", "groups", "grpo_loop", "tinker_door")


def run(module: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *args], cwd=ROOT, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow  # minutes together
@pytest.mark.parametrize("row", [row for row in (*ROWS, *LONG_ROWS) if row not in APART])
def test_rows_run(row: str) -> None:
    found = importlib.import_module(f"benchmarks.{row}").measure(Size(repeats=1, smoke=True))
    assert found
    assert all(figure.value >= 0 and figure.detail for figure in found)


@pytest.mark.timeout(1200)  # seconds, where nothing else computes
@pytest.mark.slow  # half a minute
def test_the_table_is_one_command(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    said = run("benchmarks", "--smoke", "--repeats", "1", "--only", "overhead", "--json", str(file))
    report = json.loads(file.read_text())
    assert [figure["name"] for figure in report["figures"]] == [
        "overhead of the service, awaited",
        "overhead of the service, submitted, then awaited",
        "overhead of the service, train_step",
        "operations in a pipeline",
    ]
    assert not report["failures"]
    assert {"cpu", "cores", "threads", "torch", "load_average", "commit"} <= set(report["machine"])
    assert report["machine"]["torch"] in said


def test_groups_are_sampled_beside_generate_within_their_memory() -> None:
    rate, memory = importlib.import_module("benchmarks.groups").measure(Size(1, smoke=True, only=("generate",)))
    assert rate.value > 0 and rate.detail
    assert 0 < memory.value < 4  # a page of each sample is not full, which is much of so few tokens


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="no TRL here: make .venv-parity/.installed")
def test_an_iteration_of_grpo_runs_on_both_sides() -> None:
    (figure,) = importlib.import_module("benchmarks.grpo_loop").measure(Size(1, smoke=True, only=("short prompts",)))
    assert figure.value > 0


@pytest.mark.slow
@pytest.mark.skipif(not TINKER_PYTHON.exists(), reason="no Tinker SDK here: make .venv-tinker/.installed")
def test_tinkers_sdk_loses_nothing() -> None:
    awaited, beside, clients = importlib.import_module("benchmarks.tinker_door").measure(Size(repeats=1, smoke=True))
    assert awaited.target == 12 and beside.value > 0 and clients.value > 0


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="no TRL here: make .venv-parity/.installed")
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo", "sft-padding-free"])
def test_trl_computes_the_same_losses(kind: str) -> None:
    found = importlib.import_module("benchmarks.against_trl").measure(Size(repeats=1, smoke=True, only=(kind,)))
    assert ["losses equal" in figure.detail for figure in found] == [True]  # an AssertionError where one differs


@pytest.mark.slow
def test_gpu_cases_run_at_tiny_shapes_and_are_not_run_twice(tmp_path: Path) -> None:
    results, models = tmp_path / "gpu.json", tmp_path / "models"
    args = ("--smoke", "--results", str(results), "--models", str(models), "--only", "0.6B:full:padded")
    said = run("benchmarks.gpu", *args)
    assert "tokens/s" in said
    first = json.loads(results.read_text())["cases"]
    assert first["0.6B:full:padded"]["tokens_per_second"] > 0
    run("benchmarks.gpu", *args)
    assert json.loads(results.read_text())["cases"] == first
    results.write_text(json.dumps({"device": "NVIDIA H200", "cases": first}))
    for wrong, why in (([], "has results of NVIDIA H200"), (["--only", "9B"], "--only 9B is none of 4B:lora:service")):
        words = [sys.executable, "-m", "benchmarks.gpu", *(wrong or args), "--smoke"]
        refused = subprocess.run([*words, "--results", str(results)], cwd=ROOT, capture_output=True, text=True)
        assert refused.returncode == 2 and why in refused.stderr


@pytest.mark.slow  # half a minute
def test_the_service_on_a_gpu_shows_its_steps_by_part(tmp_path: Path) -> None:
    results, models = tmp_path / "gpu.json", tmp_path / "models"
    only = ("--only", "0.6B:lora:service", "--results", str(results), "--models", str(models))
    said = run("benchmarks.gpu", "--smoke", *only)
    found = json.loads(results.read_text())["cases"]["0.6B:lora:service"]
    assert not [each for each in found["parts"].values() if isinstance(each, dict) and "error" in each]
    assert {*found["steps"]} == {"4k", "16k"}
    for title, step in found["steps"].items():
        (line,) = [each.split() for each in said.splitlines() if each.split()[:3] == ["0.6B", "lora", title]]
        assert line[3:] == [f"{milliseconds:,.1f}" for milliseconds in step["measured"].values()]


@pytest.mark.parametrize("tuning", ["lora", "full"])
@pytest.mark.slow  # a quarter of a minute
def test_our_side_on_a_gpus_models(tuning: str, tmp_path: Path) -> None:
    found = run_case(Case("0.6B", tuning, "ours"), tmp_path, "cpu", smoke=True)
    assert found["tokens_per_second"] > 0
    assert found["flops_per_second"] > 0


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # a name that peft uses
def test_the_least_time_of_a_step_is_that_of_its_arithmetic() -> None:
    case = next(each for each in roofline.CASES if each.size == "0.6B")
    assert roofline.line(case) in roofline.written(), "run `python -m benchmarks.roofline`"
    assert [line.split("| ")[1].strip() for line in roofline.written().splitlines()[2:]] == [
        each.title for each in roofline.CASES
    ]
    least = roofline.milliseconds(case)
    needed = 1000 * shape_of("0.6B", smoke=False).step_flops(case.rows, lora=False) / roofline.PRODUCTS
    assert needed <= least["products"] + least["attention"] + least["vocabulary"] <= 1.5 * needed
    faster = roofline.milliseconds(case, 100 * roofline.BANDWIDTH["H200"])  # then only the arithmetic takes time
    assert needed <= sum(faster.values()) <= 1.2 * needed


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


def test_a_figure_says_whether_it_was_reached() -> None:
    assert "MISSED" in line(Figure("a", 5.0, "ms", 4.0, at_least=False))
    assert "reached" in line(Figure("a", 5.0, "x", 4.0))
    assert Figure("a", 5.0, "%").reached is None


def test_the_page_has_a_place_for_the_table() -> None:
    page = (ROOT / "benchmarks/README.md").read_text()
    assert page.count(BEGIN) == page.count(END) == page.count(LONG_BEGIN) == page.count(LONG_END) == 1
    table = markdown([Figure("speed", 2.0, "x", 1.9, detail="d")], {"memory": "why"}, "a machine", 5)
    assert "| speed | 2.00 x | ≥ 1.9 | reached | d |" in table
    assert "| memory | none | | failed | why |" in table
