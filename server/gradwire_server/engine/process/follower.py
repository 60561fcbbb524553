"""The process of a rank but the first: ``python -m gradwire_server.engine.process.follower``, started by rank 0.

It executes the decisions that rank 0 sends, decides nothing, answers nobody, and writes no files that the ranks share.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from gradwire_server.engine.process.parent import end_with

    end_with(int(sys.argv[1]))

import argparse
import gc
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from gradwire_server.config import EngineSettings
from gradwire_server.crash_points import set_rank
from gradwire_server.engine.group_agreement import GroupAgreement
from gradwire_server.engine.interruption import giving_way
from gradwire_server.engine.machine import Share
from gradwire_server.engine.operations.decisions import Decision
from gradwire_server.engine.operations.samples import SamplesInProgress
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.decision_link import Leader
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine.process.loop import carried_out
from gradwire_server.engine.process.pulse import BROKEN, Pulse
from gradwire_server.engine.process.ranks import divided_device
from gradwire_server.engine.process.setup import load_losses, set_up

logger = logging.getLogger("gradwire_server.engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rank until a shutdown is decided; returns the exit code."""
    options = _parser().parse_args(arguments)
    settings: EngineSettings = options.settings
    share = Share(options.number, options.engines)
    set_up(settings, f"engine rank {options.rank}", share)
    set_rank(options.rank)
    load_losses(settings)
    agreement = GroupAgreement(options.rank, settings.num_ranks, divides=divided_device(settings, options.rank))
    activity = Activity()
    pulse = Pulse(agreement, activity)
    fds = [int(fd) for fd in options.fds.split(",")]
    decisions, messages, pulses = (socket.socket(fileno=fd) for fd in fds[:3])
    pulse.start(pulses)
    leader = Leader(decisions)
    agreement.join(options.store, [messages], fds[3:])
    os.close(int(options.store.name))
    engine = Engine(settings, agreement, share=share, rank=options.rank)
    pulse.device = engine.context.pool.device
    samples = SamplesInProgress(engine.context)
    gc.freeze()

    def carry_out(decision: Decision) -> None:
        for _ in carried_out(decision, engine, samples):
            pass

    def let_others_go_on() -> float:
        began = time.perf_counter()
        with agreement.aside():
            while not (decision := leader.receive()).empty:
                carry_out(decision)
        return time.perf_counter() - began

    while True:
        decision = leader.receive()
        gives_way = engine.gives_way and not decision.steps_samples
        with activity.working(), giving_way(let_others_go_on) if gives_way else nullcontext():
            carry_out(decision)
        if any(request.ends for request in decision.requests):
            engine.context.residency.close()
            return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire_server.engine.process.follower", description="Started by rank 0 of an engine."
    )
    parser.add_argument("parent", type=int, help="rank 0, with which it ends")
    parser.add_argument("--rank", type=int, required=True, help="this process's number, from 1 on")
    parser.add_argument("--fds", required=True, help="sockets for decisions, messages, pulses; memory of all ranks")
    parser.add_argument("--store", type=Path, required=True, help="the file by which the ranks find each other")
    parser.add_argument("--number", type=int, required=True, help="the engine's number among those of the server")
    parser.add_argument("--engines", type=int, required=True, help="how many processes share the machine")
    parser.add_argument(
        "--settings", type=EngineSettings.model_validate_json, required=True, metavar="JSON", help="as EngineSettings"
    )
    return parser


if __name__ == "__main__":
    try:
        code = main()
    except Exception:  # whatever it is, this rank is of no use any more, and rank 0 sees it end
        logger.exception("this rank of the engine ends, and the others with it")
        code = BROKEN
    logging.shutdown()
    os._exit(code)  # taking torch apart takes seconds, and nothing is left to be saved
