"""Which engine a run is placed on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.access.key_file import Quota
from gradwire_server.access.quotas import Usage
from gradwire_server.config import ServerConfig
from gradwire_server.engine_client.client import Holder
from gradwire_server.engine_client.pool import EnginePool, own_engines, visible_gpus
from gradwire_server.journal.run_row import new_record
from gradwire_server.limits import Limits
from gradwire_server.scheduling.operation import Load, QueuedOperation
from gradwire_server.scheduling.run_queue import RunQueue
from gradwire_server.scheduling.sent_prompts import BLOCK, BLOCKS, MOST, REQUEST, beginnings
from gradwire_server.scheduling.who_is_next import LEAST_BYTES, Placement, Visit
from support.fake_engine import FakeEngine

LIMITS = Limits()
USAGE = Usage("ada", LIMITS, lambda owner: Quota())


def placement(folder: Path, count: int) -> tuple[list[FakeEngine], Placement]:
    engines = [FakeEngine(folder, number) for number in range(count)]
    return engines, Placement(EnginePool(engines))


def a_run(parameters: int = 0, model: str = "tiny") -> RunQueue:
    record = new_record("ada", pb.RunConfig(base_model=model), "", b"")
    record.num_trainable_parameters = parameters
    return RunQueue(record, LIMITS, USAGE, lambda: None)


async def test_4096_runs_are_spread_evenly_over_four_engines(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    _, placed = placement(tmp_path, 4)
    for _ in range(4096):
        placed.place(a_run(rng.choice((0, 10**5, 10**6, 10**7))))
    share = sum(there.nbytes for there in placed.engines) / 4
    assert all(abs(there.nbytes - share) <= 0.2 * share for there in placed.engines)
    assert sum(len(there.sizes) for there in placed.engines) == 4096
    assert all(there.nbytes == sum(there.sizes.values()) for there in placed.engines)


async def test_the_less_busy_engine_gets_a_run_while_its_share_of_memory_allows(tmp_path: Path) -> None:
    _, placed = placement(tmp_path, 2)
    for _ in range(40):
        placed.place(a_run())
    placed.engines[0].fair_queue.enter("ada", Load(1))
    runs = [placed.place(a_run()).engine.number for _ in range(20)]
    assert runs[:8] == [1] * 8, "engine 0 has something to do"
    assert 0 in runs, "and engine 1 no more than a fifth above its share"
    assert placed.engines[1].nbytes <= 1.2 * (60 * LEAST_BYTES / 2)


async def test_a_run_stays_until_its_engine_dies_and_then_goes_where_one_lives(tmp_path: Path) -> None:
    engines, placed = placement(tmp_path, 2)
    run = a_run()
    there = placed.place(run)
    run.held_by(there.engine.holder)
    other = placed.engines[1 - there.engine.number]
    placed.engines[there.engine.number].fair_queue.enter("ada", Load(1))
    assert placed.place(run) is there
    engines[there.engine.number].end()
    assert placed.place(run) is other and placed.place(run) is other
    assert not there.sizes and list(other.sizes) == [run.record.run_id]


async def test_a_run_whose_operation_may_have_killed_an_engine_waits_for_that_one(tmp_path: Path) -> None:
    engines, placed = placement(tmp_path, 2)
    run = a_run()
    there = placed.place(run)
    header = pb.OperationHeader(run_id=run.record.run_id, seq=1)
    suspect = QueuedOperation(header, b"", (), 0.0, EnginePool([]).changed, from_journal=True, deaths=1)  # type: ignore[arg-type]
    run.load(suspect)
    engines[there.engine.number].end()
    assert placed.place(run) is there, "it would kill the other engine, too"
    engines[there.engine.number].fails_to_start = True
    assert placed.place(run) is not there


async def test_a_run_goes_to_an_engine_that_serves_its_model(tmp_path: Path) -> None:
    engines, placed = placement(tmp_path, 3)
    engines[2].hello.models.add(name="large")
    assert {placed.place(a_run(model="large")).engine.number for _ in range(9)} == {2}
    assert {placed.place(a_run(model="tiny")).engine.number for _ in range(9)} == {0, 1}
    assert placed.place(a_run(model="gone")) in placed.engines, "an engine says what is wrong with it"


def test_engines_share_the_visible_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def devices(**settings: object) -> list[str]:
        config = ServerConfig.model_validate({"state_dir": tmp_path, "models": {"tiny": "x"}, **settings})
        return [engine.launcher.settings.device for engine in own_engines(config)]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert visible_gpus() == 2
    assert devices(engines="auto") == ["cuda:0", "cuda:1"] and devices(engines=3) == ["cuda:0", "cuda:1", "cuda:0"]
    assert devices() == [""] and devices(engines=2, device="cpu") == ["cpu", "cpu"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert devices(engines="auto") == [""]


async def test_a_run_keeps_its_place_while_every_engine_is_down(tmp_path: Path) -> None:
    engines, placed = placement(tmp_path, 3)
    run = a_run()
    first = placed.place(run)
    for engine in engines:
        engine.end()
    assert [placed.place(run) for _ in range(4)] == [first] * 4
    others = [engine for engine in engines if engine.number != first.engine.number]
    others[0].begin()
    assert placed.place(run).engine is others[0]


def sampled(ids: list[int], text: str = "", **settings: Any) -> pb.SampleRequest:
    call = pb.SampleCall(prompts=[text] if text else [])
    return pb.SampleRequest(call=call, prompt_ids=[pb.TokenIds(ids=ids)] if ids else [], **settings)


def test_beginnings_are_equal_as_far_as_prompts_are() -> None:
    ids = [number % 97 for number in range(5 * BLOCK + 1)]
    whole = beginnings("ada", sampled(ids, model="tiny"))
    assert len(whole) == 5
    longer = beginnings("ada", sampled([*ids[: 3 * BLOCK], 98, *ids], model="tiny"))
    assert [one == other for one, other in zip(whole, longer, strict=False)] == [True] * 3 + [False] * 2
    for other in (beginnings("bob", sampled(ids, model="tiny")), beginnings("ada", sampled(ids, model="run-1/a"))):
        assert not set(whole) & set(other)
    assert len(beginnings("ada", sampled([], "é" * (2 * BLOCK + 1)))) == 2
    assert beginnings("ada", sampled([])) == beginnings("ada", sampled(ids[:BLOCK])) == []
    assert beginnings("ada", sampled(ids, prompt_images=[pb.ImageNumbers(images=[0])])) == []


async def test_a_prompt_goes_to_the_engine_that_knows_it_unless_that_is_busier(tmp_path: Path) -> None:
    engines, placed = placement(tmp_path, 3)
    prompt = beginnings("ada", sampled([number % 97 for number in range(2 * REQUEST + 1)], model="tiny"))
    there = placed.engines[2]
    there.prompts.add(prompt[: len(prompt) // 2])

    def goes(prompt: Sequence[bytes]) -> int:
        return placed.target(Visit("ada", Load(1, samples=True), model="tiny", prompt=prompt)).engine.number

    assert goes(prompt) == 2 and goes(()) == 0
    there.fair_queue.enter("ada", Load(1, samples=True))
    assert goes(prompt) == 0, "half of it is worth one request"
    there.prompts.add(prompt)
    assert goes(prompt) == 2
    engines[2].holder.alive = False
    engines[2].holder = Holder()
    there.fair_queue.leave("ada", Load(1, samples=True))
    assert goes(prompt) == 0, "a new process knows nothing"


async def test_what_an_engine_was_sent_is_bounded(tmp_path: Path) -> None:
    _, placed = placement(tmp_path, 1)
    sent = placed.engines[0].prompts
    first, other = ([bytes([kind]) + number.to_bytes(4) for number in range(BLOCKS)] for kind in (0, 1))
    sent.add(first)
    assert sent.worth(first) == MOST
    sent.add(other[:-1])
    assert sent.worth(first[:4]) == BLOCK / REQUEST, "the end of a prompt is forgotten first"
