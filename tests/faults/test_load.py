"""Many clients, long queues, slow readers: no error, latencies in a table, and a server that does not grow."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import gradwire
import grpc.aio
import numpy as np
import pytest
from gradwire_proto.v1 import training_pb2 as pb
from support import load_server
from support.front import Client

MIB = 1 << 20


@dataclass
class Loaded:
    """The front as a process of its own, over an engine that costs nothing."""

    address: str
    folder: Path
    process: subprocess.Popen[str]

    def memory(self, field: str = "VmRSS") -> float:
        """MiB that it holds, or (VmHWM) has held at most."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


@pytest.fixture
def loaded(tmp_path: Path) -> Iterator[Loaded]:
    words = [sys.executable, load_server.__file__, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(load_server.__file__).parents[1])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield Loaded(process.stdout.readline().strip(), tmp_path, process)
        process.terminate()
        assert process.wait(120) == 0


async def one_client(address: str, operations: int, large: int, latencies: dict[str, list[float]]) -> None:
    """Operations in bursts of fifty, some of them with three megabytes; every result awaited and right."""
    rows = [list(range(3, 63))] * 12_500  # of int32: three megabytes

    async def timed(kind: str, future: gradwire.Future[object]) -> object:
        began = time.perf_counter()
        result = await future
        latencies.setdefault(kind, []).append(time.perf_counter() - began)
        return result

    async with gradwire.connect(address, connect_timeout=60) as service:
        run = await service.create_run("tiny")
        done = steps = 0
        while done < operations:
            burst: list[asyncio.Future[object]] = []
            for number in range(min(50, operations - done)):
                if done == 0 and number < large:
                    burst.append(asyncio.ensure_future(timed("3 MB", run.forward_backward(
                        {"input_ids": rows}, "nothing"))))  # fmt: skip
                elif number % 2:
                    burst.append(asyncio.ensure_future(timed("small", run.optim_step())))
                    steps += 1
                else:
                    burst.append(asyncio.ensure_future(timed("small", run.zero_grad())))
            for result in await asyncio.gather(*burst):
                steps -= isinstance(result, gradwire.OptimStepResult)
            done += len(burst)
        assert steps == 0 and (await run.info()).applied_seq == operations


async def many_clients(loaded: Loaded, clients: int, operations: int, large: int) -> None:
    latencies: dict[str, list[float]] = {}
    before, began = loaded.memory(), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(one_client(loaded.address, operations, large, latencies))
    took = time.perf_counter() - began
    print(f"{clients} clients x {operations} operations in {took:.1f} s: {clients * operations / took:.0f} a second")
    print("| operation | count | median | 90 % | 99 % | longest |\n| --- | --- | --- | --- | --- | --- |")
    for kind, values in sorted(latencies.items()):
        numbers = [*np.percentile(values, (50, 90, 99)), max(values)]
        print(f"| {kind} | {len(values)} | " + " | ".join(f"{1000 * value:.0f} ms" for value in numbers) + " |")
    print(f"memory of the server: {before:.0f} MiB before, {loaded.memory('VmHWM'):.0f} MiB at most")
    assert sum(map(len, latencies.values())) == clients * operations
    assert loaded.memory("VmHWM") < before + 1024


@pytest.mark.long
async def test_many_clients_are_served(loaded: Loaded) -> None:
    await many_clients(loaded, 8, 60, 1)


@pytest.mark.faults
@pytest.mark.timeout(1800)
async def test_sixty_four_clients_of_five_hundred_operations_are_served(loaded: Loaded) -> None:
    await many_clients(loaded, 64, 500, 2)


async def long_queue(loaded: Loaded, count: int) -> None:
    async with grpc.aio.insecure_channel(loaded.address) as channel:
        client = await Client(channel).begin()
        client.patience_s = 120.0
        before = loaded.memory()
        (loaded.folder / "hold").touch()
        for seq in range(1, count + 1):
            await client.send(*client.frames(seq, bytes(500), forward_backward=pb.LossCall(loss_fn="a")))
            if seq % 500 == 0:
                for _ in range(500):
                    assert not (await client.ack()).HasField("error")
        queued = loaded.memory()
        (loaded.folder / "hold").unlink()
        results = await client.results(count)
        assert [result.seq for result, _ in results] == list(range(1, count + 1))
        print(f"{count} queued: {queued - before:.0f} MiB more; all carried out in order")
        assert queued - before < 50 + count * 0.02


async def test_a_long_queue_is_held_and_worked_off(loaded: Loaded) -> None:
    await long_queue(loaded, 1000)


@pytest.mark.faults
@pytest.mark.timeout(900)
async def test_ten_thousand_operations_are_queued_and_worked_off(loaded: Loaded) -> None:
    await long_queue(loaded, 10_000)


@pytest.mark.parametrize("count", [100, pytest.param(400, marks=pytest.mark.faults)])
async def test_a_slow_reader_does_not_grow_the_server(loaded: Loaded, count: int) -> None:
    """Results of a megabyte each, which one reader does not read and another reads afterwards."""
    payload = os.urandom(MIB)
    async with AsyncExitStack() as stack:
        channel, slow_channel = [
            await stack.enter_async_context(grpc.aio.insecure_channel(loaded.address)) for _ in range(2)
        ]
        client = await Client(channel).begin()
        client.patience_s = 120.0
        slow = Client(slow_channel).stub.Results(pb.ResultsRequest(run_id=client.run_id, from_seq=1))
        for seq in range(1, 11):
            await client.submit(seq, payload, forward=pb.LossCall())
        await client.results(10)
        before = loaded.memory()
        for seq in range(11, count + 1):
            await client.submit(seq, payload, forward=pb.LossCall())
        while (await client.stub.GetRun(pb.GetRunRequest(run_id=client.run_id))).applied_seq < count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        grown = loaded.memory("VmHWM") - before
        slow.cancel()
        for seq in (1, count // 2, count):
            [(result, found)] = await client.results(1, seq)
            assert result.seq == seq and found == payload
        print(f"{count} MiB of results behind a reader that does not read: {grown:.0f} MiB more at most")
        assert grown < 60
