"""Trainings: what they learn, that a seed decides every byte, and that a killed one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.router import LinearPolicy, RouterPPOAdapter, RouterSettings, TrainingDisabledError
from gradwire.router.run_folder import RunFolderError
from gradwire.router.settings_file import load_settings
from gradwire.router.trainer import PPOTrainer

ARTIFACTS = ["config_snapshot.yaml", "metadata.json", "policy_state.npz", "training_history.json"]
SAME = [name for name in ARTIFACTS if name != "metadata.json"]


def small(**sections: Any) -> RouterSettings:
    """A training of a second that writes to ``out``."""
    given: dict[str, Any] = {
        "rllm": {"enabled": True},
        "rollout": {"environments": 128, "rollout_length": 8},
        "trainer": {"enabled": True, "updates": 5, "mini_batch_size": 256},
        "experiment": {"enabled": True, "output_dir": "out"},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    return RouterSettings.model_validate(given)


def files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in SAME}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_learns_to_route() -> None:
    settings = small(
        trainer={"updates": 25}, evaluation={"enabled": True, "episodes": 1000}, experiment={"enabled": False}
    )
    result = RouterPPOAdapter(settings).train(seed=3)
    assert result.report is not None
    policy, single, oracle, random, neighbours = result.report.routers
    assert random.reward < single.reward < policy.reward < oracle.reward
    assert policy.recovered > 0.8
    assert neighbours.reward < oracle.reward
    assert result.history[-1]["entropy"] < result.history[0]["entropy"]
    assert not Path("out").exists()


def test_disabled_settings_train_nothing_and_name_the_switches() -> None:
    with pytest.raises(TrainingDisabledError, match=r"set rllm\.enabled: true and trainer\.enabled: true"):
        RouterPPOAdapter().train()
    with pytest.raises(TrainingDisabledError, match=r"set trainer\.enabled: true$"):
        RouterPPOAdapter({"rllm": {"enabled": True}}).train()
    assert list(Path().iterdir()) == []


@pytest.mark.long
def test_a_seed_decides_every_byte_whatever_the_workers() -> None:
    written = []
    for workers in (1, 1, 2):
        settings = small(
            rollout={"environments": 300, "workers": workers}, evaluation={"enabled": True, "episodes": 200}
        )
        RouterPPOAdapter(settings).train(seed=7)
        assert sorted(each.name for each in Path("out").iterdir()) == ARTIFACTS
        written.append(files(Path("out")))
    assert written[0] == written[1]
    written[2].pop("config_snapshot.yaml"), written[0].pop("config_snapshot.yaml")  # it names the workers
    assert written[0] == written[2]
    RouterPPOAdapter(settings).train(seed=8)
    assert files(Path("out"))["policy_state.npz"] != written[0]["policy_state.npz"]


def test_the_snapshot_reproduces_the_run() -> None:
    RouterPPOAdapter(small()).train(updates=3, seed=11)
    before = files(Path("out"))
    snapshot = load_settings("out/config_snapshot.yaml")
    assert (snapshot.trainer.updates, snapshot.trainer.seed) == (3, 11)
    RouterPPOAdapter("out/config_snapshot.yaml").train()
    assert files(Path("out")) == before


def test_the_artifacts_say_what_happened() -> None:
    result = RouterPPOAdapter(small(trainer={"reward_weights": {"cost": 0.9}})).train(seed=5)
    history = json.loads(Path("out/training_history.json").read_text())
    assert history == result.history
    assert [each["update"] for each in history] == [1, 2, 3, 4, 5]
    wanted = {"mean_reward", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "explained_variance"}
    assert all(wanted <= set(each) and all(np.isfinite(each[name]) for name in wanted) for each in history)
    metadata = json.loads(Path("out/metadata.json").read_text())
    assert (metadata["seed"], metadata["updates"], metadata["reward_weights"]["cost"]) == (5, 5, 0.9)
    assert metadata["ppo"]["mini_batch_size"] == 256
    assert {"gradwire", "numpy", "python"} == set(metadata["versions"])
    stored = LinearPolicy.load("out/policy_state.npz")
    assert all((stored.parameters[name] == array).all() for name, array in result.policy.parameters.items())


TRAIN = [sys.executable, "-m", "gradwire.router", "train", "--config", "settings.yaml"]


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*TRAIN, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_update(process: subprocess.Popen[str], update: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"update {update}:"):
            return
    raise AssertionError(process.stderr.read() if process.stderr else "")


LONG = """
rllm: {enabled: true}
rollout: {environments: 512}
trainer: {enabled: true, updates: 60, mini_batch_size: 512}
evaluation: {enabled: true, episodes: 500, interval: 7}
experiment: {enabled: true, output_dir: out}
hicra: {enabled: true, normalize: false}
"""


@pytest.mark.slow
def test_a_killed_and_an_interrupted_run_end_with_the_same_bytes() -> None:
    Path("settings.yaml").write_text(LONG)
    RouterPPOAdapter("settings.yaml").train(seed=1)
    whole = files(Path("out"))
    for file in Path("out").iterdir():
        file.unlink()

    killed = start("--seed", "1")
    deadline = time.monotonic() + 120
    while not Path("out/resume_state.npz").exists():
        assert killed.poll() is None and time.monotonic() < deadline, killed.communicate()
        time.sleep(0.005)
    killed.kill()
    killed.communicate()
    assert [each.name for each in Path("out").iterdir() if not each.name.startswith(".")] == ["resume_state.npz"]

    refused = subprocess.run([*TRAIN, "--seed", "1"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "an interrupted run is in out: continue with --resume, or start anew with --overwrite" in refused.stderr
    other = subprocess.run([*TRAIN, "--seed", "2", "--resume"], capture_output=True, text=True)
    assert other.returncode == 1
    assert "has other settings: `seed: 1` there, `seed: 2` here" in other.stderr

    interrupted = start("--seed", "1", "--resume")
    assert interrupted.stdout is not None
    going_on = interrupted.stdout.readline()
    assert going_on.startswith("continuing after update "), going_on
    wait_for_update(interrupted, int(going_on.split()[-1]) + 1)
    interrupted.send_signal(signal.SIGINT)
    _, said = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 1
    assert "continue with --resume" in said
    assert "Traceback" not in said

    done = subprocess.run([*TRAIN, "--seed", "1", "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert files(Path("out")) == whole
    assert sorted(each.name for each in Path("out").iterdir()) == ARTIFACTS


def test_resuming_needs_a_folder_and_begins_where_there_is_nothing() -> None:
    with pytest.raises(ValueError, match=r"to resume, set experiment\.enabled"):
        RouterPPOAdapter(small(experiment={"enabled": False})).train(resume=True)
    assert RouterPPOAdapter(small()).train(resume=True).stopped == "all 5 updates are done"
    Path("out/resume_state.npz").write_bytes(b"torn")
    with pytest.raises(RunFolderError, match="cannot be read"):
        RouterPPOAdapter(small()).train(resume=True)


def test_the_autopilot_stops_when_it_no_longer_helps_and_keeps_the_best() -> None:
    settings = small(
        trainer={"learning_rate": 0.2},
        evaluation={"enabled": True, "episodes": 300},
        autopilot={"enabled": True, "updates_per_round": 3, "patience": 2, "min_improvement": 0.01, "max_updates": 90},
    )
    result = RouterPPOAdapter(settings).train(seed=0)
    rewards = [each["evaluation_reward"] for each in result.history if each["evaluation_reward"] is not None]
    assert len(rewards) * 3 == len(result.history) < 90
    assert "no improvement in 2 rounds" in result.stopped
    assert result.report is not None
    best = rewards[-3]
    assert max(rewards[-2:]) <= best + 0.01
    assert result.report.routers[0].reward == pytest.approx(best)
    assert RouterPPOAdapter(settings).train(updates=4, seed=0).stopped == "the budget of 4 updates is spent"


def test_hicra_takes_the_place_of_the_rewards() -> None:
    raw = PPOTrainer(small(), 0)
    credited = PPOTrainer(small(hicra={"enabled": True, "normalize": False, "multiplier": 2.0}), 0)
    ours, theirs = raw.update(), credited.update()
    assert ours["mean_reward"] == theirs["mean_reward"]
    assert theirs["value_loss"] != ours["value_loss"]
    rollout = PPOTrainer(small(), 0)._collect()
    rewards = rollout.episodes.reward
    first = rollout.rewards[rollout.starts]
    assert theirs["hicra_planner_reward_ratio"] == pytest.approx((first / rewards).mean())
    assert theirs["hicra_depth"] == pytest.approx(rollout.episodes.steps.mean())
    assert theirs["hicra_success_total"] == (rewards > 0).sum()
    assert not any(name.startswith("hicra") for name in ours)


def test_an_update_whose_credits_are_all_zero_is_skipped_counted_and_said() -> None:
    said: list[str] = []
    settings = small(hicra={"enabled": True, "multiplier": 0.0}, trainer={"updates": 2})
    result = RouterPPOAdapter(settings).train(said=said.append)
    assert result.skipped_updates == 2
    assert [each["skipped_updates"] for each in result.history] == [1, 2]
    assert result.history[0]["policy_loss"] is None
    assert all((array == 0).all() for array in result.policy.parameters.values())
    assert sum("is skipped: every credit is zero" in line for line in said) == 2
    assert any("set hicra.normalize: false" in line for line in said)
    assert json.loads(Path("out/metadata.json").read_text())["skipped_updates"] == 2
