"""A loaded model, trained by an embedded server, its weights written back: the quick start and its parts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradwire.errors import UnsupportedError
from gradwire.rl.primitives import (
    AlgorithmConfig,
    BackpropConfig,
    BackpropModule,
    GRPOAlgorithm,
    InferenceModule,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    RolloutManager,
    SimpleTextEnvironment,
    Trajectory,
)
from support.tiny import tiny_model


class Loaded:
    """A model, a copy of it as reference, and what trains it: one server for all tests."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = tiny_model(folder / "tiny")
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.ref_model = copy.deepcopy(self.model)
        self.inference = InferenceModule(model=self.model, tokenizer=self.tokenizer, max_new_tokens=6)
        self.env = SimpleTextEnvironment(self.inference, prompts=["Explain AI:", "What is ML?"], max_steps=1)
        self.backprop = BackpropModule(
            model=self.model,
            ref_model=self.ref_model,
            optimizer=torch.optim.Adam(self.model.parameters(), lr=5e-3),
            config=BackpropConfig(
                gamma=0.99, gae_lambda=0.95, ppo_clip_range=0.2, kl_coef=0.1, normalize_advantages=True
            ),
        )

    def weights(self) -> Any:
        return np.concatenate([each.detach().numpy().ravel() for each in self.model.parameters()])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    made = Loaded(tmp_path_factory.mktemp("loaded"))
    yield made
    made.backprop.close()


class Letters:
    """The share of letters that are lower case."""

    def compute_rewards(self, trajectories: list[Trajectory], method: str = "absolute") -> list[float]:
        return [sum(each.islower() for each in t.response) / 6 for t in trajectories]


def test_log_probabilities_and_logits_are_the_models(loaded: Loaded) -> None:
    import torch

    prompts, responses = ["ab", "c"], ["def", "gh"]
    logprobs = loaded.inference.get_logprobs(prompts, responses)
    logits = loaded.inference.get_logits(prompts, responses)
    for prompt, response, mine, distribution in zip(prompts, responses, logprobs, logits):
        ids = loaded.tokenizer(prompt).input_ids
        new = loaded.tokenizer(response, add_special_tokens=False).input_ids
        with torch.no_grad():
            expected = loaded.model(torch.tensor([ids + new])).logits[0].double().log_softmax(-1)
        expected = expected[len(ids) - 1 : -1].numpy()
        np.testing.assert_allclose(distribution, expected, atol=1e-5)
        np.testing.assert_allclose(mine, expected[range(len(new)), new], atol=1e-5)
    likeliest = loaded.inference.get_logits(prompts, responses, top_k=2)
    assert likeliest[0][0].token_ids.tolist() == np.argsort(-logits[0][0])[:2].tolist()  # type: ignore[union-attr]
    generated = loaded.inference.generate(prompts, max_new_tokens=4, seed=3)
    scored = loaded.inference.get_logprobs(prompts, generated)
    for text, mine in zip(generated, scored):
        np.testing.assert_allclose(text.logprobs, mine, atol=1e-5)
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        loaded.inference.get_logprobs(prompts, ["x"])


def test_one_update_by_hand(loaded: Loaded) -> None:
    trajectories = RolloutManager(loaded.env, num_parallel=8).collect_rollouts(8)
    rewards = Letters().compute_rewards(trajectories)
    values = [each.mean() for each in loaded.backprop.compute_values(trajectories)]
    advantages = loaded.backprop.compute_advantages(rewards, values)
    loss = loaded.backprop.compute_ppo_loss(trajectories, advantages)
    before, first = loaded.weights(), float(loss)
    # The ratio is 1 and the reference is the policy: what is left is the mean advantage over tokens.
    tokens = [each.num_tokens for each in trajectories]
    assert first == pytest.approx(-np.average(advantages, weights=tokens), abs=1e-5)
    metrics = loaded.backprop.update(loss)
    assert metrics["loss"] == pytest.approx(first, abs=1e-5) and metrics["grad_norm"] > 0
    assert 0 < np.abs(loaded.weights() - before).max() <= 5.1e-3  # one step of Adam
    assert float(loss) < first
    written = [np.full(each.num_tokens, advantage) for each, advantage in zip(trajectories, advantages)]
    assert float(loaded.backprop.compute_ppo_loss(trajectories, written)) == pytest.approx(float(loss), abs=1e-5)
    with pytest.raises(ValueError, match="7 advantages for 8"):
        loaded.backprop.compute_ppo_loss(trajectories, advantages[:7])
    with pytest.raises(ValueError, match="trajectory 0 has 1 steps and"):
        loaded.backprop.compute_ppo_loss(trajectories[:1], [[1.0] * 9])
    with pytest.raises(TypeError, match="update needs the result of compute_ppo_loss"):
        loaded.backprop.update(1.0)  # type: ignore[arg-type]

    reference = [each.detach().clone() for each in loaded.ref_model.parameters()]
    loaded.backprop.update_ref_model(method="ema", decay=0.5)
    for old, new, policy in zip(reference, loaded.ref_model.parameters(), loaded.model.parameters()):
        np.testing.assert_allclose(new.detach(), 0.5 * old + 0.5 * policy.detach(), atol=1e-6)
    loaded.backprop.update_ref_model(method="copy")
    kl = loaded.backprop.update(loaded.backprop.compute_ppo_loss(trajectories, advantages))["kl_divergence"]
    assert kl == pytest.approx(0, abs=1e-6)


@pytest.mark.long
def test_ppo_trains_and_saves(loaded: Loaded, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    algo = PPOAlgorithm(
        env=loaded.env,
        rollout_manager=RolloutManager(loaded.env, num_parallel=16),
        reward_computer=Letters(),
        backprop=loaded.backprop,
        config=AlgorithmConfig(batch_size=32, ppo_epochs=2, checkpoint_dir=tmp_path, save_every=10, seed=1),
    )
    metrics = algo.train(num_iterations=20, progress_bar=False)
    assert [metrics[0]["rollouts/trajectories"], metrics[0]["train/learning_rate"]] == [32, 5e-3]
    assert metrics[-1]["train/staleness"] == 0
    assert metrics[-1]["rewards/reward"] > metrics[0]["rewards/reward"] + 0.2
    saved = algo.save_checkpoint(iteration=1000, best=True)
    assert saved == tmp_path / "iteration-1000"
    exported = AutoModelForCausalLM.from_pretrained(saved)
    for ours, theirs in zip(loaded.model.parameters(), exported.parameters()):
        np.testing.assert_array_equal(ours.detach(), theirs.detach())
    assert {"iteration-10", "iteration-20", "best.json", "state.json"} <= {each.name for each in tmp_path.iterdir()}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 20
    assert json.loads((tmp_path / "state.json").read_text())["step"] == 20
    assert algo.resume() == 20
    algo.close()


def test_grpo_and_reinforce(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = RolloutManager(loaded.env, num_parallel=16)
    config = AlgorithmConfig(batch_size=16, learning_rate=1e-6)
    for kind in (GRPOAlgorithm, REINFORCEAlgorithm):
        algo = kind(loaded.env, manager, Letters(), loaded.backprop, config)
        before = loaded.weights()
        (metrics,) = algo.train(1, progress_bar=False)
        assert [metrics["rollouts/trajectories"], metrics["train/learning_rate"]] == [16, 1e-6]
        assert np.abs(loaded.weights() - before).max() > 0
        algo.close()
    with pytest.raises(ValueError, match="batch_size 12 is not a multiple of group_size 8"):
        GRPOAlgorithm(loaded.env, manager, Letters(), loaded.backprop, AlgorithmConfig(batch_size=12)).train(1)


def test_a_run_of_a_server_samples_and_is_trained(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded.backprop.compute_values(RolloutManager(loaded.env).collect_rollouts(1))  # the server is up
    address = loaded.backprop.served.address
    monkeypatch.setenv("GRADWIRE_API_KEY", loaded.backprop.served.api_key)
    inference = InferenceModule("policy", loaded.tokenizer, backend="server", address=address, max_new_tokens=4)
    env = SimpleTextEnvironment(inference, prompts=["ab"])
    trajectories = RolloutManager(env, num_parallel=4).collect_rollouts(4)
    with BackpropModule(model=inference, config=BackpropConfig(learning_rate=1e-2, kl_coef=0.0)) as backprop:
        before = inference.get_logprobs(["ab"], ["cd"])[0]
        assert backprop.update(backprop.compute_ppo_loss(trajectories, [1.0, -1.0, 0.5, 0.0]))["grad_norm"] > 0
        assert np.abs(inference.get_logprobs(["ab"], ["cd"])[0] - before).max() > 0
    with pytest.raises(TypeError, match='only an InferenceModule with backend="server" can be trained'):
        BackpropModule(model=loaded.inference)


@pytest.mark.slow
def test_a_reference_of_other_weights_moves(loaded: Loaded) -> None:
    other = copy.deepcopy(loaded.model)
    next(other.parameters()).data.add_(0.1)
    trajectories = RolloutManager(loaded.env, num_parallel=8).collect_rollouts(8)

    def kl(ref_model: Any, share: float | None) -> float:
        with BackpropModule(loaded.model, ref_model, config=BackpropConfig(learning_rate=0.0)) as backprop:
            assert backprop.reference() == {"reference_model": "ema", "beta": 0.1}
            if share is not None:
                backprop.update_ref_model(decay=share)
            return backprop.update(backprop.compute_ppo_loss(trajectories, [0.0] * 8))["kl_divergence"]

    half = copy.deepcopy(other)
    for mixed, ours in zip(half.parameters(), loaded.model.parameters()):
        mixed.data.lerp_(ours.data, 0.5)
    assert kl(other, None) > 1e-3
    assert kl(copy.deepcopy(other), 0.5) == pytest.approx(kl(half, None), rel=1e-4)
    assert kl(other, 0.0) == pytest.approx(0.0, abs=1e-6)
    with BackpropModule(loaded.model, "another", lora=4) as backprop:
        assert backprop.reference() == {"reference_model": "reference", "beta": 0.1}
        with pytest.raises(UnsupportedError, match="is frozen"):
            backprop.update_ref_model()
