"""The terminal's view: rates, order, names that are not to be trusted, a server that goes away."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import gradwire
import pytest
from gradwire.cli import top as top_command
from gradwire.cli.status_view import Snapshot, draw, rate
from gradwire.cli.text import duration, money, plain, size
from gradwire_proto.v1 import training_pb2 as pb
from rich.console import Console


def snapshot(at: float, *runs: pb.Run, **info: object) -> Snapshot:
    message = pb.ServerInfo(version="1", device="cuda:0", engine_ready=True, uptime_s=3700, **info)  # type: ignore[arg-type]
    models = [gradwire.ModelInfo.from_message(pb.ModelInfo(name="tiny", num_parameters=12_345))]
    found = {run.run_id: gradwire.RunInfo.from_message(run) for run in runs}
    return Snapshot(at, gradwire.ServerInfo.from_message(message), models, found)


def run_of(name: str, accepted: int = 0, applied: int = 0, step: int = 0, tokens: int = 0, made: float = 0) -> pb.Run:
    config = pb.RunConfig(name=name, base_model="tiny")
    return pb.Run(
        run_id=f"run-{name}", config=config, accepted_seq=accepted, applied_seq=applied, step=step, num_tokens=tokens,
        created_at=made, recovery_s=1.5,
    )  # fmt: skip


def shown(now: Snapshot, before: Snapshot | None = None, most: int = 0, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(now, before, most=most))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_rates_are_differences_of_two_looks() -> None:
    before = snapshot(10.0, run_of("a", 50, 40, 20, 1000), run_of("gone", 5, 5))
    now = snapshot(12.0, run_of("a", 70, 60, 30, 9000), run_of("new", 8, 1))
    assert "recovery 3.0 s (engine 0.0 s, runs 3.0 s)" in shown(now, before)
    (row,) = [line for line in shown(now, before).splitlines() if "run-a" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "run-a", "a", "tiny", "30", "10", "60", "10", "5", "4,000", "1.5 s", "",
    ]  # fmt: skip
    (new,) = [line for line in shown(now, before).splitlines() if "run-new" in line]
    assert new.count(" - ") == 3 and "run-gone" not in shown(now, before)
    assert rate(5, 9, 1.0) == "0", "a server that started again counts from 0"


def test_runs_that_work_come_first_and_the_rest_is_counted() -> None:
    now = snapshot(0.0, run_of("idle", made=9), run_of("old", 5, 4, made=1), run_of("busy", 9, 1, made=2))
    page = shown(now)
    assert page.index("run-busy") < page.index("run-old") < page.index("run-idle")
    assert "9 operations queued" in page and "3 runs" in page and "up 1 h 1 min" in page
    short = shown(now, most=1)
    assert "and 2 more" in short and "run-idle" not in short


def test_a_narrow_terminal_shows_runs_in_lines() -> None:
    before = snapshot(10.0, run_of("a", 50, 40, 20, 1000))
    now = snapshot(12.0, run_of("a", 70, 60, 30, 9000), run_of("new", 8, 1))
    lines = [line.rstrip() for line in shown(now, before, width=80).splitlines()]
    at = lines.index("run-a a")
    assert lines[at + 1 : at + 3] == [
        "  model tiny, step 30", "  queue 10, done 60, 10 ops/s, 5 steps/s, 4,000 tokens/s, recovery 1.5 s",
    ]  # fmt: skip
    assert "  queue 7, done 1, recovery 1.5 s" in lines, "no rates of a run that was not there before"
    few = shown(now, before, most=3, width=80)
    assert "run-a" in few and "run-new" not in few and "and 1 more" in few


def test_the_engine_and_its_device() -> None:
    engine = pb.EngineStatus(
        restarts=2, heartbeat_age_s=0.4, busy=0.5, memory_bytes=3 << 30, device_memory_used_bytes=20 << 30,
        device_memory_total_bytes=80 << 30, device_utilization=0.93,
    )  # fmt: skip
    page = shown(snapshot(0.0, engines=[engine]))
    for words in ("busy 50%", "memory 3 GiB", "20 GiB of 80 GiB", "device 93%", "heartbeat 0.4 s ago", "2 restarts"):
        assert words in page
    away = snapshot(0.0)
    away = dataclasses.replace(away, info=dataclasses.replace(away.info, engine_ready=False))
    assert "engine not ready" in shown(away) and "device memory" not in shown(away)


def test_several_engines_have_a_line_each() -> None:
    engines = [pb.EngineStatus(device="cuda:0", ready=True, placed_runs=3), pb.EngineStatus(number=1, device="cuda:1")]
    page = shown(snapshot(0.0, engines=engines))
    assert "engine 0 on cuda:0: ready, 3 runs" in page and "engine 1 on cuda:1: not ready, 0 runs" in page
    engines[0].drains = True
    assert "engine 0 on cuda:0: draining" in shown(snapshot(0.0, engines=engines))


def test_names_cannot_speak_to_the_terminal() -> None:
    page = shown(snapshot(0.0, run_of("[bold]x[/]\x1b]0;title\x07\nline")))
    assert "[bold]x[/]·]0;title··line" in page and "\x1b" not in page
    assert plain("naïve 数学 \u202e") == "naïve 数学 ·"


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 40, "5.12e+03 GiB")])
def test_sizes(count: int, words: str) -> None:
    assert size(count) == words


def test_durations_and_amounts() -> None:
    assert [duration(seconds) for seconds in (0.9, 61, 86_400)] == ["0 s", "1 min 1 s", "24 h 0 min"]
    assert [money(amount) for amount in (0, 0.0004, 0.014, 1234.5)] == ["0.00", "<0.01", "0.01", "1,234.50"]


def test_top_outlives_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is away at the second look; after the third, the user presses Ctrl-C."""
    looks = iter([gradwire.ConnectionLostError("no answer"), snapshot(2.0, run_of("back", 3, 1)), KeyboardInterrupt()])

    def look(service: Any) -> Snapshot:
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    out = io.StringIO()
    console = Console(file=out, width=160, height=40, force_terminal=True)
    monkeypatch.setattr(top_command, "look", look)
    top_command._watch(console, None, snapshot(0.0, run_of("first")), 0.01)  # type: ignore[arg-type]
    page = out.getvalue()
    assert page.index("run-first") < page.index("no answer; trying again") < page.index("run-back")


def test_every_rank_of_an_engine_has_a_line() -> None:
    ranks = [pb.RankStatus(device="cpu", busy=0.5, waits=0.25, memory_bytes=1 << 30), pb.RankStatus(device="cpu")]
    page = shown(snapshot(0.0, engines=[pb.EngineStatus(ranks=ranks)]))
    assert "rank 0 on cpu: busy 50%, waits 25%, memory 1 GiB, heartbeat 0.0 s ago" in page
    assert "rank 1 on cpu" in page and "rank 0" not in shown(snapshot(0.0, engines=[pb.EngineStatus()]))
