"""View recorded trajectories in the terminal, or as one self-contained HTML page.

``gradwire trajectories view FILE`` or ``python -m gradwire.rl.viewer FILE``.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from gradwire.rl.loggers import read_jsonl

Record = Mapping[str, Any]

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#1b1b1b;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin:1.6rem 0 .4rem}
details{border:1px solid #ddd;border-radius:6px;margin:.4rem 0;padding:.2rem .8rem}
summary{cursor:pointer;padding:.2rem 0;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
summary b{font-variant-numeric:tabular-nums}
.step{border-left:3px solid #ccc;margin:.8rem 0;padding:.1rem .9rem}
.turn{display:grid;grid-template-columns:6.5rem 1fr;align-items:baseline}.turn>span{font-size:.8rem;color:#777}
pre{white-space:pre-wrap;word-break:break-word;background:#f6f6f6;padding:.3rem .5rem;border-radius:4px;margin:.15rem 0}
pre.action{background:#fff;border:1px solid #e4e4e4}.token{border-radius:2px}
.numbers{font-size:.85rem;color:#555}.good{color:#06723a}.bad{color:#b00020}.error{color:#b00020;font-weight:600}
.legend span{padding:0 .5rem}
"""
LEGEND = (-0.05, -0.7, -1.5, -3.0, -6.0)


def colour(logprob: float) -> str:
    """Return a token's colour: white for a certain token, red for an unlikely one."""
    share = min(1.0, max(0.0, -logprob / 6.0))
    return f"rgb(255,{255 - int(150 * share)},{255 - int(170 * share)})"


def terminal_colour(logprob: float) -> str:
    return "green" if logprob > -0.3 else "yellow" if logprob > -1.5 else "red"


def view(
    path: Path | str,
    *,
    html_path: Path | str | None = None,
    limit: int = 20,
    iteration: int | None = None,
    out: TextIO | None = None,
) -> None:
    """Show a file of recorded trajectories.

    Args:
        path: A file written by :class:`~gradwire.rl.recording.TrajectoryRecorder`.
        html_path: Also write an HTML page to this path.
        limit: Number of newest trajectories in the terminal; the page has all.
        iteration: Only the trajectories of this iteration.
        out: Output stream; the terminal by default.

    Raises:
        ValueError: The file holds something else.
    """
    records = [each for each in _records(path) if iteration is None or each["iteration"] == iteration]
    stream = out or sys.stdout
    if html_path is not None:
        Path(html_path).write_text(page(records, str(path)), encoding="utf-8")
    for record in records[-limit:] if limit else records:
        _show(record, stream)
    print(f"{len(records)} trajectories, {min(limit or len(records), len(records))} shown", file=stream)
    if html_path is not None:
        print(f"page: {html_path}", file=stream)


def _records(path: Path | str) -> list[dict[str, Any]]:
    records = read_jsonl(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or "steps" not in record:
            raise ValueError(f"{path}, line {number} is not a trajectory: give a file that a TrajectoryRecorder wrote")
    return records


def _show(record: Record, stream: TextIO) -> None:
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        _show_plain(record, stream)
        return
    console = Console(file=stream, highlight=False)
    console.rule(Text(f"iteration {record['iteration']}  {_which(record)}  {_verdict(record)}"))
    if record.get("error"):
        console.print(Text(record["error"], style="bold red"))
    for step in record["steps"]:
        console.print(Text(f"step {step['index']}  {_numbers(step)}", style="bold"))
        console.print(Text(f"< {step['observation']}", style="cyan"))
        action = Text("> ")
        for text, logprob in step.get("tokens") or [[step["action"], 0.0]]:
            action.append(text, style=terminal_colour(logprob))
        console.print(action)
        for result in step.get("tool_results", ()):
            console.print(Text(_tool(result), style="magenta"))


def _show_plain(record: Record, stream: TextIO) -> None:
    print(f"--- iteration {record['iteration']}  {_which(record)}  {_verdict(record)}", file=stream)
    if record.get("error"):
        print(f"error: {record['error']}", file=stream)
    for step in record["steps"]:
        print(f"step {step['index']}  {_numbers(step)}\n  < {step['observation']}\n  > {step['action']}", file=stream)
        for result in step.get("tool_results", ()):
            print(f"  {_tool(result)}", file=stream)


def _which(record: Record) -> str:
    task = " ".join(str(record.get("task", "")).split())
    return f"group {record['group']}.{record['member']}  {task if len(task) <= 60 else task[:59] + '…'}"


def _verdict(record: Record) -> str:
    reason = f"  ({record['reason']})" if record.get("reason") else ""
    return f"reward {record['reward']:.3g}  {record['status']}{reason}"


def _numbers(step: Record) -> str:
    value = "" if step.get("value") is None else f"  value {step['value']:.3g}"
    metrics = "".join(f"  {name} {number:.3g}" for name, number in step.get("metrics", {}).items())
    return f"reward {step['reward']:.3g}  advantage {step['advantage']:+.3g}{value}{metrics}"


def _tool(result: Record) -> str:
    got = f"error: {result['error']}" if result.get("error") else result["content"]
    return f"{result['name']}({json.dumps(result['arguments'])}) -> {got}"


def page(records: Sequence[Record], title: str) -> str:
    """Render the trajectories as one self-contained page."""
    legend = "".join(f'<span style="background:{colour(each)}">{each:g}</span>' for each in LEGEND)
    iterations: dict[int, list[Record]] = {}
    for record in records:
        iterations.setdefault(record["iteration"], []).append(record)
    body = "".join(
        f"<h2>iteration {iteration}</h2>{''.join(map(_trajectory, members))}"
        for iteration, members in iterations.items()
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{len(records)} trajectories of {html.escape(title)}</h1>"
        f"<p class=legend>log-probability of a token: {legend}</p>{body}</html>"
    )


def _trajectory(record: Record) -> str:
    tone = "good" if record["reward"] > 0 else "bad"
    error = f"<p class=error>{html.escape(record['error'])}</p>" if record.get("error") else ""
    facts = [f"ground truth {record['ground_truth']}"] if record.get("ground_truth") is not None else []
    facts += [f"{name} {value:.3g}" for name, value in record.get("metrics", {}).items()]
    return (
        f"<details><summary>{html.escape(_which(record))}: <b class={tone}>{html.escape(_verdict(record))}</b>, "
        f"{len(record['steps'])} steps</summary>"
        f"{error}<p class=numbers>{html.escape(', '.join(facts))}</p>"
        f"{''.join(map(_html_step, record['steps']))}</details>"
    )


def _html_step(step: Record) -> str:
    tokens = "".join(
        f'<span class=token style="background:{colour(logprob)}" title="{logprob:.3f}">{html.escape(text)}</span>'
        for text, logprob in step.get("tokens") or [[step["action"], 0.0]]
    )
    tone = "good" if step["advantage"] > 0 else "bad" if step["advantage"] < 0 else ""
    tools = "".join(_turn("tool", f"<pre>{html.escape(_tool(each))}</pre>") for each in step.get("tool_results", ()))
    observation = _turn("observation", f"<pre>{html.escape(step['observation'])}</pre>")
    action = _turn("action", f"<pre class=action>{tokens}</pre>")
    return (
        f"<div class=step><span class='numbers {tone}'>step {step['index']}: {html.escape(_numbers(step))}</span>"
        f"{observation}{action}{tools}</div>"
    )


def _turn(who: str, content: str) -> str:
    return f"<div class=turn><span>{who}</span>{content}</div>"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``gradwire trajectories view``."""
    parser = argparse.ArgumentParser(prog="gradwire trajectories view", description=view.__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("file", type=Path)
    parser.add_argument("--html", type=Path, help="write a self-contained page to this file")
    parser.add_argument("--limit", type=int, default=20, help="number of newest trajectories to show; 0: all")
    parser.add_argument("--iteration", type=int, help="only trajectories of this iteration")
    given = parser.parse_args(arguments)
    if not given.file.is_file():
        parser.error(f"there is no file {given.file}")
    try:
        view(given.file, html_path=given.html, limit=given.limit, iteration=given.iteration)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
