"""One tenant floods every RPC: another's small calls are answered, and the memory comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gradwire
import numpy as np
import pytest
from gradwire_server.access.key_file import KeyFile
from support import flood, small_calls
from support.access import rpcs
from support.chats import chat_model
from support.child import children
from support.scripted import until
from support.server import Server

pytestmark = pytest.mark.long

KEYS = {"ada": "user", "bob": "user", "root": "admin"}
ALLOWED = 3.0
"""Latency of a small call beside the flood, as a multiple of that without it, or beside a flood of another server."""
NOTICEABLE_S = 0.1
"""What a call may take in any case. Of a dozen calls of some milliseconds, one takes that where other work keeps the
processors busy; the printed figures say more on a machine without other work."""
COMPUTED = ("zero_grad", "sample")
"""Calls that the engine executes. They may wait for one request of the flooding key, which is not interrupted."""


class Program:
    """A program that reads lines and answers some of them with a line of JSON.

    Args:
        words: Its file and arguments.
        key: Its API key.
    """

    def __init__(self, *words: str, key: str, cwd: Path, niceness: int = 0) -> None:
        self._process = subprocess.Popen(
            ["nice", "-n", str(niceness), sys.executable, *words], cwd=cwd, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"GRADWIRE_API_KEY": key},
        )  # fmt: skip

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    async def hear(self) -> str:
        assert self._process.stdout is not None
        return await asyncio.to_thread(self._process.stdout.readline)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Flooded:
    """A server with several keys, and a program that floods it with ada's when it is told to."""

    def __init__(self, model: Path, folder: Path) -> None:
        state = folder / "state"
        self.steps_s: list[float] = []
        self.keys = {name: KeyFile(state).create(name, "admin" if name == "root" else "user") for name in KEYS}
        limit = f"max_payload_bytes={64 << 20}"
        self.server = Server(model, state, "--threads", "1", "--limit", limit).start()
        (folder / "flood").mkdir()
        self._flood = Program(
            flood.__file__, self.server.address, "tiny", "root",
            key=self.keys["ada"], cwd=folder / "flood", niceness=19,  # as on another machine
        )  # fmt: skip

    async def ready(self) -> None:
        assert await self._flood.hear() == "ready\n"

    def go(self) -> None:
        self._flood.say("go")

    async def pause(self) -> tuple[Counter[str], Counter[str]]:
        """End the flood; its calls since the start that were answered, and those that were refused, by RPC."""
        self._flood.say("pause")
        counts = json.loads(await self._flood.hear())
        self.steps_s = counts["steps_s"]
        return Counter(counts["answered"]), Counter(counts["refused"])

    async def every_rpc(self) -> tuple[Counter[str], Counter[str]]:
        """Flood until each RPC has been answered as often as it is called at a time; the calls since the start."""
        while True:
            answered, refused = await self.pause()
            if all(answered[rpc] >= flood.AT_ONCE for rpc in set(rpcs()) - set(flood.REFUSED)):
                return answered, refused
            self.go()
            await asyncio.sleep(5)

    def tokenizing(self) -> list[int]:
        """Processes of the front that tokenize."""
        found = []
        for child in children(self.server.process.pid):
            try:
                words = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:  # it has ended
                continue
            if b"gradwire_server.tokenizing.process" in words:
                found.append(child)
        return found

    def _busy(self) -> int:
        """Clock ticks that the server's processes have computed."""
        pid, ticks = self.server.process.pid, 0
        for each in (pid, *children(pid)):
            with contextlib.suppress(OSError):  # it has ended
                ticks += sum(map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:13]))
        return ticks

    async def idle(self) -> None:
        """Wait until the server has done what was asked of it."""
        before = -10
        while (now := self._busy()) - before > 5:
            before = now
            await asyncio.sleep(0.5)

    def memory(self, pid: int | None = None) -> float:
        """MiB that a process holds; by default the front."""
        lines = Path(f"/proc/{pid or self.server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    def close(self) -> None:
        self._flood.close()
        assert self.server.end() == 0


@pytest.fixture
def flooded(tmp_path: Path) -> Iterator[Flooded]:
    flooded = Flooded(chat_model(tmp_path / "tiny", "qwen"), tmp_path)
    yield flooded
    flooded.close()


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Flooded]:
    (tmp_path / "another").mkdir()
    flooded = Flooded(chat_model(tmp_path / "another" / "tiny", "qwen"), tmp_path / "another")
    yield flooded
    flooded.close()


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """A program that computes and asks nothing of the server, at the priority of the flooding one."""
    program = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


@dataclass(frozen=True)
class Latency:
    """99th percentile of a call's latency in seconds.

    Attributes:
        alone: Beside a program that only computes.
        machine: Beside a flood of another server on this machine: what the processors have to do is the same.
        beside: Beside a flood of this server.
        begun: That of the longest operation which it may find begun.
    """

    alone: float
    machine: float
    beside: float
    begun: float

    @property
    def late(self) -> bool:
        """Whether the flood of this server cost more than it may."""
        return self.beside > max(ALLOWED * max(self.alone, self.machine) + self.begun, NOTICEABLE_S)

    def __str__(self) -> str:
        factors = f"{self.machine / self.alone:4.1f} and {self.beside / self.alone:4.1f} times"
        begun = f", an operation {self.begun * 1e3:.1f} ms" if self.begun else ""
        return f"{self.alone * 1e3:6.1f} {self.machine * 1e3:6.1f} {self.beside * 1e3:6.1f} ms: {factors}{begun}"


async def compare(flooded: Flooded, other: Flooded, rounds: int, times: int) -> dict[str, Latency]:
    """The latencies of bob's small calls: medians of rounds by turns.

    The flooding program computes on this machine, where a real one has its own. So does another program while bob is
    alone, at the same priority.
    """
    await flooded.ready()
    await other.ready()
    address = flooded.server.address
    bob = Program(small_calls.__file__, address, "tiny", key=flooded.keys["bob"], cwd=Path.cwd())
    rows = defaultdict[str, list[tuple[float, ...]]](list)

    async def measure(times: int) -> dict[str, float]:
        bob.say(str(times))
        found = json.loads(await bob.hear())
        return {name: float(np.percentile(seconds, 99)) for name, seconds in found.items()}

    async def beside(flood: Flooded) -> dict[str, float]:
        flood.go()
        await asyncio.sleep(0.5)
        found = await measure(times)
        await flood.pause()
        await flood.idle()
        return found

    try:
        await measure(5)
        for _ in range(rounds):
            with computing():
                alone = await measure(times)
            machine, both = await beside(other), await beside(flooded)
            for name in alone:
                rows[name].append((alone[name], machine[name], both[name]))
    finally:
        bob.close()
    begun = float(np.percentile(flooded.steps_s, 99))
    found = {name: Latency(*np.median(row, axis=0), begun * (name in COMPUTED)) for name, row in rows.items()}
    for name, latency in found.items():
        print(f"{name:18} {latency}")
    return found


def test_the_flood_has_a_call_for_every_rpc() -> None:
    caller = flood.Caller(0, None, None, "", "", Path(), None)  # type: ignore[arg-type]
    assert set(caller.calls()) >= set(rpcs())


@pytest.mark.faults  # the latencies mean something on a machine without other work only
@pytest.mark.parametrize(("rounds", "times"), [(2, 12), (5, 200)], ids=["short", "long"])
async def test_a_flood_of_every_rpc_costs_another_tenant_little(
    flooded: Flooded, another: Flooded, rounds: int, times: int
) -> None:
    before = flooded.memory()
    found = await compare(flooded, another, rounds, times)
    late = {name: str(each) for name, each in found.items() if each.late}
    assert late == {}
    answered, refused = await flooded.every_rpc()
    print(f"front {before:.0f} MiB before, {flooded.memory():.0f} MiB after; answered {answered}, refused {refused}")
    expected = {f"{rpc}: {error}" for rpc, error in flood.REFUSED.items()} | {flood.TOO_LARGE_REFUSED}
    assert set(refused) == expected
    await until(lambda: len(flooded.tokenizing()) <= 1)  # those for long texts end when they are idle
    assert flooded.memory() - before < 300
    assert all(flooded.memory(pid) < 300 for pid in flooded.tokenizing())


@pytest.mark.faults
@pytest.mark.holds_loop("it makes and reads the books itself")
async def test_ten_books_of_one_key_do_not_delay_anothers_word(flooded: Flooded) -> None:
    await flooded.ready()
    address, keys = flooded.server.address, flooded.keys
    async with (
        gradwire.connect(address, api_key=keys["ada"]) as ada,
        gradwire.connect(address, api_key=keys["bob"]) as bob,
    ):
        await bob.encode("tiny", ["hi"])
        words = ["word " * 25_000] * 16  # two megabytes a call, a token each of them
        books = [asyncio.ensure_future(ada.encode("tiny", words)) for _ in range(10)]
        await until(lambda: len(flooded.tokenizing()) > 1)
        began = time.monotonic()
        for _ in range(20):
            await bob.encode("tiny", ["hi"])
        assert not all(book.done() for book in books), "bob waited for all of them"
        assert time.monotonic() - began < 20
        peak = flooded.memory()
        for book in books:
            book.cancel()
        await asyncio.gather(*books, return_exceptions=True)
        assert peak < 700
        await until(lambda: len(flooded.tokenizing()) <= 1)


@pytest.mark.faults
async def test_what_no_memory_would_justify_is_refused_with_what_it_would_take(flooded: Flooded) -> None:
    await flooded.ready()
    async with gradwire.connect(flooded.server.address, api_key=flooded.keys["bob"]) as service:
        before = flooded.memory(flooded.server.engine_pid)
        for field, settings in (
            ("lora.rank", {"lora": {"rank": 400_000}}),
            ("num_labels", {"head": "classification", "num_labels": 100_000_000}),
        ):
            with pytest.raises(
                gradwire.LimitExceededError, match=r"GiB to train, .* at most [\d,]+ here, or"
            ) as refused:
                await service.create_run("tiny", **settings)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(gradwire.LimitExceededError, match=r"max_payload_bytes=N.* samples at a time") as refused:
            await service.sampling_client("tiny").sample([[5]] * 60_000, max_tokens=100_000, n=1)
        assert refused.value.field == "max_tokens"
        assert flooded.memory(flooded.server.engine_pid) - before < 200
