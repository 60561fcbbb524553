"""Real trainings on a real server, each as a person follows it in a browser: SFT, DPO, GRPO with tools, a router."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
import pytest
from gradwire import rl, sync
from gradwire.router.world import World
from playwright.sync_api import Page, expect
from support.chats import chat_model
from support.console import Console
from support.server import Server

pytestmark = [pytest.mark.browser, pytest.mark.slow]

QUESTIONS = [(f"{a}+{b}=", str(a + b)) for a in range(5) for b in range(5)]


def encoded(service: sync.ServiceClient, texts: list[str], special: bool = True) -> list[list[int]]:
    return [list(each) for each in service.encode("tiny", texts, add_special_tokens=special)]


def reinforced(server: Server, train: Callable[[gradwire.ServiceClient], Coroutine[Any, Any, str]]) -> str:
    """Train by the SDK's loops, which are asynchronous, beside the browser's loop; return what it returns."""
    found: list[str] = []

    async def main() -> None:
        async with gradwire.connect(server.address) as service:
            found.append(await train(service))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    return found[0]


def last(page: Page, metric: str) -> Any:
    """The newest value of a metric, as its panel has it."""
    panel = page.locator(".gw-panel", has=page.get_by_text(metric, exact=True)).filter(has=page.locator(".gw-plot"))
    return panel.locator(".mono")


def shown(value: float) -> str:
    return f"{value:.5g}"


def test_supervised_fine_tuning(console: Console, service: sync.ServiceClient, page: Page) -> None:
    prompts = encoded(service, [question for question, _ in QUESTIONS])
    answers = encoded(service, [answer for _, answer in QUESTIONS], special=False)
    rows = [
        {"input_ids": [*prompt, *answer], "loss_mask": [0] * len(prompt) + [1] * len(answer)}
        for prompt, answer in zip(prompts, answers)
    ]
    run = service.create_run("tiny", lora={"rank": 8}, name="sums", record_batches=1.0)
    page.goto(console.url)
    line = page.locator(f'tr[data-key="{run.run_id}"]')
    for step in range(1, 31):
        run.forward_backward(rows[:20], "causal_lm")
        run.optim_step(learning_rate=1e-2).result(60)
        if step == 3:
            expect(line).to_contain_text("training")
            expect(line.locator("td").nth(3)).to_have_text("3")  # without a reload
    held_out = float(run.forward(rows[20:], "causal_lm").result(60)["loss"])
    run.save_checkpoint("end").result(60)
    page.get_by_role("link", name="sums").click()
    history = run.history()
    losses = history["loss"][(history["operation"] == "forward_backward")]
    assert losses[-1] < 0.7 * losses[0]
    expect(last(page, "loss")).to_have_text(shown(losses[-1]))
    expect(last(page, "loss (forward only)")).to_have_text(shown(held_out))
    expect(last(page, "learning_rate")).to_have_text("0.01")
    page.get_by_role("link", name="Checkpoints").click()
    saved = page.get_by_role("region", name="Checkpoints").locator("tbody tr")
    expect(saved).to_contain_text(f"{losses[-1]:.4g}")
    expect(saved).to_contain_text(f"{held_out:.4g}")
    page.get_by_role("link", name="Batches").click()
    page.get_by_role("link", name="forward_backward 1", exact=True).click()
    first = page.locator(".gw-sequence", has_text="Row 0")
    expect(first.locator(".unscored")).to_have_count(len(prompts[0]))
    expect(first.locator(".gw-tokens")).to_have_text(re.compile(r"0\+0=0"))


def test_preference_optimisation(console: Console, service: sync.ServiceClient, page: Page) -> None:
    prompts = encoded(service, [question for question, _ in QUESTIONS])
    chosen, rejected = (encoded(service, [text] * len(prompts), special=False) for text in ("yes", "no"))
    batch = {
        "chosen_input_ids": [[*prompt, *each] for prompt, each in zip(prompts, chosen)],
        "rejected_input_ids": [[*prompt, *each] for prompt, each in zip(prompts, rejected)],
        "prompt_lengths": [len(prompt) for prompt in prompts],
    }
    runs = []
    for name, rate in (("polite", 1e-2), ("polite-cold", 1e-4)):
        run = service.create_run("tiny", lora={"rank": 8}, name=name, record_batches=1.0, tags={"rate": str(rate)})
        for _ in range(10):
            run.forward_backward(batch, "dpo", {"reference_model": "base"})
            run.optim_step(learning_rate=rate).result(60)
        run.save_checkpoint("end").result(60)
        runs.append(run)
    page.goto(f"{console.url}/run/{runs[0].run_id}")
    expect(last(page, "preference_accuracy")).to_have_text("1")
    while (folded := page.locator('.gw-fold[aria-expanded="false"]')).count():
        folded.first.click()
    margins = runs[0].history()["reward_margin"]
    expect(last(page, "reward_margin")).to_have_text(shown(margins[np.isfinite(margins)][-1]))
    page.get_by_role("link", name="Batches").click()
    page.get_by_role("link", name="forward_backward 1", exact=True).click()
    for part, said in (("chosen", "yes"), ("rejected", "no")):
        first = page.locator(".gw-sequence", has_text=re.compile(f"Row 0, {part}"))
        expect(first.locator(".gw-tokens")).to_have_text(re.compile(said))
        expect(first.locator(".unscored")).to_have_count(len(prompts[0]))
    page.goto(f"{console.url}/compare?runs=" + ",".join(run.run_id for run in runs))
    expect(page.get_by_role("region", name="Settings that differ")).to_contain_text("tag rate")
    figures = page.get_by_role("region", name="Last figures").locator("tr", has_text="preference_accuracy")
    expect(figures.locator("td")).to_have_count(3)


def look(word: str) -> str:
    """What a word is worth."""
    return str(len(set(word)))


class Looking(rl.ToolEnvironment):
    """The first thing that the policy writes is looked up, the second is its answer."""

    def parse_action(self, state: Any, raw: str) -> rl.Action:
        return rl.Action(raw, () if state.step else (rl.ToolCall("look", {"word": raw}),))

    def build_prompt(self, state: Any) -> str:
        return "".join(message["content"] for message in state.messages)


@rl.reward_function
def vowels(response: str) -> float:
    return sum(character in "aeiou" for character in response) / 4


def test_reinforcement_with_tools(server: Server, console: Console, page: Page) -> None:
    async def train(service: gradwire.ServiceClient) -> str:
        run = await service.create_run("tiny", lora={"rank": 8}, name="vowels", kind="rl", record_batches=1.0)
        config = rl.AlgorithmConfig(batch_size=2, group_size=4, learning_rate=1e-2, max_tokens=4)
        tools = Looking([look], max_turns=2, describe_tools=False, stop=())
        recorder = rl.RunRecorder(run)
        tasks = ["first", "second"]
        await rl.GRPOAlgorithm(service, run, tasks, vowels, config, environment=tools, recorder=recorder).train(3)
        return run.run_id

    run_id = reinforced(server, train)
    page.goto(f"{console.url}/run/{run_id}/rollouts")
    expect(page.get_by_text(re.compile("2 groups, . without signal"))).to_be_visible()
    recorded = page.request.get(f"{console.url}/api/runs/{run_id}/rollouts/2").json()
    one = recorded[0]
    called = one["steps"][0]["tool_results"][0]
    assert called["name"] == "look" and called["content"] == look(one["steps"][0]["action"])
    panel = page.locator(".gw-answers .gw-panel").first
    expect(panel.locator(".gw-turn.tool")).to_contain_text("tool look(")
    expect(panel.locator(".gw-turn.tool pre")).to_have_text(called["content"])
    expect(panel).to_contain_text(f"{one['reward']:.4g}")
    expect(page.locator(".gw-answers .gw-panel")).to_have_count(4)
    page.get_by_role("link", name="Batches").click()
    page.get_by_role("link", name=re.compile("^(forward_backward|train_step) ")).first.click()
    expect(page.locator(".gw-sequence").first).to_contain_text("reward")
    hints = page.locator(".gw-tokens span:not(.unscored)")
    for figure in ("log-probability of the sampler", "ratio"):
        expect(hints.first).to_have_attribute("title", re.compile(figure))
    page.goto(f"{console.url}/timeline")
    kinds = {each.get("cat") for each in page.request.get(f"{console.url}/api/trace").json()["traceEvents"]}
    assert {"compute", "sampling", "wait"} <= kinds


def test_a_job_on_rewards_shows_its_answers(tmp_path: Path, page: Page) -> None:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a} and 1?", "answer": str(a + 1)}) + "\n" for a in range(12)))
    with (
        Server(chat_model(tmp_path / "model", "marked"), tmp_path / "state", "--job-workers", "1") as server,
        Console(server.address) as console,
        gradwire.sync.connect(server.address) as service,
    ):
        settings = {"model": "tiny", "data": str(data), "batch_size": 2, "group_size": 4, "answer_tokens": 4}
        settings |= {"max_steps": 2, "held_out": 0.0, "max_tokens": 128, "tags": {"stage": "rewards"}}
        job = service.jobs.wait(service.jobs.submit("grpo", settings, name="sums by rewards").job_id, 240)
        assert job.state == "succeeded", job.error
        page.goto(f"{console.url}/?group=tag+stage")
        expect(page.locator("tr.group")).to_contain_text("stage = rewards")
        page.get_by_role("link", name="sums by rewards").click()
        page.get_by_role("link", name="Rollouts").click()
        expect(page.locator(".gw-answers .gw-panel")).to_have_count(4)
        expect(page.locator(".gw-answers .gw-panel").first).to_contain_text("number")
        page.get_by_role("link", name="Batches").click()
        expect(page.locator("tbody a").first).to_be_visible()


def test_a_router_is_followed(server: Server, console: Console, page: Page) -> None:
    """A model that says by one letter who shall answer a request, and learns from what the modes of a world earn."""
    world, rng = World(), np.random.default_rng(0)
    requests = world.draw(rng, 4)
    earned = world.expected(requests)["reward"]
    modes = earned.shape[1]

    @rl.reward_function
    def routed(response: str, ground_truth: list[float]) -> float:
        return float(ground_truth[ord((response or " ")[0]) % modes])

    async def train(service: gradwire.ServiceClient) -> str:
        run = await service.create_run("tiny", lora={"rank": 8}, name="router", kind="rl")
        tasks = [rl.Task(f"request {n}:", row, str(n)) for n, row in enumerate(earned.tolist())]
        config = rl.AlgorithmConfig(batch_size=4, group_size=8, learning_rate=2e-2, max_tokens=1)
        await rl.GRPOAlgorithm(service, run, tasks, routed, config, recorder=rl.RunRecorder(run)).train(4)
        await run.save_checkpoint("router")
        return run.run_id

    run_id = reinforced(server, train)
    page.goto(f"{console.url}/run/{run_id}")
    expect(last(page, "reward_mean")).not_to_have_text("")
    curves = page.request.get(f"{console.url}/api/runs/{run_id}/metrics").json()
    assert len(curves["reward_mean"]) == 4
    page.get_by_role("link", name="Rollouts").click()
    groups = page.get_by_role("region", name="Groups").locator("tbody tr")
    expect(groups).to_have_count(4)
    expect(page.locator(".gw-turn pre").first).to_contain_text("request ")
    page.get_by_role("link", name="Checkpoints").click()
    saved = page.get_by_role("region", name="Checkpoints").locator("tbody tr")
    expect(saved).to_contain_text(f"{curves['reward_mean'][-1][1]:.4g}")
