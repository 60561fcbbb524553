"""Jobs of a server, and data that they train on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradwire

from support.child import children

STEPS = 60
"""As many as take a few seconds: a worker tells its steps twice a second."""
SETTINGS: dict[str, Any] = {
    "model": "marked", "batch_size": 8, "max_steps": STEPS, "save_every": 20, "eval_every": 25, "max_tokens": 256,
    "held_out": 0.1, "warmup": 2, "learning_rate": 1e-2,
}  # fmt: skip


CLOCK = re.compile(r"time|second")
"""Names of metrics that depend on the clock."""


def write_data(folder: Path) -> dict[str, Path]:
    """Write sums to learn, right and wrong answers to prefer among, and prompts."""
    asked = [(f"{a} and {b}?", str(a + b)) for a in range(8) for b in range(8)]
    rows: dict[str, list[dict[str, Any]]] = {
        "talks": [{"question": question, "answer": answer, "id": n} for n, (question, answer) in enumerate(asked, 1)],
        "sums": [{"question": question, "answer": "1"} for question, _ in asked],
        "pairs": [{"prompt": question, "chosen": f"four {x}", "rejected": f"two {x}"} for question, x in asked],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return {name: folder / f"{name}.jsonl" for name in rows}


def workers(pid: int) -> list[int]:
    """Ids of the worker processes of a server."""
    found = []
    for child in children(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"gradwire_jobs" in command and b"gradwire_jobs.check" not in command:
            found.append(child)
    return found


def curves(events: Any) -> dict[int, Mapping[str, float]]:
    """Step -> its metrics, without those that depend on the clock."""
    return {
        event.step: {name: value for name, value in event.data.items() if not CLOCK.search(name)}
        for event in events
        if event.type == "metrics"
    }


async def reached(service: gradwire.ServiceClient, job_id: str, step: int) -> gradwire.Job:
    """Wait until a job has taken so many steps, or has ended."""
    async with asyncio.timeout(120):
        while not ((job := await service.jobs.get(job_id)).step >= step or job.has_ended):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return job


async def finished(service: gradwire.ServiceClient, job_id: str) -> dict[int, Mapping[str, float]]:
    """Wait until a job has succeeded; return its curves."""
    job = await service.jobs.wait(job_id, timeout=240)
    assert job.state == "succeeded", (job.error, await service.jobs.log(job_id))
    return curves(await service.jobs.events(job_id))
