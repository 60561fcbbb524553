"""Logs: an object a line with run and number, and nothing that a client sent."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.observability import logs
from support.front import Start

Begin = Callable[..., io.StringIO]
log = logging.getLogger("gradwire_server.something")


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Sets logging up for a test, and back."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    ours = {name: logging.getLogger(name).level for name in ("gradwire_server", "gradwire_losses")}

    def configure(level: str, format: logs.Format) -> io.StringIO:
        stream = io.StringIO()
        root.handlers[:] = []
        logs.configure(level, format, "front", stream)
        return stream

    yield configure
    root.handlers[:], root.level = before, level
    for name, was in ours.items():
        logging.getLogger(name).setLevel(was)


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_with_what_it_is_about(begin: Begin) -> None:
    stream = begin("info", "json")
    log.info("before")
    with logs.about("run-a", 7):
        log.warning("a line\nand %s", "another", extra={"request_id": "abc"})
    with pytest.raises(ZeroDivisionError), logs.about("run-b", 8):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            log.exception("broken")
            raise
    log.info("own", extra={"run_id": "run-c", "seq": 9})
    before, about, broken, own = lines(stream)
    assert before["message"] == "before" and "run_id" not in before and before["level"] == "info"
    assert (about["message"], about["run_id"], about["seq"]) == ("a line\nand another", "run-a", 7)
    assert about["request_id"] == "abc" and about["process"] == "front" and about["logger"] == log.name
    assert "ZeroDivisionError" in str(broken["exception"]) and broken["seq"] == 8
    assert (own["run_id"], own["seq"]) == ("run-c", 9)


def test_text_names_the_operation_at_the_end(begin: Begin) -> None:
    stream = begin("warning", "text")
    log.info("too quiet")
    with logs.about("run-a", 7):
        log.warning("it hurts")
    assert stream.getvalue().endswith("front WARNING gradwire_server.something: it hurts [run-a #7]\n")
    assert "quiet" not in stream.getvalue()


def test_other_packages_are_heard_from_warning_on(begin: Begin) -> None:
    stream = begin("debug", "json")
    logging.getLogger("somebody.else").info("what they were sent")
    log.debug("ours")
    assert [line["message"] for line in lines(stream)] == ["ours"]


async def test_operations_have_a_line_each_without_what_was_in_them(start: Start, begin: Begin) -> None:
    stream = begin("info", "json")
    async with start() as door:
        client = await (await door.client()).begin()
        await client.submit(1, sample=pb.SampleCall(prompts=["a SECRET prompt"], stop=["SECRET"]))
        await client.fb(2, "fail", payload=b"SECRET")
        await client.results(2)
        await client.submit(1, sample=pb.SampleCall(prompts=["another SECRET"]))
    done = {line["seq"]: line for line in lines(stream) if line["logger"] == "gradwire_server.scheduling.results"}
    assert (done[1]["run_id"], done[1]["kind"], done[1]["message"]) == (client.run_id, "sample", "sample: done")
    assert done[2]["message"] == "forward_backward: invalid_batch" and done[2]["queue_s"] is not None
    assert "SECRET" not in stream.getvalue() and "99999" not in stream.getvalue()
