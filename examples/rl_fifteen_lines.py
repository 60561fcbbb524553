import asyncio
import sys

import gradwire
from gradwire.rl import AlgorithmConfig, GRPOAlgorithm, reward_function


@reward_function
def even_digits(response):
    return sum(character in "02468" for character in response) / max(len(response), 1)


async def main(model, iterations):
    async with gradwire.connect(models=[model]) as service:
        run = await service.create_run((await service.list_models())[0].name)
        config = AlgorithmConfig(batch_size=8, group_size=8, learning_rate=1e-2, max_tokens=12)
        await GRPOAlgorithm(service, run, ["1", "22", "3"], even_digits, config).train(iterations)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
