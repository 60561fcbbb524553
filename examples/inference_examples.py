"""InferenceModule: texts, log-probabilities, logits and tools, from a loaded model or from any other backend."""

from __future__ import annotations

from gradwire.rl.primitives import InferenceModule, register_tool
from gradwire.rl.primitives.demonstration import random_model


def search(query: str) -> str:
    """Looks something up."""
    return f"nothing about {query}"


def main() -> None:
    model, tokenizer = random_model()  # its output is meaningless; any transformers model takes its place
    # InferenceModule("Qwen/Qwen3-0.6B", backend="hf"), backend="vllm" or backend="server" load a model by its name.
    inference = InferenceModule(model=model, tokenizer=tokenizer, max_new_tokens=8)
    prompts = ["Explain AI:", "What is ML?"]

    responses = inference.generate(prompts, temperature=0.7)
    for prompt, response in zip(prompts, responses):
        print(f"{prompt!r} -> {str(response)!r}, {len(response.token_ids)} tokens, {response.stop_reason}")

    for prompt, logprobs in zip(prompts, inference.get_logprobs(prompts, responses)):
        print(f"{prompt!r}: log-probability {logprobs.sum():.2f} nats")
    for prompt, logits in zip(prompts, inference.get_logits(prompts, responses)):
        print(f"{prompt!r}: logits {logits.shape[0]} tokens by {logits.shape[1]}")

    register_tool(search)  # "calculator" is there already
    answers, tool_calls = inference.batch_generate_with_tools(prompts, available_tools=["calculator", "search"])
    for answer, calls in zip(answers, tool_calls):
        print(f"{str(answer)!r}, {len(calls)} tool calls")


if __name__ == "__main__":
    main()
