"""The engine's sign of life: time at work, memory, caches; it ends with the link."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from gradwire_proto.v1 import engine_pb2
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.engine.process.heartbeat import Heartbeat
from gradwire_server.engine_link.frames import LinkClosed
from support.engine import LocalEngine, token_rows


def test_it_reports_what_the_engine_does_while_it_does_it(tiny_model_path: Path, tmp_path: Path) -> None:
    local = LocalEngine({"tiny": tiny_model_path}, tmp_path)
    sent: queue.Queue[engine_pb2.EngineReply] = queue.Queue()
    heartbeat = Heartbeat(local.engine, sent.put, interval_s=0.02)
    heartbeat.start()
    idle = sent.get(timeout=60).heartbeat
    assert idle.busy_s == idle.request_s == 0 and idle.memory_bytes > 10 << 20 and not idle.HasField("device")
    with heartbeat.activity.working():
        time.sleep(0.1)
        while (at_work := sent.get(timeout=60).heartbeat).request_s < 0.05:
            pass
    assert at_work.busy_s == at_work.request_s
    after = heartbeat.report()
    assert after.request_s == 0 and 0.1 <= after.busy_s < 10

    local.create("run-a")
    pairs = token_rows([[5, 6, 7], [8, 9]])
    for _ in range(3):
        local.do("run-a", pairs, forward=pb.LossCall(model="tiny", outputs=["logprobs"]))
    references = heartbeat.report().caches["references"]
    assert (references.hits, references.misses) == (2, 1)


def test_it_ends_with_the_link(tiny_model_path: Path, tmp_path: Path) -> None:
    tries: queue.Queue[int] = queue.Queue()

    def closed(reply: engine_pb2.EngineReply) -> None:
        tries.put(1)
        raise LinkClosed("gone")

    Heartbeat(LocalEngine({"tiny": tiny_model_path}, tmp_path).engine, closed, interval_s=0.01).start()
    tries.get(timeout=60)
    time.sleep(0.1)
    assert tries.empty()
