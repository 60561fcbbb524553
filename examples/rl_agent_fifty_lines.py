"""An agent learns to look into a box before it says what is in it. Arguments: model, iterations, seed."""

import asyncio
import random
import sys

import gradwire
from gradwire import rl

TASKS = [rl.Task(f"{box}?", digit, box + digit, {"room": {box: digit}}) for box in "abcdefgh" for digit in "0123456789"]


def look(room: dict, box: str) -> str:
    """What is in a box of the room."""
    return room.get(box, "-")


class Boxes(rl.ToolEnvironment):
    """The policy writes one character: a box's letter looks into it, anything else is the answer."""

    def parse_action(self, state, raw):
        return rl.Action(raw, (rl.ToolCall("look", {**state.task.data, "box": raw}),) if raw in [*"abcdefgh"] else ())

    def build_prompt(self, state):
        return "".join(message["content"] for message in state.messages)


@rl.reward_function
def found(response, ground_truth, steps):
    right, worth = float(response == ground_truth), [-0.1 * bool(step["tool_results"]) for step in steps]
    worth[-1] += right
    return rl.EvaluateResult(right, [rl.StepOutput(*each) for each in enumerate(worth)])


async def report(stage, agent):
    held_out = await agent.evaluate()
    print(f"{stage}: found {held_out['eval/success']:.2f}, looked first {held_out['eval/steps'] - 1:.2f}")


async def main(model, iterations, seed=0):
    chance = random.Random(seed)
    held_out = chance.sample(TASKS, 16)
    trained = [task for task in TASKS if task not in held_out]
    config = rl.AlgorithmConfig(learning_rate=3e-3, max_tokens=1, eval_temperature=1, eval_trajectories=8, seed=seed)
    async with gradwire.connect(models=[model]) as service:
        run = await service.create_run(name := (await service.list_models())[0].name, seed=seed)
        boxes = Boxes([look], max_turns=2, describe_tools=False, stop=())
        agent = rl.GiGPOAlgorithm(service, run, trained, found, config, environment=boxes, eval_tasks=held_out)
        await report("untrained", agent)
        for _ in range(120):  # imitate people who look half of the time, and otherwise guess
            looked = [each.prompt + each.prompt[0] + 2 * each.ground_truth for each in chance.choices(trained, k=16)]
            guessed = [each.prompt + chance.choice("0123456789") for each in chance.choices(trained, k=16)]
            rows = await service.encode(name, looked + guessed)
            await run.train_step({"input_ids": rows}, "causal_lm", learning_rate=3e-3)
        await report("after imitation", agent)
        await agent.train(iterations)
        await report("after training", agent)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
