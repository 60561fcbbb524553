"""`/playground`: one prompt, or a chat, to several models at once, as their tokens come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import gradwire
from fastapi.responses import RedirectResponse
from gradwire_shell.components import button, copy, empty, error, panel, plain, sdk_line, title
from gradwire_shell.frame import page_at
from nicegui import ui
from nicegui.element import Element
from pydantic import FiniteFloat

from gradwire_console.feedback import Feedback, offer_url
from gradwire_console.pages.common import FAILURES, isolated, opened
from gradwire_console.workspace import Workspace, Workspaces

MOST = 5
MOST_TOKENS = 1024
SHADES = ((0.5, ""), (0.1, "background: color-mix(in srgb, var(--s2) 18%, transparent)"),
          (0.0, "background: color-mix(in srgb, var(--s2) 38%, transparent)"))  # fmt: skip
"""Background of a token by its probability, the least first that it reaches."""


def register(workspaces: Workspaces) -> None:
    @page_at("/playground", title="Playground · gradwire")
    async def playground(
        models: str = "",
        prompt: str = "",
        chat: bool = False,
        tokens: int = 64,
        temperature: FiniteFloat = 1.0,
        top_p: FiniteFloat = 1.0,
        seed: int = 0,
    ) -> RedirectResponse | None:
        asked = _Asked(
            [each for each in models.split(",") if each][:MOST], prompt, chat, tokens, temperature, top_p, seed
        )

        async def content(workspace: Workspace) -> None:
            title("Playground")
            await _Playground(workspace, workspaces.feedback, asked).show()

        return await opened(workspaces, f"/playground?{asked.query}", "/playground", content)


@dataclass(frozen=True)
class _Asked:
    """A request to one or more models, as a link encodes it."""

    models: list[str]
    prompt: str
    chat: bool
    tokens: int
    temperature: float
    top_p: float
    seed: int

    @property
    def query(self) -> str:
        return urlencode(vars(self) | {"models": ",".join(self.models)})


Conversation = list[dict[str, str]]


def code_of(asked: _Asked, base_models: Mapping[str, str], chats: Mapping[str, Conversation]) -> str:
    """The lines of Python that do what the page does.

    Args:
        base_models: Base model of each model, whose chat template a chat takes.
        chats: The conversation with each model, to its newest question.
    """
    options = f"max_tokens={asked.tokens}, temperature={asked.temperature}, top_p={asked.top_p}, seed={asked.seed}"
    if asked.chat:
        same = len({json.dumps(chats[path]) for path in asked.models}) == 1
        said = chats[asked.models[0]] if same else {path: chats[path] for path in asked.models}
        bases = {path: base_models.get(path, "") for path in asked.models}
        lines = [
            f"messages = {said!r}",
            f"for model in {asked.models!r}:",
            f"    row = await service.render(messages{'' if same else '[model]'}, train_on=None,"
            f" add_generation_prompt=True, model={bases!r}[model])",
        ]
        given = "list(row['input_ids'])"
    else:
        lines, given = [f"prompt = {asked.prompt!r}", f"for model in {asked.models!r}:"], "prompt"
    lines += [
        f"    async for token in service.sampling_client(model).stream({given}, {options}):",
        '        print(token.text, end="")',
        "    print()",
    ]
    return "\n".join(lines)


class _Playground:
    def __init__(self, workspace: Workspace, feedback: Feedback | None, first: _Asked) -> None:
        self._workspace, self._feedback, self._first = workspace, feedback, first
        self._tasks: list[asyncio.Task[str]] = []
        self._base: dict[str, str] = {}
        self._chats: dict[str, Conversation] = {}
        self._panels: dict[str, Element] = {}

    async def show(self) -> None:
        if not self._workspace.may_sample:
            empty("A viewer's key asks no models, as that takes time of an engine: sign in with another.")
            return
        try:
            served = list(await self._workspace.models())
        except gradwire.GradwireError as failure:
            error(str(failure))
            return
        names = {name: f"{name} (base)" for name in served}
        self._base = {name: name for name in served}
        for run in self._workspace.newest_first():
            path = run.info.latest_checkpoint
            if path:
                names[path] = f"{isolated(run.name)}, {path.rpartition('/')[2]}"
                self._base[path] = run.info.base_model
        for path in self._first.models:
            names.setdefault(path, path)
            run_of = self._workspace.runs.get(path.partition("/")[0])
            self._base.setdefault(path, run_of.info.base_model if run_of else served[0] if served else "")
        with panel():
            self._models = ui.select(
                names, value=self._first.models or served[:1], multiple=True,
                label=f"Models and checkpoints, {MOST} at most",
            ).props("outlined dense use-chips options-dense").classes("full-width")  # fmt: skip
            self._prompt = (
                ui.textarea("Prompt", value=self._first.prompt).props("outlined autogrow").classes("full-width")
            )
            with ui.element("div").classes("gw-head"):
                self._chat = ui.checkbox("As a chat", value=self._first.chat)
                self._tokens = _number("Tokens", self._first.tokens, min=1, max=MOST_TOKENS, precision=0)
                self._temperature = _number("Temperature", self._first.temperature, min=0, step=0.1)
                self._top_p = _number("Top p", self._first.top_p, min=0.01, max=1, step=0.05)
                self._top_p.props["title"] = "Only the likeliest tokens that together have this probability are drawn"
                self._seed = _number("Seed", self._first.seed, precision=0)
                ui.element("div").classes("grow")
                with ui.element("div").classes("gw-actions"):
                    button("Copy the link", self._link)
                    self._anew = button("New chat", self._begin_anew)
                    button("Stop", self._stop)
                    button("Generate", self._generate, kind="primary")
        self._anew.set_visibility(False)
        self._answers = ui.element("div").classes("gw-answers")
        with self._answers:
            empty("Answers appear here, side by side. A shaded token was unlikely: its probability on hover.")
        self._code = ui.element("div")

    def _asked(self) -> _Asked:
        """The request that the form's fields describe."""
        return _Asked(
            models=list(self._models.value)[:MOST],
            prompt=self._prompt.value or "",
            chat=bool(self._chat.value),
            tokens=min(max(int(self._tokens.value or 1), 1), MOST_TOKENS),
            temperature=float(self._temperature.value or 0.0),
            top_p=float(self._top_p.value or 1.0),
            seed=int(self._seed.value or 0),
        )

    async def _link(self) -> None:
        await copy(f"location.origin + location.pathname + {json.dumps(f'?{self._asked().query}')}")

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _begin_anew(self) -> None:
        self._stop()
        self._chats.clear()
        self._panels.clear()
        self._answers.clear()
        self._code.clear()
        self._anew.set_visibility(False)

    def _panel_of(self, path: str) -> Element:
        """The place of a model's answers; a chat goes on in the one that it has."""
        if path not in self._panels:
            with self._answers, panel(self._models.options[path] if isinstance(self._models.options, dict) else path):
                self._panels[path] = ui.element("div").classes("gw-stack")
        return self._panels[path]

    async def _generate(self) -> None:
        self._stop()
        asked = self._asked()
        prompt, chosen = asked.prompt, asked.models
        if not prompt or not chosen:
            ui.notify("Write a prompt, and choose a model." if not prompt else "Choose a model.", type="warning")
            return
        if not (asked.chat and self._chats and self._panels.keys() == {*chosen}):
            self._begin_anew()
            self._answers.clear()
        places: list[tuple[str, Element]] = []
        for path in chosen:
            if asked.chat:
                self._chats.setdefault(path, []).append({"role": "user", "content": prompt})
            with self._panel_of(path):
                if asked.chat:
                    with ui.element("div").classes("gw-turn"):
                        plain(prompt, "text", tag="div")
                place = ui.element("div").classes("text gw-answer waits").props("aria-live=polite")
                if asked.chat:
                    place.classes("gw-turn answer")
                places.append((path, place))
        self._anew.set_visibility(asked.chat)
        if asked.chat:
            self._prompt.value = ""
        self._code.clear()
        with self._code:
            sdk_line(code_of(asked, self._base, self._chats))
        tasks = self._tasks = [asyncio.create_task(self._answer(path, place, asked)) for path, place in places]
        texts = await asyncio.gather(*tasks, return_exceptions=True)
        for _, place in places:
            if not place.is_deleted:
                place.classes(remove="waits")
        if tasks is not self._tasks:
            return
        answers = {path: text for path, text in zip(chosen, texts) if isinstance(text, str) and text}
        for path, chat in self._chats.items():
            if path in answers:
                chat.append({"role": "assistant", "content": answers[path]})
            elif chat and chat[-1]["role"] == "user":
                chat.pop()  # it is asked again
        if self._feedback and answers:
            with self._code:
                ui.link("Rate these answers", offer_url(self._feedback.url, prompt, answers), new_tab=True).classes(
                    "gw-link"
                )

    async def _answer(self, path: str, place: Element, asked: _Asked) -> str:
        """Show an answer as it comes; return its text, "" where it did not end."""
        text = ""
        try:
            prompt: str | list[int] = asked.prompt
            if asked.chat:
                rendered = await self._workspace.service.render(
                    self._chats[path], train_on=None, add_generation_prompt=True, model=self._base.get(path, "")
                )
                prompt = list(rendered["input_ids"])
            stream = self._workspace.service.sampling_client(path).stream(
                prompt, max_tokens=asked.tokens, temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed
            )
            async with contextlib.aclosing(stream) as tokens:
                async for token in tokens:
                    if place.is_deleted:
                        return ""
                    _show_token(place, token)
                    text += token.text
            if not text and not place.is_deleted:
                with place:
                    plain("It ended at once, without a word.", "quiet")
        except FAILURES as failure:
            with place:
                error(str(failure))
            return ""
        finally:
            if not place.is_deleted:
                place.classes(remove="waits")
        return text


def _number(label: str, value: float, **bounds: float) -> ui.number:
    return ui.number(label, value=value, **bounds).props("outlined dense").style("width: 7rem")  # type: ignore[arg-type]


def _show_token(place: Element, token: gradwire.SampledToken) -> None:
    probability = math.exp(min(token.logprob, 0.0))
    with place:
        shown = plain(token.text, tag="span").style(next(style for least, style in SHADES if probability >= least))
        shown.props["title"] = f"probability {probability:.3f}, log-probability {token.logprob:.3f}"
