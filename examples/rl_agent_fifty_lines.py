"""An agent that looks into boxes with a tool before it answers, trained with GiGPO. Arguments: model, iterations."""

import asyncio
import sys

import gradwire
from gradwire import rl

SECRETS = {"a": "3", "b": "7", "c": "5", "d": "9"}


def look(box: str) -> str:
    """What is in a box."""
    return SECRETS[box]


class Boxes(rl.ToolEnvironment):
    """The policy writes one letter: a box's name looks into it, anything else is the answer."""

    def __init__(self):
        super().__init__([look], max_turns=4, describe_tools=False, stop=())

    def parse_action(self, state, raw):
        return rl.Action(raw, (rl.ToolCall("look", {"box": raw}),) if raw in SECRETS else ())

    def build_prompt(self, state):
        return "".join(message["content"] for message in state.messages if message["role"] != "assistant")


@rl.reward_function
def found(response, ground_truth, steps):
    right = float(response == ground_truth)
    worth = [0.2 * bool(step["tool_results"]) * (index == 0) for index, step in enumerate(steps)]
    worth[-1] += right
    return rl.EvaluateResult(right, [rl.StepOutput(index, reward) for index, reward in enumerate(worth)])


async def main(model, iterations):
    tasks = [rl.Task(f"{box}?", ground_truth=content) for box, content in SECRETS.items()]
    async with gradwire.connect(models=[model]) as service:
        run = await service.create_run((await service.list_models())[0].name)
        config = rl.AlgorithmConfig(batch_size=8, learning_rate=3e-3, max_tokens=1, eval_temperature=1.0)
        agent = rl.GiGPOAlgorithm(service, run, tasks, found, config, environment=Boxes(), eval_tasks=tasks)
        await agent.train(iterations)
        print(await agent.evaluate())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
