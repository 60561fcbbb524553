"""The console's pictures in docs/images, of the demo's runs: PYTHONPATH=examples python tools/console_pictures.py.

Each page at three widths in both themes, by Debian's chromium. A page that is wider than its window is named. It takes
ten minutes, and less once out/console_demo has the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import gradwire
from _support.small_model import small_model
from console_demo import FOLDER, REINFORCED, RUNS, TEXTS, reinforce, train
from playwright.async_api import Browser, Page, async_playwright

IMAGES = Path("docs/images")
WIDTHS = (400, 1280, 2560)
HEIGHT = 900
PATIENCE_MS = 300_000
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
FORK = "sft-continued"
PROMPT = "Lima is the capital of"


async def runs_of_the_demo(service: gradwire.ServiceClient) -> dict[str, gradwire.RunInfo]:
    """The demo's runs by name, with a fork of one; trained where they are not there."""
    there = {run.name: run for run in await service.list_runs()}
    await asyncio.gather(*(train(service, *each) for each in RUNS if each[0] not in there))
    if REINFORCED not in there:
        await reinforce(service)
    there = {run.name: run for run in await service.list_runs()}
    if FORK not in there:
        run = await service.fork_run(f"{there[RUNS[0][0]].run_id}/step-80", name=FORK, with_optimizer=True)
        rows = await service.encode("capitals", TEXTS)
        for _ in range(40):
            run.forward_backward({"input_ids": rows}, "causal_lm")
            await run.optim_step(learning_rate=3e-3)
    return {run.name: run for run in await service.list_runs()}


async def jobs_of_the_demo(service: gradwire.ServiceClient) -> None:
    """A job that has ended, and one that trains."""
    for job in await service.jobs.list():  # of an earlier call, which may have been interrupted
        if not job.has_ended:
            await service.jobs.cancel(job.job_id)
        await service.jobs.wait(job.job_id, 60)
        await service.jobs.delete(job.job_id)
    for run in await service.list_runs():
        if run.name.startswith("ftjob-"):
            await service.delete_run(run.run_id)
    data = FOLDER / "capitals.jsonl"
    data.write_text("".join(json.dumps({"prompt": text[:9], "completion": text[9:]}) + "\n" for text in TEXTS * 20))
    stored = await service.files.upload(data)
    settings = {"model": "capitals", "data": stored.file_id, "batch_size": 4, "max_tokens": 128}
    first = await service.jobs.submit("sft", settings | {"max_steps": 40}, name="capitals, short")
    await service.jobs.wait(first.job_id, 300)
    going = await service.jobs.submit("sft", settings | {"max_steps": 20_000, "epochs": 1000}, name="capitals, long")
    while (await service.jobs.get(going.job_id)).step < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


def pages(runs: dict[str, gradwire.RunInfo]) -> dict[str, str]:
    """Name of a picture -> path of its page."""
    first, second, reinforced = (f"run/{runs[name].run_id}" for name in (RUNS[0][0], RUNS[2][0], REINFORCED))
    models = ",".join(["capitals", *(f"{runs[name].run_id}/step-160" for name in (RUNS[0][0], RUNS[1][0]))])
    compared = ",".join(runs[name].run_id for name, *_ in RUNS)
    return {
        "timeline": "timeline", "runs": "", "run": first, "checkpoints": f"{first}/checkpoints",
        "batches": f"{reinforced}/batches",
        "rollouts": f"{reinforced}/rollouts", "journal": f"{second}/journal", "compare": f"compare?runs={compared}",
        "server": "server", "jobs": "jobs", "audit": "audit",
        "playground": f"playground?models={models}&tokens=24&temperature=0.4",
    }  # fmt: skip


async def prepare(page: Page, name: str) -> None:
    """Bring a page to what its picture shows."""
    if name == "batches":
        await page.locator("tbody a").first.click()
        await page.locator(".gw-tokens").first.wait_for()
    if name == "playground":
        await page.get_by_label("Prompt").fill(PROMPT)
        await page.get_by_role("button", name="Generate").click()
        answers, seen = page.locator(".gw-answer"), [""]
        while seen != await answers.all_inner_texts():  # until each has ended, which may be at once
            seen = await answers.all_inner_texts()
            await page.wait_for_timeout(4000)
    await page.wait_for_timeout(2500)  # what is fetched, and what fades in


async def take(browser: Browser, url: str, name: str, path: str) -> None:
    for scheme in SCHEMES:
        for width in WIDTHS:
            context = await browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            context.set_default_timeout(PATIENCE_MS)
            page = await context.new_page()
            await page.goto(f"{url}/{path}")
            await prepare(page, name)
            found = await page.evaluate("document.documentElement.scrollWidth")
            if found > width:
                print(f"{name} at {width} px is {found} px wide", file=sys.stderr)
            await page.screenshot(path=IMAGES / f"console-{name}-{scheme}-{width}.png")
            await context.close()


async def main(chosen: list[str]) -> None:
    model: Path = FOLDER / "capitals"
    if not model.exists():  # noqa: ASYNC240
        await asyncio.to_thread(small_model, model)
    own: dict[str, Any] = {"state_dir": FOLDER / "state", "server_args": ["--job-workers", "1"]}
    async with gradwire.connect(models=[f"capitals={model}"], **own) as service:
        runs = await runs_of_the_demo(service)
        await jobs_of_the_demo(service)
        console = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gradwire_console.cli", service.address, "--address", "127.0.0.1:0",
            "--parent-pid", str(os.getpid()), env=os.environ | {"GRADWIRE_API_KEY": service.api_key},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert console.stdout is not None
        url = (await console.stdout.readline()).decode().split()[-1]
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for name, path in pages(runs).items():
                if not chosen or name in chosen:
                    await take(browser, url, name, path)
            await browser.close()
        console.terminate()
        await console.wait()
        for job in await service.jobs.list():
            if not job.has_ended:
                await service.jobs.cancel(job.job_id)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", nargs="*", help="only these pages")
    asyncio.run(main(parser.parse_args().page))
