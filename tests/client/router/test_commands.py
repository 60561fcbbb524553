"""The command ``gradwire router``, as a user starts it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.router.commands import main

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "configs/policy/rllm.yaml"
ON = ["rllm.enabled=true", "trainer.enabled=true", "experiment.enabled=true", "evaluation.enabled=true"]
SMALL = ["rollout.environments=128", "evaluation.episodes=200"]
SETTINGS = ["--config", str(SHIPPED), *(word for each in ON + SMALL for word in ("--set", each))]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_policy_is_trained_evaluated_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", *SETTINGS, "--updates", "6", "--seed", "42", "--episode-length", "4"])
    said = capsys.readouterr().out
    assert len(re.findall(r"^update \d: reward \d\.\d+  policy loss", said, re.MULTILINE)) == 6
    assert re.search(r"mean_reward +\d\.\d+ +▁.*█", said)
    assert "policy: outputs/rllm/policy_state.npz" in said
    main(["evaluate", *SETTINGS])
    said = capsys.readouterr().out
    assert all(
        name in said for name in ("policy", "single: large", "oracle", "random", "40 neighbours", "APGR", "CPT 80%")
    )
    main(["explain", "outputs/rllm/policy_state.npz", "--top", "2"])
    said = capsys.readouterr().out
    assert "planner_worker" in said or "planner_" in said
    assert "(no feature)" in said


def test_the_settings_are_printed_as_shipped(capsys: pytest.CaptureFixture[str]) -> None:
    main(["config"])
    assert capsys.readouterr().out == SHIPPED.read_text()
    main(["config", "--set", "trainer.gamma=0.5"])
    assert "gamma: 0.5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--config", "none.yaml"], "no settings file none.yaml; `gradwire router config > none.yaml`"),
        (["train", *SETTINGS, "--updates", "0"], "--set trainer.updates: input should be greater than 0, not 0"),
        (["explain", "none.npz"], "there is no policy at none.npz"),
        (["evaluate", *SETTINGS], "there is no policy at outputs/rllm/policy_state.npz"),
        (["train", "--config", str(ROOT / "README.md")], "README.md, line "),
    ],
)
def test_mistakes_are_told_in_a_line(words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert says in str(stopped.value)


@pytest.mark.long
def test_the_example_and_the_installed_command_are_the_same_door() -> None:
    words = ["--config", str(SHIPPED), "--updates", "8", "--seed", "42"]
    script = [sys.executable, str(ROOT / "scripts/run_router_ppo.py"), *words]
    installed = [str(Path(sys.executable).with_name("gradwire")), "router", "train", *words]
    said = [subprocess.run(each, capture_output=True, text=True, check=False) for each in (script, installed)]
    assert [each.returncode for each in said] == [0, 0], [each.stderr for each in said]
    assert "nothing was trained or written" in said[0].stdout
    assert said[0].stdout == said[1].stdout
