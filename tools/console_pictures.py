"""The console's pictures in docs/images: PYTHONPATH=examples python tools/console_pictures.py.

They are of the demo's trainings, with --model and --data of a real model's (console_demo.py), which are trained where
they are not there yet. With --all each page is taken at three widths in both themes, into out/console_pictures; a page
that is wider than its window is named.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Literal

import gradwire
from console_demo import CAPITALS, FOLDER, TEXTS, Demo, arguments, console_of, demo_server, trained
from playwright.async_api import Browser, Page, async_playwright

IMAGES, EVERY = Path("docs/images"), Path("out/console_pictures")
Scheme = Literal["light", "dark"]
WIDTHS, WIDTH, HEIGHT = (400, 900, 1440), 1440, 900
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
SHOWN = ("runs", "run", "form", "playground", "rollouts", "batches")
"""Pages whose picture is in docs."""
DARK = ("batches", "playground")
"""Pages whose picture in docs is dark."""
PATIENCE_MS = 300_000


async def job_of_the_demo(service: gradwire.ServiceClient, model: str) -> str:
    """The newest job; of the small model one that is made for it, with its data."""
    jobs = await service.jobs.list()
    if not jobs and model == CAPITALS:
        data = FOLDER / "capitals.jsonl"
        data.write_text("".join(json.dumps({"prompt": text[:9], "completion": text[9:]}) + "\n" for text in TEXTS * 20))
        settings = {"model": model, "data": str(data), "batch_size": 4, "max_tokens": 128, "max_steps": 40}
        jobs = [await service.jobs.submit("sft", settings, name="capitals, short")]
        await service.jobs.wait(jobs[0].job_id, 300)
    return jobs[0].job_id


def pages(demo: Demo, job_id: str) -> dict[str, str]:
    """Name of a picture -> path of its page."""
    reinforced, chat = f"run/{demo.reinforced}", "" if demo.model == CAPITALS else "&chat=true"
    return {
        "runs": "", "run": f"run/{demo.compared[0]}", "compare": f"compare?runs={','.join(demo.compared)}",
        "checkpoints": f"run/{demo.compared[0]}/checkpoints", "batches": f"{reinforced}/batches",
        "rollouts": f"{reinforced}/rollouts", "job": f"jobs/{job_id}", "form": "jobs", "server": "server",
        "playground": f"playground?models={','.join((demo.model, *demo.checkpoints))}&tokens=96&temperature=0.2{chat}",
    }  # fmt: skip


async def prepare(page: Page, name: str, demo: Demo) -> None:
    """Bring a page to what its picture shows."""
    if name == "batches":
        await page.locator("tbody a").first.click()
        await page.locator(".gw-tokens").first.wait_for()
    if name == "form":
        await page.get_by_role("button", name="New training").click()
        await page.get_by_label("Data", exact=True).click()
        await page.get_by_role("option").last.click()
        await page.locator(".gw-tokens").first.wait_for()
    if name == "playground":
        await page.get_by_label("Prompt").fill(demo.prompt)
        await page.get_by_role("button", name="Generate").click()
        await page.locator(".gw-answer").first.wait_for()
        await page.wait_for_function("!document.querySelector('.gw-answer.waits')")
    await page.wait_for_timeout(2500)  # what is fetched, and what fades in


async def take(browser: Browser, url: str, name: str, path: str, demo: Demo, scheme: Scheme, width: int) -> bytes:
    context = await browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE_MS)
    page = await context.new_page()
    await page.goto(f"{url}/{path}")
    await prepare(page, name, demo)
    found = await page.evaluate("document.documentElement.scrollWidth")
    if found > width:
        print(f"{name} at {width} px is {found} px wide", file=sys.stderr)
    end = await page.evaluate(
        "document.querySelector('.gw-main').getBoundingClientRect().bottom"
    )  # below it is nothing
    picture = await page.screenshot(clip={"x": 0, "y": 0, "width": width, "height": min(HEIGHT, end)})
    await context.close()
    return picture


async def main(chosen: list[str], model: str, data: str, every: bool) -> None:
    async with demo_server(model, data) as (service, name):
        demo = await trained(service, name, data)
        paths = pages(demo, await job_of_the_demo(service, name))
        console = await console_of(service, "127.0.0.1:0", stdout=asyncio.subprocess.PIPE)
        assert console.stdout is not None
        url = (await console.stdout.readline()).decode().split()[-1]
        folder = EVERY if every else IMAGES
        folder.mkdir(parents=True, exist_ok=True)
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for page in [each for each in paths if each in (chosen or (paths if every else SHOWN))]:
                scheme: Scheme = "dark" if page in DARK else "light"
                for theme, width in [(s, w) for s in SCHEMES for w in WIDTHS] if every else [(scheme, WIDTH)]:
                    picture = await take(browser, url, page, paths[page], demo, theme, width)
                    end = f"-{theme}-{width}" if every else ""
                    (folder / f"console-{page}{end}.png").write_bytes(picture)
            await browser.close()
        console.terminate()
        await console.wait()


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("page", nargs="*", help="only these pages")
    parser.add_argument("--all", action="store_true", help="at three widths in both themes, beside the docs")
    given = parser.parse_args()
    asyncio.run(main(given.page, given.model, given.data, given.all))
