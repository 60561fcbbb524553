"""The console in a real browser: open pages beside a training, and plots of long records.

``python -m benchmarks.console load``: what ten open pages cost a training, in four minutes. A training runs in windows
of 15 seconds, by turns without a console and with one that ten pages look at, in the order ABBAABBA. For each it prints
the time of a step and what the front and its engine take of a processor for it; at the end, medians and quotients. With
two processors or more, the server has the first for itself, so browser and console do not take its time.

``python -m benchmarks.console pages --minutes 60``: ten pages beside a training. Every page has to load; each minute it
prints what the browser's heaps and the console's process hold, and the calls that the server served a second. At the
end it compares the memory of the last quarter with the second's: the first fills caches.

``python -m benchmarks.console plots --runs 200 --long 20``: so many runs, the long ones with records of 100,000
operations, the others of 1,000. Of some long ones it times what a person waits for: the first look at a run, the axis,
the smoothing. A look is timed twice: until rows or curves are seen, and until the page that scripts make has them; of
the second, the time that a browser takes for a page without plots is not the plots'. Figures are wall time; beside them
stands the processor time of the console and the server's front, which a busy machine does not stretch. Of the list it
counts the rows in the page, and those that its window does not show.
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
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import gradwire
import httpx
from gradwire import sync
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
POINTS, FEW_POINTS = 100_000, 1_000
SPARE_ROWS = 8
"""Rows beside the window that a list keeps, so that a short scroll shows no gap."""
PATIENCE_MS = 600_000
EMPTY, SEEN = "a page without plots", ", seen"
TRAINING = {"Submit", "Results", "AckResults", "OpenRun"}
GROWTH, CONSOLE_MB, PLOT_MS, LOSS = 1.1, 400.0, 300.0, 1.03
COUNT_PAINTS = """
const clear = CanvasRenderingContext2D.prototype.clearRect;
CanvasRenderingContext2D.prototype.clearRect = function (...area) {
  this.canvas.painted = (this.canvas.painted ?? 0) + 1;
  this.canvas.painted_at = performance.now();
  return clear.apply(this, area);
};
addEventListener("click", () => { window.clicked_at = performance.now(); }, true);
const seen = new MutationObserver(() => {
  if (!document.querySelector("tr[data-key], .gw-plot polyline")) return;
  seen.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.seen_at = performance.now(); }));
});
seen.observe(document, { childList: true, subtree: true });
"""
"""Notes how often and when each canvas is painted, as to read its pixels would cost more than to paint it, and the end
of the frame that shows the first row or curve."""
PLOTS = "[...document.querySelectorAll('#app .gw-plot')]"
DRAWN = f"{PLOTS}.map((each) => each.querySelector('canvas')?.painted ?? 0)"
CANVASES = f"{PLOTS}.map((each) => each.querySelector('canvas'))"
SHOWN = f"{CANVASES}.map((each) => (each.looked = each.painted, each.differs = false, each.toDataURL()))"
PAINTED_AT = f"Math.max(...{CANVASES}.map((each) => each.painted_at))"
ANEW = f"""(before) => {CANVASES}.every((each, n) => {{
  if (each.looked !== each.painted) {{
    each.looked = each.painted;
    each.differs = each.toDataURL() !== before[n];
  }}
  return each.differs;
}})"""

ROWS_SHOWN = """() => {
  const rows = [...document.querySelectorAll("tbody tr[data-key]")].map((each) => each.getBoundingClientRect());
  return [rows.length, rows.filter((each) => each.bottom < 0 || each.top > innerHeight).length];
}"""


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
    page.add_init_script(COUNT_PAINTS)
    return page


def tree_cpu_s(pid: int) -> dict[str, float]:
    """Processor seconds of a front, and of all processes below it together."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parents[int(each.parent.name)] = int(each.read_text().rsplit(")", 1)[1].split()[1])
    below, grown = {pid}, True
    while grown:
        children = {child for child, parent in parents.items() if parent in below} - below
        below, grown = below | children, bool(children)
    return {"front": cpu_s(pid), "engine": sum(map(cpu_s, below - {pid}))}


class Steps:
    """A training in a thread.

    Attributes:
        taken: Steps so far.
    """

    def __init__(self, run: sync.TrainingClient) -> None:
        self.taken, self._run, self._stop = 0, run, threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        while not self._stop.is_set():
            self._run.forward_backward(ROWS, "causal_lm")
            self._run.optim_step(learning_rate=1e-4).result(600)
            self.taken += 1

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def opened(browser: Browser, url: str, run_id: str, count: int) -> list[Page]:
    """Pages of the console, all different up to ten; each has its content."""
    here = f"run/{run_id}"
    paths = ["", here, f"{here}/journal", f"compare?runs={run_id}", "timeline", "server", "jobs",
             f"{here}/checkpoints", f"{here}/batches", "playground"]  # fmt: skip
    pages = []
    for number in range(count):
        pages.append(new_page(browser))
        pages[-1].goto(f"{url}/{paths[number % len(paths)]}")
        pages[-1].locator(".gw-server .gw-state.connected").wait_for()
    print(f"all {count} pages loaded", flush=True)
    return pages


def weigh(count: int, folder: Path, window_s: float = 15.0) -> bool:
    cores = sorted(os.sched_getaffinity(0))
    by_looks: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    os.sched_setaffinity(0, cores[:1])  # what is started from here on has the same
    server = Server(tiny_model(folder / "tiny"), folder / "state")
    with server:
        os.sched_setaffinity(0, cores[1:] or cores)
        with gradwire.sync.connect(server.address) as service, launched() as browser, ExitStack() as stack:
            run = service.create_run("tiny", lora={"rank": 4}, name="weighed")
            steps = stack.enter_context(Steps(run))
            time.sleep(5.0)  # the first steps are slower
            looked = False
            for looks in (False, True, True, False, False, True, True, False):
                if looks and not looked:
                    console = stack.enter_context(Console(server.address))
                    pages = opened(browser, console.url, run.run_id, count)
                elif looked and not looks:
                    for page in pages:
                        page.context.close()
                    console.end()
                looked = looks
                begun, used, taken = time.monotonic(), tree_cpu_s(server.process.pid), steps.taken
                if looks:
                    pages[0].wait_for_timeout(1000 * window_s)
                else:
                    time.sleep(window_s)
                seconds, done = time.monotonic() - begun, steps.taken - taken
                now = tree_cpu_s(server.process.pid)
                figures = {f"{name}, CPU ms a step": 1000 * (now[name] - used[name]) / done for name in now}
                figures["both, CPU ms a step"] = sum(figures.values())
                figures["ms a step"] = 1000 * seconds / done
                by_looks[looks].append(figures)
                said = ", ".join(f"{value:.2f} {name}" for name, value in figures.items())
                print(f"{f'{count} pages' if looks else 'no console'}: {said}", flush=True)
    quotients = {}
    for name in by_looks[True][0]:
        without, beside = (statistics.median(each[name] for each in by_looks[looks]) for looks in (False, True))
        quotients[name] = beside / without
        print(f"{name}: {without:.2f} without, {beside:.2f} beside {count} pages, {beside / without - 1:+.1%}")
    return quotients["both, CPU ms a step"] <= LOSS


def watch_pages(minutes: float, count: int, folder: Path) -> bool:
    metrics = f"127.0.0.1:{free_port()}"
    with (
        Server(tiny_model(folder / "tiny"), folder / "state", "--metrics-address", metrics) as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
        launched("--js-flags=--expose-gc") as browser,
    ):
        run = service.create_run("tiny", lora={"rank": 4}, name="watched", record_batches=0.01)
        with Steps(run) as steps:
            pages = opened(browser, console.url, run.run_id, count)
            front, heaps, held = server.process.pid, list[float](), list[float]()
            end = time.monotonic() + 60 * minutes
            while time.monotonic() < end:
                begun, before, used, taken = time.monotonic(), calls(metrics), cpu_s(front), steps.taken
                pages[0].wait_for_timeout(min(60.0, 15 * minutes) * 1000)
                seconds, counted = time.monotonic() - begun, calls(metrics) - before
                heaps.append(sum(page.evaluate("(gc(), performance.memory.usedJSHeapSize / 1e6)") for page in pages))
                held.append(resident_mb(console.process.pid))
                print(
                    f"heaps {heaps[-1]:.0f} MB together, console {held[-1]:.0f} MB;"
                    f" {counted.total() / seconds:.2f} calls/s {dict(counted)};"
                    f" {(steps.taken - taken) / seconds:.1f} steps/s,"
                    f" front {1000 * (cpu_s(front) - used) / max(steps.taken - taken, 1):.2f} CPU ms a step",
                    flush=True,
                )
            alive = sum(page.locator(".gw-server .gw-state.connected").count() for page in pages)
    quarter = max(len(heaps) // 4, 1)
    early, late = statistics.median(heaps[quarter : 2 * quarter] or heaps), statistics.median(heaps[-quarter:])
    print(f"{alive} of {count} pages are connected; heaps {late / early:.2f} x the second quarter's, at most {GROWTH}")
    return alive == count and late <= GROWTH * early and max(held) < CONSOLE_MB


def fill(database: Path, runs: list[str], long: int) -> None:
    """Give each run a record of operations as the first's engine would have measured them: ``POINTS`` to the first
    ``long`` runs, ``FEW_POINTS`` to the others."""
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
        for number, run_id in enumerate(runs[1:], 1):
            history.copy(connection, runs[0], POINTS if number < long else FEW_POINTS, run_id)
        connection.execute("COMMIT")


def timed(page: Page, pids: Sequence[int], act: str) -> tuple[float, float]:
    """Milliseconds until every plot is drawn anew after an action, and of the processes' processor time."""
    used, before = sum(map(cpu_s, pids)), page.evaluate(SHOWN)
    page.get_by_label("Axis" if act in ("Tokens", "Steps") else "Mean over").click()
    page.get_by_role("option", name=act, exact=True).click()
    page.wait_for_function(ANEW, arg=before)
    took_ms = page.evaluate(f"{PAINTED_AT} - window.clicked_at")
    return took_ms, 1000 * (sum(map(cpu_s, pids)) - used)


def time_plots(count: int, long: int, folder: Path) -> bool:
    server = Server(tiny_model(folder / "tiny"), folder / "state")
    with server, gradwire.sync.connect(server.address) as service:
        runs = [service.create_run("tiny", lora={"rank": 1}, name=f"run-{n}").run_id for n in range(count)]
    begun = time.monotonic()
    fill(folder / "state" / DATABASE, runs, long)
    told = f"{long} records of {POINTS:,} operations, {count - long} of {FEW_POINTS:,}"
    print(f"{told} in {time.monotonic() - begun:.0f} s", flush=True)
    by_action: dict[str, list[tuple[float, float]]] = {}
    with server, Console(server.address) as console, launched() as browser:
        page = new_page(browser)
        page.goto(console.url)
        page.get_by_text(f"{count} runs").wait_for()
        pids = (console.process.pid, server.process.pid)
        rows, outside = page.evaluate(ROWS_SHOWN)
        print(f"{rows} of {count} rows in the page, {outside} of them outside its window", flush=True)
        found_before = set[str]()
        for run_id in [*runs[: min(6, long)], *runs[:3]]:
            name = "looked at again" if run_id in found_before else "first look"
            found_before.add(run_id)
            for what, path, there in (
                (EMPTY, "uploads", "document.querySelector('.gw-server .gw-state.connected') && performance.now()"),
                (f"look at {count} runs", "", "document.querySelector('#app tr[data-key]') && performance.now()"),
                (name, f"run/{run_id}", f"{DRAWN}.length && {DRAWN}.every(Boolean) && {PAINTED_AT}"),
            ):
                used = sum(map(cpu_s, pids))
                page.goto(f"{console.url}/{path}")
                took_ms = page.wait_for_function(there).json_value()  # since its address was given
                used_ms = 1000 * (sum(map(cpu_s, pids)) - used)
                by_action.setdefault(what, []).append((took_ms, used_ms))
                if what != EMPTY:
                    by_action.setdefault(f"{what}{SEEN}", []).append((page.evaluate("seen_at"), used_ms))
                page.wait_for_timeout(3000)  # the whole record follows the overview
            for act in ("Tokens", "50 values", "Steps", "None"):
                by_action.setdefault(f"to {act}", []).append(timed(page, pids, act))
                page.wait_for_timeout(300)
        print(f"console {resident_mb(console.process.pid):.0f} MB")
    for name, figures in by_action.items():
        wall, used = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"{name}: {wall:.0f} ms, {used:.0f} ms of processor in the console and the server's front")
    medians = {name: statistics.median(each for each, _ in figures) for name, figures in by_action.items()}
    shell = medians.pop(EMPTY)
    work = {name: statistics.median(each for _, each in figures) for name, figures in by_action.items()}
    return outside <= SPARE_ROWS and all(
        took - shell * ("look" in name and SEEN not in name) < PLOT_MS and work[name] < PLOT_MS
        for name, took in medians.items()
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("load", "pages", "plots"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pages", type=int, default=10)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--long", type=int, default=20, help="runs with long records")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gradwire-benchmark-") as name:
        work = Path(name)
        if given.what == "load":
            done = weigh(given.pages, work)
        else:
            pages = given.what == "pages"
            done = watch_pages(given.minutes, given.pages, work) if pages else time_plots(given.runs, given.long, work)
    sys.exit(not done)
