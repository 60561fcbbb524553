"""Demonstrate an inference module: ``python -m gradwire.rl.primitives.inference [MODEL]``."""

from __future__ import annotations

from gradwire.rl.primitives.demonstration import demonstration_inference


def main() -> None:
    inference = demonstration_inference()
    prompts = ["Explain a model", "What is learning?"]
    responses = inference.generate(prompts)
    for prompt, response, logprobs in zip(prompts, responses, inference.get_logprobs(prompts, responses)):
        print(f"{prompt} -> {response}")
        print(f"  {len(logprobs)} tokens, log-probability {logprobs.sum():.2f}")
    logits = inference.get_logits(prompts[:1], responses[:1], top_k=3)
    for number, likeliest in enumerate(logits[0][:3]):
        print(f"  before token {number} the most probable tokens are {likeliest.token_ids.tolist()}")
    answers, calls = inference.batch_generate_with_tools(prompts, available_tools=["calculator"], max_turns=2)
    print(f"with a calculator: {sum(map(len, calls))} calls, {len(answers)} answers")


if __name__ == "__main__":
    main()
