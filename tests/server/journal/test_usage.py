"""What keys have used, in the database: bounded in rows, the same sums."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.journal import usage as usage_module
from gradwire_server.journal.journal import Journal
from gradwire_server.journal.run_row import RunRecord, new_record
from gradwire_server.journal.schema import connect
from gradwire_server.journal.usage import DAY_S, HOUR_S, Usage

from tests.server.journal.test_journal import new_run

ROWS, MOST = 3000, 40


def counted(entries: Sequence[pb.UsageEntry]) -> Counter[tuple[str, str]]:
    return Counter({(each.owner, each.base_model): each.sampled_tokens for each in entries})


def run_of(run_id: str, name: str) -> RunRecord:
    record = new_record("", pb.RunConfig(base_model="tiny", name=name), "", b"")
    record.run_id = run_id
    return record


async def test_a_key_has_few_rows_and_its_sums_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A year of sessions and runs that are gone, beside a run and rollout sessions that are there."""
    monkeypatch.setattr(usage_module, "MOST_ROWS", MOST)
    rng, state = random.Random(5), tmp_path / "state"
    journal = await Journal.open(state)
    there = await new_run(journal, state)
    usage, now, expected, of_there = Usage(journal.store), time.time(), Counter[tuple[str, str]](), 0
    for number in range(ROWS):
        moment = now - rng.randrange(2, 390) * DAY_S - rng.randrange(24) * HOUR_S
        run = rng.choice([run_of(there, "kept"), run_of(f"run-gone{number}", f"gone {number}"), None])
        owner, tokens, model = rng.choice(["ann", "ann", "bob"]), rng.randrange(100), rng.choice(["tiny", "other"])
        result = pb.OperationResult(sample=pb.SampleResult(num_sampled_tokens=tokens))
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        session_id = rng.choice(["", f"gwsession-{number}"])
        usage.count(owner, run, result, label=f"session {number}", base_model=model, session_id=session_id)
        expected[owner, "tiny" if run is not None else model] += tokens
        of_there += tokens * (run is not None and run.run_id == there)
    monkeypatch.setattr(time, "time", lambda: now)
    assert counted(await usage.between(0, now + 1, ["owner", "model"])) == expected
    months, models, runs = 400 // 30 + 2, 2, 2
    with closing(connect(state / "gradwire.db")) as connection:
        rows = dict(connection.execute("SELECT owner, count(*) FROM usage GROUP BY owner").fetchall())
        [sums] = connection.execute("SELECT sum(sampled_tokens), sum(operations) FROM usage").fetchall()
    assert sums == (sum(expected.values()), ROWS)
    assert all(count <= months * models * runs for count in rows.values()), rows
    assert (await usage.of_runs())[there][0] == of_there
    await journal.close()


async def test_tokens_count_that_were_computed(tmp_path: Path) -> None:
    """Not those that rows share with others, and no known ones of prompts."""
    journal = await Journal.open(tmp_path / "state")
    usage, run = Usage(journal.store), run_of("run-a", "a")
    usage.count("ann", run, pb.OperationResult(loss=pb.LossResult(num_tokens=100, num_computed_tokens=60)))
    sampled = pb.SampleResult(num_prompt_tokens=50, num_cached_tokens=32, num_sampled_tokens=7)
    usage.count("ann", run, pb.OperationResult(sample=sampled))
    [entry] = await usage.between(0, time.time() + 1)
    assert (entry.training_tokens, entry.prompt_tokens, entry.sampled_tokens) == (60, 18, 7)
    assert run.num_tokens == 60 + 18 + 7
    await journal.close()
