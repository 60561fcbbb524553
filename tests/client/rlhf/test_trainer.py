"""Both stages on a real server: what is written, what is refused, and going on after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
import torch
from gradwire import InvalidArgumentError, UnknownModelError
from gradwire.rlhf import RewardModel, RewardModelConfig, RLHFTrainer, TrainingConfig, TrainingProgress, TrainingResult
from safetensors.numpy import load_file
from support.server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

REWARD = RewardModelConfig(base_model="tiny", learning_rate=3e-3, batch_size=16, num_epochs=2)
CONFIG = TrainingConfig(base_model="tiny", max_steps=4, max_new_tokens=8, learning_rate=1e-3, lora_alpha=16)


@pytest.fixture(scope="module")
def trained(server: Server, ratings: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Any:
    progress: list[TrainingProgress] = []
    trainer = RLHFTrainer(CONFIG, reward_config=REWARD, address=server.address)
    output = tmp_path_factory.mktemp("trained")
    return trainer.train(ratings, output, on_progress=progress.append, progress_bar=False), output, progress


def test_the_result_and_the_progress(trained: Any, ratings: list[dict[str, Any]]) -> None:
    result, output, progress = trained
    assert result == TrainingResult.load(output)
    assert (result.feedback_count, result.training_steps) == (len(ratings), 4)
    assert (result.model_path, result.reward_model_path) == (str(output / "policy"), str(output / "reward_model"))
    curves = result.reward_history, result.kl_history, result.loss_history, result.value_error_history
    assert [len(curve) for curve in curves] == [4] * 4
    assert np.isfinite(curves).all()
    assert abs(result.kl_history[0]) < 1e-4, "the first answers are the starting policy's own"
    assert max(result.kl_history[1:]) > 1e-3
    assert result.final_reward_mean == pytest.approx(result.reward_history[-1])
    assert {each.stage for each in progress} == {"reward_model", "policy", "export"}
    assert [each.step for each in progress if each.stage == "policy"] == [1, 2, 3, 4]


def test_the_policy_is_a_plain_folder_with_the_same_logprobs(
    trained: Any, server: Server, tiny_model_path: Path
) -> None:
    result, _, _ = trained
    model = AutoModelForCausalLM.from_pretrained(result.model_path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(result.model_path)
    rows = [tokenizer(text).input_ids for text in ("word 3: abab", "word 12: bbbbbbbb", "a")]
    assert rows[0] == AutoTokenizer.from_pretrained(tiny_model_path)("word 3: abab").input_ids
    run_id = result.policy_checkpoint.partition("/")[0]
    with gradwire.sync.connect(server.address) as service:
        run = service.get_training_client(run_id)
        expected = run.compute_logprobs(rows).result()
        base = run.compute_logprobs(rows, model="base").result()
    for row, theirs in zip(rows, expected):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0, :-1]
        ours = logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].numpy()
        assert np.allclose(ours, theirs, atol=1e-5)
    assert not np.allclose(expected[0], base[0], atol=1e-3)


def test_trained_again_it_gives_the_result_again(trained: Any, ratings: list[dict[str, Any]]) -> None:
    result, output, _ = trained
    nowhere = RLHFTrainer(CONFIG, reward_config=REWARD, address="127.0.0.1:1")
    assert nowhere.train(ratings, output) == result


async def test_the_next_version_goes_on_from_the_last_with_its_reward_model(
    trained: Any, server: Server, ratings: list[dict[str, Any]], tmp_path: Path
) -> None:
    first, _, _ = trained

    class Negated(RewardModel):
        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            return 1 - super().forward(input_ids, attention_mask)

    config = TrainingConfig(base_model=first.model_path, max_steps=1, max_new_tokens=8, lora_alpha=16)
    async with gradwire.connect(server.address) as service:
        results = [
            await RLHFTrainer(config, service=service, reward_model_class=kind).train_async(
                ratings, tmp_path / kind.__name__, reward_model_path=first.reward_model_path, progress_bar=False
            )
            for kind in (RewardModel, Negated)
        ]
        run = await service.get_training_client(results[0].policy_checkpoint.partition("/")[0]).info()
    assert run.forked_from == first.policy_checkpoint
    assert [each.reward_model_path for each in results] == [first.reward_model_path] * 2
    assert abs(results[0].kl_history[0]) < 1e-4, "KL is to the version that it started from"
    assert results[1].reward_history[0] == pytest.approx(1 - results[0].reward_history[0], abs=1e-5)
    assert not (tmp_path / "RewardModel" / "reward_model").exists()


def test_what_cannot_be_trained_with_is_refused(server: Server, ratings: list[dict[str, Any]], tmp_path: Path) -> None:
    def trainer(**settings: Any) -> RLHFTrainer:
        return RLHFTrainer(
            TrainingConfig(**{"base_model": "tiny", "max_new_tokens": 8} | settings), address=server.address
        )

    with pytest.raises(InvalidArgumentError, match=r"there are 7 ratings.*3 are missing") as caught:
        trainer().train(ratings[:7], tmp_path)
    assert caught.value.field == "feedbacks"
    with pytest.raises(UnknownModelError, match="holds tiny"):
        trainer(base_model="gpt3").train(ratings, tmp_path / "a")
    with pytest.raises(InvalidArgumentError, match="256 tokens") as caught:
        trainer(max_new_tokens=300).train(ratings, tmp_path / "b")
    assert caught.value.field == "max_new_tokens"
    with pytest.raises(InvalidArgumentError, match="not a reward model"):
        trainer().train(ratings, tmp_path / "c", reward_model_path=tmp_path)
    with pytest.raises(InvalidArgumentError, match="another folder") as caught:
        trainer(base_model=str(tmp_path / "d" / "policy")).train(ratings, tmp_path / "d")
    assert caught.value.field == "output_dir"


PROGRAM = """
import json, sys
from gradwire.rlhf import RewardModelConfig, RLHFTrainer, TrainingConfig
config, reward, ratings, output = json.loads(sys.stdin.read())
RLHFTrainer(TrainingConfig(**config), reward_config=RewardModelConfig(**reward)).train(
    ratings, output, on_progress=lambda p: print(p.stage, p.step, flush=True), progress_bar=False
)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_in_either_stage_it_equals_one_that_was_not(
    ratings: list[dict[str, Any]], tiny_model_path: Path, tmp_path: Path
) -> None:
    """With the server of its own, which dies with it."""
    shared = {"base_model": str(tiny_model_path), "batch_size": 16}
    config = shared | {"max_steps": 6, "max_new_tokens": 8, "learning_rate": 1e-3}
    reward = shared | {"num_epochs": 2, "learning_rate": 3e-3}

    def start(output: Path) -> subprocess.Popen[str]:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert program.stdin is not None
        program.stdin.write(json.dumps([config, reward, ratings, str(output)]))
        program.stdin.close()
        return program

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for stage, step in (("reward_model", 7), ("policy", 3)):
        program = start(killed)
        assert program.stdout is not None
        for line in program.stdout:
            if line.split() == [stage, str(step)]:
                break
        program.send_signal(signal.SIGKILL)
        assert program.wait(60) == -signal.SIGKILL
        program.stdout.close()
    rest, never_killed = (finish(start(output)) for output in (killed, whole))
    assert "reward_model 1" not in rest, "stage one was done when the second kill came"
    assert "policy 1" not in rest and rest[-2:] == ["export 0", "export 1"]
    assert never_killed[0] == "reward_model 1"
    result, expected = TrainingResult.load(killed), TrainingResult.load(whole)
    paths = {"model_path": expected.model_path, "reward_model_path": expected.reward_model_path}
    assert replace(result, **paths) == expected, "bit by bit"
    curves = result.reward_history, result.kl_history, result.loss_history, result.value_error_history
    assert [len(curve) for curve in curves] == [6] * 4 and np.isfinite(curves).all()
    for folder in ("policy", "reward_model"):
        ours, theirs = (load_file(output / folder / "model.safetensors") for output in (killed, whole))
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    AutoModelForCausalLM.from_pretrained(result.model_path)
    assert not (killed / ".gradwire" / "server").exists()


def finish(program: subprocess.Popen[str]) -> list[str]:
    """What it printed, once it has ended well."""
    assert program.stdout is not None
    printed = [line.strip() for line in program.stdout]
    program.stdout.close()
    assert program.wait(300) == 0
    return printed
