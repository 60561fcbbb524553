"""Processes of bounded memory, here those that tokenize: turns, memory, and processes that end."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.bounded import pool as pool_module
from gradwire_server.bounded.pool import NICENESS, SHORT_BYTES, ProcessPool
from gradwire_server.errors import ServiceError
from gradwire_server.limits import Limits
from gradwire_server.tokenizing.settings import METHODS, TokenizerSettings
from support.scripted import until

LONG = "word " * 100_000
Make = Callable[..., ProcessPool]


@pytest.fixture
async def make(tiny_model_path: Path) -> AsyncIterator[Make]:
    pools: list[ProcessPool] = []

    def pool(memory_bytes: int = 2 << 30, folder: Path = tiny_model_path, **limits: int) -> ProcessPool:
        file, models = str(folder / "tokenizer.json"), {"tiny": str(folder)}
        settings = TokenizerSettings(
            files={"tiny": file}, models=models, named_first=("tiny",), limits=Limits(**limits),
            memory_bytes=memory_bytes,
        )  # fmt: skip
        pools.append(ProcessPool("gradwire_server.tokenizing.process", METHODS, lambda: settings))
        return pools[-1]

    yield pool
    await asyncio.gather(*(pool.close() for pool in pools))


def request(*texts: str) -> bytes:
    return pb.EncodeRequest(model="tiny", texts=texts).SerializeToString()


async def encode(pool: ProcessPool, owner: str, *texts: str) -> list[list[int]]:
    response = pb.EncodeResponse.FromString(await pool.ask("Encode", owner, request(*texts)))
    return [list(sequence.ids) for sequence in response.sequences]


def session_niceness(pid: int) -> int | None:
    """Niceness of a process's session where the kernel shares the processors between sessions; else None."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (OSError, IndexError):
        return None


def processes(pool: ProcessPool) -> set[Any]:
    return {each._process for lane in (pool._short, pool._long) for each in lane._all}


async def test_long_and_short_requests_give_the_same_ids(make: Make) -> None:
    pool = make()
    [short] = await encode(pool, "ada", "word word")
    assert len(request("word word")) <= SHORT_BYTES < len(request(LONG))
    texts = [LONG, "word word", ""]
    long = await encode(pool, "ada", *texts)
    assert short == long[1] and long[2] == [] and long[0][: len(short)] == short
    back = pb.DecodeRequest(model="tiny", sequences=[pb.TokenIds(ids=ids) for ids in long])
    assert list(pb.DecodeResponse.FromString(await pool.ask("Decode", "ada", back.SerializeToString())).texts) == texts


async def test_a_short_request_does_not_wait_for_long_ones(make: Make) -> None:
    pool = make()
    await encode(pool, "bob", "hi")
    flood = [asyncio.ensure_future(pool.ask("Encode", "ada", request(LONG))) for _ in range(6)]
    await asyncio.sleep(0)
    assert await encode(pool, "bob", "hi")
    assert not all(each.done() for each in flood)
    assert len({bytes(answer) for answer in await asyncio.gather(*flood)}) == 1
    assert len(processes(pool)) == 2  # one key has one at a time


async def test_processes_for_long_requests_leave_the_processors_to_others(make: Make) -> None:
    pool = make()
    await encode(pool, "ada", LONG)
    await encode(pool, "ada", "word")
    (long,), (short,) = pool._long._all, pool._short._all
    found = {each: os.getpriority(os.PRIO_PROCESS, each._process.pid) for each in (long, short)}
    assert found == {long: os.nice(0) + NICENESS, short: os.nice(0)}
    if (group := session_niceness(long._process.pid)) is not None:
        assert group == NICENESS


async def test_keys_take_turns_at_long_requests(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LONG_PROCESSES", 1)
    pool, order = make(), list[str]()

    async def ask(owner: str) -> None:
        await pool.ask("Encode", owner, request(LONG))
        order.append(owner)

    asked = [asyncio.ensure_future(ask(owner)) for owner in ("ada", "ada", "ada", "bob", "bob")]
    await asyncio.gather(*asked)
    assert order == ["ada", "bob", "ada", "bob", "ada"]


async def test_a_request_that_needs_too_much_memory_is_refused_and_the_next_one_answered(make: Make) -> None:
    pool = make(memory_bytes=200 << 20, max_text_chars=8 << 20)
    with pytest.raises(ServiceError, match="--tokenizer-memory-gib") as caught:
        await pool.ask("Encode", "ada", request("word " * 1_500_000))
    assert caught.value.code == pb.ERROR_CODE_LIMIT_EXCEEDED
    assert len((await encode(pool, "ada", LONG[: SHORT_BYTES * 2]))[0]) > 1000


@pytest.mark.long
@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 9 ** (9 ** 9) }}", "took more than 2 s"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "took more than 2 s"),
        ("{{ 'a' * 10 ** 10 }}", "--tokenizer-memory-gib"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "chat template"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "chat template"),
    ],
)
async def test_what_a_template_computes_is_bounded(
    make: Make, tiny_model_path: Path, tmp_path: Path, template: str, words: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    pool = make(memory_bytes=400 << 20, folder=folder)
    talk = pb.Conversation(messages_json='[{"role": "user", "content": "a"}]')
    expected, patience_s = await encode(pool, "ada", "hi"), pool._short._patience_s
    if "took" in words:
        pool._short._patience_s = 2.0
    with pytest.raises(ServiceError, match=words):
        await pool.ask("Render", "ada", pb.RenderRequest(model="tiny", conversations=[talk]).SerializeToString())
    pool._short._patience_s = patience_s
    assert await encode(pool, "ada", "hi") == expected


async def test_memory_is_given_back_when_nothing_is_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "IDLE_S", 0.0)
    pool = make()
    await encode(pool, "ada", "hi")
    [short] = processes(pool)
    await encode(pool, "ada", LONG)
    await until(lambda: len(processes(pool)) == 1)
    assert processes(pool) == {short} and short.returncode is None
    assert await encode(pool, "ada", LONG)  # another one is started


async def test_a_process_that_something_ends_is_replaced(make: Make) -> None:
    pool = make()
    expected = await encode(pool, "ada", "hi")
    [first] = processes(pool)
    os.kill(first.pid, signal.SIGKILL)
    assert await encode(pool, "ada", "hi") == expected
    assert first not in processes(pool)


async def test_a_caller_who_leaves_takes_no_turn_with_it(make: Make) -> None:
    pool = make()
    leaving = [asyncio.ensure_future(pool.ask("Encode", "ada", request(LONG))) for _ in range(3)]
    await asyncio.sleep(0)
    for each in leaving:
        each.cancel()
    await asyncio.gather(*leaving, return_exceptions=True)
    assert await encode(pool, "ada", LONG)


async def test_what_is_wrong_is_said_from_inside_the_process(make: Make) -> None:
    pool = make(max_encode_texts=1, max_text_chars=3)
    for raw, code in (
        (b"\xff\xff", pb.ERROR_CODE_INVALID_ARGUMENT),
        (request("a", "b"), pb.ERROR_CODE_LIMIT_EXCEEDED),
        (request("abcd"), pb.ERROR_CODE_LIMIT_EXCEEDED),
        (pb.EncodeRequest(model="x").SerializeToString(), pb.ERROR_CODE_UNKNOWN_MODEL),
    ):
        with pytest.raises(ServiceError) as caught:
            await pool.ask("Encode", "ada", raw)
        assert caught.value.code == code
    await pool.close()
    with pytest.raises(ServiceError, match="shutting down"):
        await pool.ask("Encode", "ada", request("a"))
