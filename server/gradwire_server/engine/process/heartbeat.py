"""The engine's heartbeat: a report once a second, from its own thread, with its use of the machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from gradwire_proto.v1 import engine_pb2, training_pb2

from gradwire_server.engine.machine import resident_bytes
from gradwire_server.engine.operations.context import EngineContext
from gradwire_server.engine.process.activity import Activity
from gradwire_server.engine.process.engine import Engine
from gradwire_server.engine_link.frames import LinkClosed
from gradwire_server.engine_link.vitals import BEAT_S


class MemoryOwners:
    """The holders of the engine's memory. It is read by a thread beside the one that computes.

    Args:
        context: The engine's parts, before any model is loaded.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._at_start = _process_bytes(context.pool.device)

    def by_owner(self) -> dict[str, int]:
        """Owner -> bytes.

        ``base``: shared copies of base models. ``references``: other frozen models. ``runs``: weights, gradients and
        moments that are on the device. ``cache``: log-probabilities of references. ``activations``: the
        rest of what is allocated on a GPU, keys and values of samples included; on a CPU the growth of the process
        beyond the others, with memory that was freed and not given back.
        """
        context = self._context
        held = context.residency.held()
        owners = {
            "base": context.pool.held_bytes,
            "references": context.references.held_bytes,
            "runs": held["device"].nbytes if "device" in held else 0,
            "cache": context.references.cached_bytes,
        }
        rest = _process_bytes(context.pool.device) - self._at_start - sum(owners.values())
        return owners | {"activations": max(0, rest)}


def _process_bytes(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()


class Heartbeat:
    """Measure the time spent on requests and send reports.

    Args:
        engine: The engine whose caches and device are reported.
        send: Called with each report; LinkClosed ends the thread.
        activity: Counts the time spent on requests; by default a new one.
    """

    def __init__(
        self,
        engine: Engine,
        send: Callable[[engine_pb2.EngineReply], None],
        interval_s: float = BEAT_S,
        activity: Activity | None = None,
    ) -> None:
        self._engine, self._send, self._interval_s = engine, send, interval_s
        self.activity = activity or Activity()
        self._memory = MemoryOwners(engine.context)
        self._utilization = _utilization(engine.context.pool.device)

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def report(self) -> engine_pb2.EngineHeartbeat:
        (busy, present), cached = self.activity.seconds(), self._engine.context.references
        prompts = self._engine.context.sampler.prompt_tokens
        beat = engine_pb2.EngineHeartbeat(
            busy_s=busy,
            request_s=present,
            memory_bytes=resident_bytes(),
            caches={
                "references": engine_pb2.CacheUse(
                    hits=cached.used_models - cached.loaded_models, misses=cached.loaded_models
                ),
                "logprobs": engine_pb2.CacheUse(hits=cached.found_sequences, misses=cached.computed_sequences),
                "prompts": engine_pb2.CacheUse(hits=prompts.found, misses=prompts.computed),
            },
        )
        residency = self._engine.context.residency
        for place, held in residency.held().items():
            beat.runs[place].CopyFrom(training_pb2.RunsHeld(runs=held.runs, bytes=held.nbytes))
        for move, done in residency.moves.items():
            beat.run_moves[move].CopyFrom(engine_pb2.RunMoves(runs=done.runs, bytes=done.nbytes, seconds=done.seconds))
        device = self._engine.context.pool.device
        for owner, count in self._memory.by_owner().items():
            beat.owners[owner] = count
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            beat.device.allocated_bytes = torch.cuda.memory_allocated(device)
            beat.device.peak_bytes = torch.cuda.max_memory_allocated(device)
            beat.device.used_bytes, beat.device.total_bytes = total - free, total
            share = self._utilization()
            if share is not None:
                beat.device.utilization = share
        return beat

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            try:
                self._send(engine_pb2.EngineReply(heartbeat=self.report()))
            except LinkClosed:
                return


def _utilization(device: torch.device) -> Callable[[], float | None]:
    """Return a reader of the device's utilization as the driver reports it, 0 to 1; it returns None if unavailable."""

    def read() -> float | None:
        try:
            return float(torch.cuda.utilization(device)) / 100
        except Exception:  # no nvidia-ml-py (gradwire[gpu]), or any of NVML's own errors: the figure is optional
            return None

    return read if device.type == "cuda" and read() is not None else lambda: None
