"""The engine's process: ``python -m gradwire_server.engine.process PARENT --fd N --settings JSON``.

One thread reads requests ahead and decodes their payloads; this one carries them out (:mod:`.loop`) and replies, and
another one reads saved checkpoints back (:mod:`.read_back`). The process ends when it is told to, and at once when its
parent does: a stale engine must not go on writing.
"""

from __future__ import annotations

import gc
import sys

if __name__ == "__main__":
    from gradwire_server.engine.process.parent import end_with

    end_with(int(sys.argv[1]))
    # Until the engine has started: what is made by then stays, and looking for garbage in it is a fifth of the start's
    # CPU time (1.1 of 5.6 s).
    gc.disable()

import argparse
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gradwire_proto.v1 import engine_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.failures import to_error
from gradwire_server.engine.machine import Share
from gradwire_server.engine.operations.images_ahead import ImagesAhead
from gradwire_server.engine.operations.request import Request
from gradwire_server.engine.operations.samples import SamplesInProgress
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine.process.heartbeat import Heartbeat
from gradwire_server.engine.process.loop import Loop
from gradwire_server.engine.process.ranks import Ranks
from gradwire_server.engine.process.ranks_choice import chosen
from gradwire_server.engine.process.read_back import ReadBack
from gradwire_server.engine.process.setup import load_losses, set_up
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine_link import lease
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.frames import EngineLink, LinkClosed
from gradwire_server.observability.tracing import Tracing

logger = logging.getLogger("gradwire_server.engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engine until it is shut down; the exit code."""
    options = _parser().parse_args(arguments)
    settings: EngineSettings = options.settings
    share = Share(options.number, options.engines * settings.num_ranks)
    set_up(settings, f"engine {options.number}" if options.engines > 1 else "engine", share)
    if options.marks is not None:
        lease.watch(CrashMarks(os.dup(options.marks)))
    link = EngineLink(socket.socket(fileno=options.fd))
    try:
        tracing = Tracing.to(settings.traces, "gradwire-engine") if settings.traces else Tracing()
        load_losses(settings)
        settings, note = chosen(settings, share)
        share = replace(share, engines=options.engines * settings.num_ranks)
        if note:
            logger.warning(note)
        activity = Activity()
        ranks = Ranks(settings, activity, share, marks=options.marks, pulses=options.pulses)
        engine = Engine(settings, ranks.agreement, tracing, share, staging=options.staging)
        context = engine.context
        hello = engine_pb2.EngineReply(hello=engine.hello())
    except Exception as error:  # whatever stops the start is for the front to report
        link.send(engine_pb2.EngineReply(error=to_error(error, "the engine's start")))
        return 1
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()  # the front bounds what is in it
    residency = context.residency
    gc.freeze()  # what is loaded stays, so that no collection need walk it
    gc.enable()
    try:
        link.send(hello)
        reading = (link, requests, residency, ReadBack(context.store, link.send), ImagesAhead(context))
        threading.Thread(target=_read_ahead, args=reading, name="reader", daemon=True).start()
        Heartbeat(engine, link.send, activity=activity).start()
        ranks.loaded(context.pool.device)
        Loop(
            context.decisions,
            engine,
            SamplesInProgress(context),
            requests,
            ranks,
            lambda answer: link.send(answer.reply, answer.buffers),
            activity.working,
        ).run()
    except LinkClosed:
        logger.info("the front is gone")
    context.sampler.close()
    residency.close()
    tracing.close()
    return 0


def _read_ahead(
    link: EngineLink,
    requests: queue.SimpleQueue[Request],
    residency: Residency,
    read_back: ReadBack,
    images: ImagesAhead,
) -> None:
    while True:
        try:
            message, payload = link.receive(engine_pb2.EngineRequest)
        except LinkClosed:
            os._exit(0)  # what is being computed is nobody's any more
        if message.HasField("verify_checkpoint"):
            read_back.submit(message)
            continue
        if message.operation.deadline:
            message.operation.deadline += time.monotonic()
        request = Request.read(message, payload)
        residency.prefetch(request.run_id)
        requests.put(images.begin(request))
        if message.HasField("shutdown"):
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire_server.engine.process", description="Started by gradwire serve."
    )
    parser.add_argument("parent", type=int, help="the process that starts it, with which it ends")
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front")
    parser.add_argument("--number", type=int, default=0, help="its number among the server's engines")
    parser.add_argument("--engines", type=int, default=1, help="how many there are, which share the machine")
    parser.add_argument("--marks", type=int, help="the memory in which requests are marked as begun")
    parser.add_argument("--pulses", type=int, help="the socket for the pulses of ranks, if there are several")
    parser.add_argument("--staging", type=Path, help="folder through which all is written that others are to find")
    parser.add_argument(
        "--settings", type=EngineSettings.model_validate_json, required=True, metavar="JSON", help="as EngineSettings"
    )
    return parser


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # taking torch apart takes seconds, and nothing is left to be saved
