"""A training whose process is killed, by SIGKILL, and goes on: over a real server, from what is on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.server import Server

PROGRAM = """
import asyncio, json, sys
import gradwire
from gradwire import rl

address, folder, run_id, mode, iterations = *sys.argv[1:5], int(sys.argv[5])


class Waiting(rl.SimpleTextEnvironment):
    blocking = False

    def reset(self, task, seed):
        print(json.dumps(["begun", task.key]), flush=True)
        return super().reset(task, seed)

    async def step(self, state, action):
        await asyncio.sleep(0.002 * state.task.data["takes"])
        return rl.StepResult(terminated=True)


class Told(rl.GRPOAlgorithm):
    async def training_batch(self, trajectories):
        print(json.dumps(["trained", self.loop.step, [each.task.key for each in trajectories[::2]]]), flush=True)
        return await super().training_batch(trajectories)


@rl.reward_function(sandboxed=False)
def short(response):
    return -float(len(response))


async def main():
    takes = [200 if n % 6 == 1 else 1 + n % 5 for n in range(4 * iterations)]
    tasks = [rl.Task("ab", task_id=str(n), data={"takes": units}) for n, units in enumerate(takes)]
    config = rl.AlgorithmConfig(batch_size=4, group_size=2, max_tokens=3, checkpoint_dir=folder, save_every=2)
    async with gradwire.connect(address) as service:
        run = service.get_training_client(run_id) if run_id else await service.create_run("tiny", lora={"rank": 2})
        print(json.dumps(["run", run.run_id]), flush=True)
        trained = Told(service, run, tasks, short, config, environment=Waiting())
        done = await trained.resume()
        print(json.dumps(["resumed", done]), flush=True)
        await trained.train(iterations - done, progress_bar=False, mode=mode)


asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_process_loses_no_task_and_collects_none_twice(mode: str, server: Server, tmp_path: Path) -> None:
    """Tasks of 1 to 200 units; the process is killed in the middle of three iterations."""
    run_id, iterations, kept, begun = "", 10, dict[int, list[str]](), Counter[str]()
    for killed_at in (3, 5, 8, None):
        arguments = [server.address, str(tmp_path / "out"), run_id, mode, str(iterations)]
        with subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                match json.loads(line):
                    case ["run", run_id]:
                        pass
                    case ["begun", key]:
                        begun[key] += 1
                    case ["resumed", done]:
                        kept = {iteration: keys for iteration, keys in kept.items() if iteration < done}
                    case ["trained", iteration, keys]:
                        kept[iteration] = keys
                        if iteration == killed_at:
                            process.kill()
        assert process.returncode == (0 if killed_at is None else -9)
    assert Counter(key for keys in kept.values() for key in keys) == Counter(str(n) for n in range(4 * iterations))
    # Collected anew is at most what was under way, three times: two members of the groups that may be open.
    assert sum(begun.values()) - 2 * 4 * iterations <= 3 * 2 * (4 if mode == "sync" else 8)
