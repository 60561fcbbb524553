"""A reward model learns ratings on a real server, says how well, and comes back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import InvalidArgumentError
from gradwire.rlhf import FeedbackDataset, RewardModel, RewardModelConfig, train_reward_model, train_reward_model_async
from support.server import Server
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG = RewardModelConfig(base_model="tiny", learning_rate=3e-3, batch_size=16, num_epochs=6, lora_dropout=0.0)


@pytest.fixture(scope="module")
def judge(server: Server, ratings: list[dict[str, Any]]) -> Any:
    train, val = FeedbackDataset(ratings).split()
    with train_reward_model(train, val, CONFIG, address=server.address, progress_bar=False) as model:
        yield model


def test_it_predicts_held_out_ratings(judge: RewardModel, ratings: list[dict[str, Any]]) -> None:
    report = judge.report
    assert report is not None
    _, val = FeedbackDataset(ratings).split()
    assert val is not None and report.num_ratings == len(val)
    assert report.mean_squared_error < 0.5 * report.baseline_error
    assert report.pearson > 0.7 and report.spearman > 0.7
    scores = judge.score([item.prompt for item in val], [item.response for item in val])
    assert np.mean((scores - val.scores) ** 2) == pytest.approx(report.mean_squared_error, rel=1e-4)


def test_forward_takes_padded_arrays_and_a_subclass_can_change_it(judge: RewardModel, server: Server) -> None:
    class Doubled(RewardModel):
        def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
            rewards = super().forward(input_ids, attention_mask)
            return rewards * 2.0 - 1.0

    with gradwire.sync.connect(server.address) as service:
        rows = service.encode("tiny", ["word 1: aaaabbbb", "word 1: ab"])
    ids, mask = np.zeros((2, 20), np.int64), np.zeros((2, 20), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)], mask[index, : len(row)] = row, 1
    plain = judge.forward(ids, mask)
    assert plain.shape == (2,) and plain.dtype == np.float32
    assert np.array_equal(judge(ids, mask), plain)
    assert np.allclose(judge.score(["word 1: "] * 2, ["aaaabbbb", "ab"]), plain, atol=1e-6)
    doubled = Doubled(judge._service, judge.run, judge.details)
    assert np.allclose(doubled.score(["word 1: "] * 2, ["aaaabbbb", "ab"]), plain * 2 - 1, atol=1e-6)


@pytest.mark.long
def test_its_folder_is_plain_hugging_face_and_opens_here_and_elsewhere(
    judge: RewardModel, server: Server, tmp_path: Path
) -> None:
    asked = ["word 3: "] * 3, ["aaaaaaaa", "bbbbbbbb", ""]
    expected = judge.score(*asked)
    folder = judge.save_pretrained(tmp_path / "judge")
    assert (folder / "adapter" / "adapter_config.json").is_file()
    assert not (folder / "adapter_config.json").exists(), "transformers would add the adapter a second time"
    AutoModelForCausalLM.from_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids
    for address in (server.address, None):  # by the checkpoint it was made from; by the folder alone
        with RewardModel.from_pretrained(folder, address=address) as again:
            assert np.allclose(again.score(*asked), expected, atol=1e-5)
            assert again.report == judge.report


def test_a_folder_that_is_none_is_said_so(server: Server, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="not a reward model"):
        RewardModel.from_pretrained(tmp_path, address=server.address)


async def test_it_stops_early_and_keeps_the_best_epoch(server: Server) -> None:
    """Ratings at random: what is learned of them is wrong of others."""
    rng = np.random.default_rng(0)
    noise = [
        {"prompt": f"{n}", "response": "".join(rng.choice(list("abcdefgh"), 6)), "score": float(rng.random())}
        for n in range(48)
    ]
    train, val = FeedbackDataset(noise).split(0.5)
    config = RewardModelConfig(base_model="tiny", learning_rate=1e-2, batch_size=8, num_epochs=30, lora_dropout=0.0)
    seen = []
    async with gradwire.connect(server.address) as service:
        model = await train_reward_model_async(service, train, val, config, on_progress=seen.append, progress_bar=False)
    assert 6 <= len(seen) < 90
    assert seen[-1].step == len(seen) and seen[-1].total == 90
    assert model.report is not None
    assert model.report.mean_squared_error < 1.5 * model.report.baseline_error
