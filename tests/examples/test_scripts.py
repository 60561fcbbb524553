"""Every script in examples/ runs as a user would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.server import Server

pytestmark = pytest.mark.long

SHORT = ["sft", "dpo", "reward_model", "ppo_with_gae", "grpo", "importance_sampling", "distillation", "custom_loss"]


def execute(root: Path, *arguments: str | Path, timeout: float = 580) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"COLUMNS": "120"},
    )


def test_every_script_is_run_by_some_test(root: Path) -> None:
    tests = "".join(file.read_text() for file in (root / "tests").rglob("test_*.py"))
    scripts = (root / "examples").glob("*.py")
    assert [file.name for file in scripts if f'"{file.stem}"' not in tests and file.name not in tests] == []


@pytest.mark.parametrize("name", SHORT)
def test_short_script(name: str, root: Path, example_server: Server) -> None:
    script = root / "examples" / f"{name}.py"
    done = execute(root, script, "--steps", "2", "--address", example_server.address, "--model", "tiny")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 0: \w+ -?\d+\.\d+", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^step 1: ", done.stdout, re.MULTILINE), done.stdout


def test_the_primitives_scripts(root: Path) -> None:
    done = execute(root, root / "examples" / "inference_examples.py")
    assert done.returncode == 0 and "logits 8 tokens by 100" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            ["complete_training_example.py", "--iterations", "1", "--batch-size", "8"],
            "PPO, parts of one's own",
        ),
        (["backprop_usage.py"], "epoch 3: gradient norm"),
    ],
)
def test_the_primitives_trainings(script: list[str], said: str, root: Path) -> None:
    done = execute(root, root / "examples" / script[0], *script[1:])
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_a_script_alone_starts_its_own_server(root: Path) -> None:
    done = execute(root, root / "examples" / "sft.py", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "step 0: loss 2." in done.stdout or "step 0: loss 3." in done.stdout  # ln of 18 tokens is 2.9


FEW = ["--sft-steps", "6", "--reward-steps", "4", "--practice-prompts", "8", "--ppo-steps", "1", "--ppo-prompts", "16"]


@pytest.mark.slow
def test_three_stages_on_their_own_task(root: Path, tmp_path: Path) -> None:
    done = execute(root, root / "examples" / "three_stage_rlhf.py", "--out", tmp_path, *FEW)
    # Six steps teach nobody to add: the loss falls, the accuracy stays at zero, and the script has to say so.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "SFT: answer accuracy (share of answers, sampled at temperature 1) did not improve" in done.stdout
    assert "SFT: loss" not in done.stdout
    curves = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
    steps = {(curve["stage"], curve["metric"]): len(curve["points"]) for curve in curves}
    assert steps["SFT", "loss"] == 6
    assert steps["reward model", "preference_accuracy"] == 4
    assert steps["PPO", "reward"] == 1
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "KL to the SFT policy" in page


@pytest.mark.slow
def test_three_stages_on_files(root: Path, tmp_path: Path) -> None:
    problems = [{"question": f"What is {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(60)]
    pairs = [{"prompt": p["question"], "chosen": p["answer"], "rejected": "I do not know.\n#### 0"} for p in problems]
    for name, rows in (("problems", problems), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["--sft-data", tmp_path / "problems.jsonl", "--prompt-data", tmp_path / "problems.jsonl"]
    data += ["--preference-data", tmp_path / "pairs.jsonl", "--model-size", "32x1", "--max-tokens", "16"]
    done = execute(root, root / "examples" / "three_stage_rlhf.py", "--out", tmp_path / "out", *data, *FEW)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # what 6 steps improve depends on rounding
    page = (tmp_path / "out" / "report.html").read_text()
    for said in ("problems.jsonl", "pairs.jsonl", "1 of 16 answers", "0.001 after 20 steps of linear warm-up"):
        assert said in page, said
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", page)]
    assert len(rows) == 7 and all(unit for _, _, unit, *_ in rows)
    assert {unit for _, name, unit, *_ in rows if "KL" in name} == {"nats per answer", "nats per token"}


def test_a_file_with_a_missing_field_is_named(root: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n{"question": "2+2?"}\n')
    data = [word for name in ("sft", "preference", "prompt") for word in (f"--{name}-data", tmp_path / "rows.jsonl")]
    done = execute(root, root / "examples" / "three_stage_rlhf.py", *data)
    assert done.returncode == 1
    assert "rows.jsonl, line 2" in done.stderr
    assert "answer" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_improves_every_figure(root: Path, tmp_path: Path) -> None:
    done = execute(root, root / "examples" / "three_stage_rlhf.py", "--out", tmp_path, timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_language_model_routes_requests(root: Path) -> None:
    few = ["--iterations", "1", "--batch-size", "4", "--imitation-steps", "40", "--held-out", "20"]
    done = execute(root, root / "examples" / "router_language_model.py", *few)
    assert done.returncode == 0, done.stderr
    assert "strategic in" in done.stdout
    earned = {
        line[:34].strip(): float(line[34:].split()[0])
        for line in done.stdout.rpartition("router  ")[2].splitlines()[1:]
    }
    assert {"as it started", "language model, GRPO", "language model, HICRA", "oracle"} <= set(earned)
    assert max(earned.values()) == earned["oracle"] > earned["linear policy, PPO's defaults"] > earned["random"]


@pytest.mark.slow
def test_scores_from_preferences(root: Path, tmp_path: Path) -> None:
    problems = [{"question": f"What is {n} and {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(60)]
    pairs = [{"prompt": p["question"], "chosen": p["answer"], "rejected": "I do not know."} for p in problems]
    for name, rows in (("demonstrations", problems), ("preferences", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [word for name in ("demonstrations", "preferences") for word in (f"--{name}", tmp_path / f"{name}.jsonl")]
    few = ["--setup-steps", "4", "--hidden-size", "32", "--steps", "2", "--max-new-tokens", "8"]
    script = root / "examples" / "scores_from_preferences.py"
    done = execute(root, script, *files, *few, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120 scored answers to 60 prompts" in done.stdout
    figures = re.search(r"24 held-out answers: Pearson (-?\d\.\d+)", done.stdout)
    assert figures is not None, done.stdout
    assert (tmp_path / "out" / "trained" / "policy" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hicra_beside_grpo_and_random_grams(root: Path, tmp_path: Path) -> None:
    few = ["--seeds", "1", "--iterations", "2", "--imitation-steps", "200", "--output", tmp_path]
    done = execute(root, root / "examples" / "hicra_language_model.py", *few, timeout=900)
    assert done.returncode == 0, done.stderr
    assert re.search(r"are strategic and mark \d+% of tokens; \d+ random clusters mark", done.stdout)
    for arm in ("GRPO", "HICRA", "random grams"):
        assert re.search(rf"^\| plan and calculate \| {arm} \| 0\.\d\d → 0\.\d\d", done.stdout, re.MULTILINE)
        [*lines] = (tmp_path / f"{arm.replace(' ', '-')}-0" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == 2
        fraction = json.loads(lines[0])["train/planning_fraction"]
        assert (fraction is None) if arm == "GRPO" else 0.1 < fraction < 0.9
    assert (tmp_path / "curves.svg").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_feedback_loop_improves_from_version_to_version(root: Path, tmp_path: Path) -> None:
    done = execute(root, root / "examples" / "feedback_loop.py", "--out", tmp_path / "out", timeout=900)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
