"""The engine's process: ``python -m gradwire_server.engine.process --fd N --marks N --settings JSON``.

One thread reads requests ahead and decodes their payloads; this one carries them out (:mod:`.loop`) and replies, and
another one reads saved checkpoints back (:mod:`.read_back`). The process ends when it is told to, and at once when its
parent does: a stale engine must not go on writing.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    # Until the engine has started: what is made by then stays, and looking for garbage in it is a fifth of the start's
    # CPU time (1.1 of 5.6 s).
    gc.disable()

import argparse
import ctypes
import logging
import os
import queue
import signal
import socket
import threading
import warnings
from collections.abc import Sequence

import torch
from gradwire_losses.registry import load_builtin_losses, load_plugin_losses
from gradwire_proto import codec
from gradwire_proto.v1 import engine_pb2

from gradwire_server.config import EngineSettings
from gradwire_server.engine.agreement import Agreement
from gradwire_server.engine.failures import to_error
from gradwire_server.engine.machine import Share
from gradwire_server.engine.operations.decisions import GROUP_TOKENS
from gradwire_server.engine.operations.request import Columns, Request
from gradwire_server.engine.operations.samples_in_progress import SamplesInProgress
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine.process.heartbeat import Heartbeat
from gradwire_server.engine.process.loop import Loop
from gradwire_server.engine.process.read_back import ReadBack
from gradwire_server.engine.process.settings_check import check_settings
from gradwire_server.engine.state.residency import Residency
from gradwire_server.engine_link.crash_marks import CrashMarks
from gradwire_server.engine_link.frames import EngineLink, LinkClosed
from gradwire_server.observability import logs
from gradwire_server.observability.tracing import Tracing

logger = logging.getLogger("gradwire_server.engine")

READ_AHEAD = 4
GROUP_READ_AHEAD = 32
"""Requests read ahead where runs are grouped: what has not been read cannot join a group."""
_PR_SET_PDEATHSIG = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the engine until it is shut down; the exit code."""
    options = _parser().parse_args(arguments)
    settings: EngineSettings = options.settings
    logs.configure(settings.log_level, settings.log_format, "engine")
    # peft asks transformers by a name that transformers has renamed.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the front shuts us down in order
    link = EngineLink(socket.socket(fileno=options.fd))
    # Also where nobody says how many: once torch has been told, MKL no longer takes fewer as it likes.
    torch.set_num_threads(settings.threads or max(torch.get_num_threads() // options.engines, 1))
    try:
        tracing = Tracing.to(settings.traces, "gradwire-engine") if settings.traces else Tracing()
        engine = _start(settings, options.marks, tracing, Share(options.number, options.engines))
        context = engine.context
        hello = engine_pb2.EngineReply(hello=engine.hello())
    except Exception as error:  # whatever stops the start is for the front to report
        link.send(engine_pb2.EngineReply(error=to_error(error, "the engine's start")))
        return 1
    grouped = _groups_runs(settings.group_runs, context.pool.device)
    requests: queue.Queue[Request] = queue.Queue(GROUP_READ_AHEAD if grouped else READ_AHEAD)
    residency = context.residency
    gc.freeze()  # what is loaded stays, so that no collection need walk it
    gc.enable()
    try:
        link.send(hello)
        reading = (link, requests, residency, ReadBack(context.store, link.send))
        threading.Thread(target=_read_ahead, args=reading, name="reader", daemon=True).start()
        heartbeat = Heartbeat(engine, link.send)
        heartbeat.start()
        if grouped:
            context.decisions.group_tokens = GROUP_TOKENS[context.pool.device.type]
        Loop(
            context.decisions,
            engine,
            SamplesInProgress(context),
            requests,
            lambda answer: link.send(answer.reply, answer.buffers),
            lambda request_ids: heartbeat.working(),
        ).run()
    except LinkClosed:
        logger.info("the front is gone")
    residency.close()
    tracing.close()
    return 0


def _start(settings: EngineSettings, marks: int | None, tracing: Tracing, share: Share) -> Engine:
    load_builtin_losses()
    load_plugin_losses()
    check_settings(settings)
    return Engine(settings, Agreement(None if marks is None else CrashMarks(marks)), tracing, share)


def _read_ahead(link: EngineLink, requests: queue.Queue[Request], residency: Residency, read_back: ReadBack) -> None:
    while True:
        try:
            message, payload = link.receive(engine_pb2.EngineRequest)
        except LinkClosed:
            # Also where the parent died before prctl was called. What is being computed is nobody's any more.
            os._exit(0)
        if message.HasField("verify_checkpoint"):
            read_back.submit(message)
            continue
        columns: Columns = {}
        error = None
        if message.HasField("operation"):
            try:
                columns = codec.decode(message.operation.tensors, payload)
            except codec.CodecError as found:
                error = found
        request = Request(message, columns, error)
        residency.prefetch(request.run_id)
        requests.put(request)
        if message.HasField("shutdown"):
            return


def _groups_runs(asked: str, device: torch.device) -> bool:
    """Not by default on a CPU, where a replay of the journal is to give the bits that were given before."""
    return asked == "on" or (asked == "auto" and device.type != "cpu")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire_server.engine.process", description="Started by gradwire serve."
    )
    parser.add_argument("--fd", type=int, required=True, help="the socket to the front")
    parser.add_argument("--number", type=int, default=0, help="its number among the server's engines")
    parser.add_argument("--engines", type=int, default=1, help="how many there are, which share the machine")
    parser.add_argument("--marks", type=int, help="the memory in which requests are marked as begun")
    parser.add_argument(
        "--settings", type=EngineSettings.model_validate_json, required=True, metavar="JSON", help="as EngineSettings"
    )
    return parser


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # taking torch apart takes seconds, and nothing is left to be saved
