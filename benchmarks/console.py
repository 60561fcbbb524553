"""The console in a real browser: open pages beside a training, and plots of long records.

``python -m benchmarks.console pages --minutes 60``: ten pages beside a training. Every page has to load; each minute it
prints what the browser's heaps and the console's process hold, and the calls that the server served a second. At the
end it compares the memory of the last quarter with the second's: the first fills caches.

``python -m benchmarks.console plots --runs 200``: so many runs with records of 100,000 operations. Of some of them it
times what a person waits for: the first look at a run, the axis, the smoothing. Figures are wall time; beside them
stands the processor time of the console, which a busy machine does not stretch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import gradwire
import httpx
from gradwire_proto.v1 import training_pb2 as pb
from gradwire_server.journal import history
from gradwire_server.journal.schema import connect
from gradwire_server.journal.state_folder import DATABASE
from playwright.sync_api import Browser, Page
from prometheus_client.parser import text_string_to_metric_families
from support.chromium import launched
from support.console import Console
from support.server import Server, free_port
from support.tiny import tiny_model

ROWS = {"input_ids": [[5, 6, 7, 8, 9, 10] * 8] * 4}
POINTS = 100_000
PATIENCE_MS = 600_000
TRAINING = {"Submit", "Results", "AckResults", "OpenRun"}
GROWTH, CONSOLE_MB, PLOT_MS = 1.1, 400.0, 300.0
DRAWN = (
    "[...document.querySelectorAll('.gw-plot')].map((each) => each.querySelector('canvas')?.toDataURL().length || 0)"
)


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used."""
    figures = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(figures[11]) + int(figures[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def calls(metrics: str) -> Counter[str]:
    """The calls that the server has served beside those of the training, by method."""
    families = text_string_to_metric_families(httpx.get(f"http://{metrics}/metrics", timeout=600).text)
    found = [each for family in families for each in family.samples if each.name == "gradwire_grpc_calls_total"]
    return Counter({each.labels["method"]: int(each.value) for each in found if each.labels["method"] not in TRAINING})


def new_page(browser: Browser) -> Page:
    page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    return page


def watch_pages(minutes: float, count: int, folder: Path) -> bool:
    metrics, stop, steps = f"127.0.0.1:{free_port()}", threading.Event(), [0]
    with (
        Server(tiny_model(folder / "tiny"), folder / "state", "--metrics-address", metrics) as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
        launched("--js-flags=--expose-gc") as browser,
    ):
        run = service.create_run("tiny", lora={"rank": 4}, name="watched", record_batches=0.01)

        def train() -> None:
            while not stop.is_set():
                run.forward_backward(ROWS, "causal_lm")
                run.optim_step(learning_rate=1e-4).result(600)
                steps[0] += 1

        training = threading.Thread(target=train)
        training.start()
        try:
            here = f"run/{run.run_id}"
            paths = ["", here, f"{here}/journal", f"compare?runs={run.run_id}", "timeline", "server", "jobs",
                     f"{here}/checkpoints", f"{here}/batches", "playground"]  # fmt: skip
            pages = []
            for number in range(count):
                pages.append(new_page(browser))
                pages[-1].goto(f"{console.url}/{paths[number % len(paths)]}")
                pages[-1].locator(".gw-server .gw-state.connected").wait_for()
            print(f"all {count} pages loaded", flush=True)
            front, heaps, held = server.process.pid, list[float](), list[float]()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                begun, before, used, taken = time.monotonic(), calls(metrics), cpu_s(front), steps[0]
                pages[0].wait_for_timeout(min(60.0, 15 * minutes) * 1000)
                seconds, found = time.monotonic() - begun, calls(metrics) - before
                heaps.append(sum(page.evaluate("(gc(), performance.memory.usedJSHeapSize / 1e6)") for page in pages))
                held.append(resident_mb(console.process.pid))
                print(
                    f"heaps {heaps[-1]:.0f} MB together, console {held[-1]:.0f} MB;"
                    f" {found.total() / seconds:.2f} calls/s {dict(found)};"
                    f" {(steps[0] - taken) / seconds:.1f} steps/s,"
                    f" front {1000 * (cpu_s(front) - used) / max(steps[0] - taken, 1):.2f} CPU ms a step",
                    flush=True,
                )
            alive = sum(page.locator(".gw-server .gw-state.connected").count() for page in pages)
        finally:
            stop.set()
            training.join()
    quarter = max(len(heaps) // 4, 1)
    early, late = statistics.median(heaps[quarter : 2 * quarter] or heaps), statistics.median(heaps[-quarter:])
    print(f"{alive} of {count} pages are connected; heaps {late / early:.2f} x the second quarter's, at most {GROWTH}")
    return alive == count and late <= GROWTH * early and max(held) < CONSOLE_MB


def fill(database: Path, runs: list[str]) -> None:
    """Give each run a record of ``POINTS`` operations, as the first's engine would have measured them."""
    with closing(connect(database)) as connection:
        connection.execute("BEGIN")
        points = []
        for number in range(POINTS):
            about = {"run_id": runs[0], "seq": number + 1, "step": (number + 1) // 2, "time": 1.7e9 + number}
            if number % 2:
                points.append(pb.HistoryPoint(operation="optim_step", learning_rate=1e-4, grad_norm=1.0, **about))
            else:
                loss = 3.0 / (1 + number / POINTS) + (number * 7919 % 101) / 500
                point = pb.HistoryPoint(
                    operation="forward_backward", loss_fn="causal_lm", loss=loss, tokens=192, **about
                )
                point.metrics.update({"perplexity": loss * 3, "token_accuracy": 0.5, "num_tokens": 188.0})
                points.append(point)
        history.add(connection, runs[0], points, None)
        for run_id in runs[1:]:
            history.copy(connection, runs[0], POINTS, run_id)
        connection.execute("COMMIT")


def timed(page: Page, console: Console, act: str) -> tuple[float, float]:
    """Milliseconds until every plot is drawn anew after an action, and the console's processor time, likewise."""
    begun, used = time.monotonic(), cpu_s(console.process.pid)
    before = page.evaluate(DRAWN)
    page.get_by_label("Axis" if act in ("Tokens", "Steps") else "Mean over").click()
    page.get_by_role("option", name=act, exact=True).click()
    begun = time.monotonic()
    page.wait_for_function(f"(before) => {DRAWN}.every((each, n) => each && each !== before[n])", arg=before[:1])
    return 1000 * (time.monotonic() - begun), 1000 * (cpu_s(console.process.pid) - used)


def time_plots(count: int, folder: Path) -> bool:
    server = Server(tiny_model(folder / "tiny"), folder / "state")
    with server, gradwire.sync.connect(server.address) as service:
        runs = [service.create_run("tiny", lora={"rank": 1}, name=f"run-{n}").run_id for n in range(count)]
    begun = time.monotonic()
    fill(folder / "state" / DATABASE, runs)
    print(f"{count} records of {POINTS:,} operations in {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[str, list[tuple[float, float]]] = {}
    with server, Console(server.address) as console, launched() as browser:
        page = new_page(browser)
        page.goto(console.url)
        page.locator("tbody tr").nth(count - 1).wait_for()
        for run_id in [*runs[:3], runs[0]]:
            name = "looked at again" if run_id in runs[:1] and "first look" in found else "first look"
            begun, used = time.monotonic(), cpu_s(console.process.pid)
            page.goto(f"{console.url}/run/{run_id}")
            page.wait_for_function(f"{DRAWN}.length && {DRAWN}.every(Boolean)")
            took = 1000 * (time.monotonic() - begun), 1000 * (cpu_s(console.process.pid) - used)
            found.setdefault(name, []).append(took)
            for act in ("Tokens", "50 values", "Steps"):
                found.setdefault(f"to {act}", []).append(timed(page, console, act))
        print(f"console {resident_mb(console.process.pid):.0f} MB")
    for name, figures in found.items():
        wall, used = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"{name}: {wall:.0f} ms, {used:.0f} ms of the console's processor")
    return all(statistics.median(each for each, _ in figures) < PLOT_MS for figures in found.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("pages", "plots"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--runs", type=int, default=200)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradwire-benchmark-") as name:
        work = Path(name)
        done = watch_pages(given.minutes, given.pages, work) if given.what == "pages" else time_plots(given.runs, work)
    sys.exit(not done)
