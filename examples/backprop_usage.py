"""BackpropModule by hand: advantages, PPO's loss, an update, and a reference model that follows."""

from __future__ import annotations

import torch
from gradwire.rl.primitives import (
    BackpropConfig,
    BackpropModule,
    InferenceModule,
    RolloutManager,
    SimpleTextEnvironment,
)
from gradwire.rl.primitives.demonstration import random_model


def main() -> None:
    model, tokenizer = random_model()  # any transformers model takes its place
    inference = InferenceModule(model=model, tokenizer=tokenizer, max_new_tokens=8)
    environment = SimpleTextEnvironment(inference=inference, prompts=["Explain AI:", "What is ML?"], max_steps=1)
    trajectories = RolloutManager(environment, num_parallel=16).collect_rollouts(min_trajectories=16)
    rewards = [sum(c in "aeiou" for c in t.response) / max(1, len(t.response)) for t in trajectories]
    config = BackpropConfig(gamma=0.99, gae_lambda=0.95, ppo_clip_range=0.2, kl_coef=0.1, normalize_advantages=True)
    with BackpropModule(
        model=model,
        ref_model=None,  # by default, the KL is to the model as it is now
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=config,
    ) as backprop:
        values = [0.0] * len(trajectories)  # or of a critic, per token: backprop.compute_values(trajectories)
        advantages = backprop.compute_advantages(rewards, values)
        loss = backprop.compute_ppo_loss(trajectories, advantages)
        print(f"loss before the update {float(loss):.4f}")
        for epoch in range(4):
            metrics = backprop.update(loss)
            print(f"epoch {epoch}: gradient norm {metrics['grad_norm']:.3f}, loss {float(loss):.4f}")
        backprop.update_ref_model(method="ema")


if __name__ == "__main__":
    main()
