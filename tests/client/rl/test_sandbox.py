"""What a reward function may do wrong: each costs its own evaluation, and says what it was."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gradwire.rl.rewards import NotPortableError, Outcome, Sandbox, SandboxLimits

WORD = "constant"


def helper(number: int) -> int:
    return number + 1


def misbehave(how: str) -> Any:
    match how:
        case "well":
            return {"sum": helper(int(np.float64(41))), "word": WORD}
        case "hang":
            while True:
                pass
        case "crash":
            os.abort()
        case "print":
            for _ in range(20_000):
                print("x" * 50)
            return "printed"
        case "fork":
            while True:
                try:
                    os.fork()
                except OSError:
                    time.sleep(0.01)
        case "orphan":
            if os.fork() == 0:
                time.sleep(300)
            return "left a child"
        case "memory":
            return len(bytearray(4 << 30))
        case "network":
            import socket

            return socket.create_connection(("127.0.0.1", 9), timeout=0.2)
        case "write":
            Path("note").write_text("here it may")
            Path(__file__).with_name("note").write_text("here not")
        case "big file":
            Path("big").write_bytes(bytes(4 << 20))
        case "exit":
            sys.exit(3)
        case "type":
            return object()
        case "big":
            return "x" * (2 << 20)
        case "stdin":
            return input()
    raise RuntimeError(f"no such way: {how}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    box = Sandbox(misbehave, SandboxLimits(time_s=2.0, file_bytes=1 << 20), workers=1)
    yield box
    box.close()


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("hang", "took more than 2 s and was killed"),
        ("crash", "crashed: killed by SIGABRT"),
        ("fork", "took more than 2 s and was killed"),
        ("memory", "needed more than 1073741824 bytes of memory"),
        ("network", "Network is unreachable"),
        ("write", "Read-only file system"),
        ("big file", "File too large"),
        ("exit", "SystemExit: 3"),
        ("type", "TypeError: object cannot be sent back"),
        ("big", "bytes; at most 1048576 are allowed"),
        ("stdin", "EOFError"),
        ("else", "RuntimeError: no such way: else (line"),
    ],
)
async def test_each_costs_one_evaluation(sandbox: Sandbox, how: str, error: str) -> None:
    started = time.monotonic()
    outcome = await sandbox.call(how)
    assert error in outcome.error
    assert time.monotonic() - started < 30
    assert (await sandbox.call("well")).value == {"sum": 42, "word": "constant"}


async def test_a_flood_of_prints_is_cut(sandbox: Sandbox) -> None:
    outcome = await sandbox.call("print")
    assert (outcome.value, len(outcome.printed), outcome.printed_cut) == ("printed", 10_000, True)


async def test_many_at_once_cost_what_each_does(sandbox: Sandbox) -> None:
    ways = ["well", "print", "hang", "well", "crash", "type", "well"]
    outcomes = await sandbox.map([{"how": how} for how in ways])
    errors = [outcome.error.split(":")[0] for outcome in outcomes]
    assert errors == ["", "", "took more than 2 s and was killed", "", "crashed", "TypeError", ""]
    assert [bool(outcome.printed) for outcome in outcomes] == [False, True, False, False, False, False, False]


async def test_what_it_forks_dies_with_it(sandbox: Sandbox) -> None:
    started = time.monotonic()
    assert (await sandbox.call("orphan")).value == "left a child"
    assert time.monotonic() - started < 30


def test_functions_of_a_script_travel_without_running_it(tmp_path: Path) -> None:
    """No main guard: to import the script would run it again, and for ever."""
    script = tmp_path / "train.py"
    script.write_text(
        "import asyncio\n"
        "from gradwire.rl.rewards import Sandbox\n"
        "FACTOR = 3\n"
        "def times(x):\n"
        "    return x * FACTOR\n"
        "def reward(x, extra=1):\n"
        "    return times(x) + extra\n"
        "box = Sandbox(reward)\n"
        "print('ran', asyncio.run(box.call(5)).value)\n"
        "box.close()\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30)
    assert result.stdout == "ran 16\n"
    assert result.stderr == ""


async def test_closures_and_recursion_travel() -> None:
    scale = 2

    def recursive(n: int) -> int:
        return scale if n == 0 else recursive(n - 1) + 1

    box = Sandbox(recursive)
    assert await box.call(3) == Outcome(value=5, seconds=pytest.approx(0, abs=5))
    box.close()


async def test_a_forgotten_sandbox_ends_and_nobody_waits_for_it() -> None:
    """It may be collected on an event loop; the detector of held loops fails the test if that waits for the process."""
    before = psutil.Process().children()
    box = Sandbox(misbehave)
    assert (await box.call("well")).error == ""
    (process,) = set(psutil.Process().children()) - set(before)
    process.suspend()  # so that it does not end by itself
    del box
    assert await asyncio.to_thread(psutil.wait_procs, [process], 30) == ([process], [])


async def test_a_closed_sandbox_ends_and_no_event_loop_waits_for_it() -> None:
    before = psutil.Process().children()
    box = Sandbox(misbehave)
    assert (await box.call("well")).error == ""
    (process,) = set(psutil.Process().children()) - set(before)
    process.suspend()
    box.close()
    assert await asyncio.to_thread(psutil.wait_procs, [process], 30) == ([process], [])


def test_an_unclosed_sandbox_ends_with_the_program(tmp_path: Path) -> None:
    script = tmp_path / "forgets.py"
    script.write_text(
        "import asyncio\n"
        "import psutil\n"
        "from gradwire.rl.rewards import Sandbox\n"
        "box = Sandbox(lambda x: x + 1)\n"
        "assert asyncio.run(box.call(5)).value == 6\n"
        "(child,) = psutil.Process().children()\n"
        "child.suspend()\n"
        "print(child.pid)\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=30)
    assert result.stderr == "" and not psutil.pid_exists(int(result.stdout))


def test_what_cannot_travel_is_named() -> None:
    handle = open(os.devnull)  # noqa: SIM115 - a thing that does not pickle

    def reward(response: str) -> Any:
        return handle.name

    with handle, pytest.raises(NotPortableError, match=r"reward: handle \(TextIOWrapper\) cannot be sent"):
        Sandbox(reward)
    with pytest.raises(NotPortableError, match="needs a plain function, got builtin"):
        Sandbox(len)


async def test_a_function_that_cannot_be_set_up_says_so() -> None:
    import types

    module = types.ModuleType("not_there")
    sys.modules["not_there"] = module
    scope = {"not_there": module, "__name__": __name__}
    exec("def reward():\n    return not_there.x\n", scope)
    box = Sandbox(scope["reward"])  # type: ignore[arg-type]
    assert "could not be set up: ModuleNotFoundError" in (await box.call()).error
    box.close()
    del sys.modules["not_there"]


async def test_what_hangs_hangs_at_the_same_time() -> None:
    """Four neighbours of 32 take as long as one of them."""

    def hangs(number: int) -> int:
        while number < 4:
            pass
        return number

    sandbox = Sandbox(hangs, SandboxLimits(time_s=3.0))
    started = time.monotonic()
    outcomes = await sandbox.map([{"number": number} for number in range(32)])
    assert time.monotonic() - started < 9  # 12 s one after another
    assert [outcome.value for outcome in outcomes] == [None] * 4 + list(range(4, 32))
    sandbox.close()
