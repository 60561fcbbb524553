"""View recorded trajectories in the terminal, or as one self-contained HTML page.

``gradwire trajectories view FILE`` or ``python -m gradwire.rl.viewer FILE``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import jinja2
import typer
from rich.console import Console
from rich.text import Text

from gradwire.loop.loggers import read_jsonl

Record = Mapping[str, Any]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
    console = Console(file=out, highlight=False)
    if html_path is not None:
        Path(html_path).write_text(page(records, str(path)), encoding="utf-8")
    for record in records[-limit:] if limit else records:
        _show(record, console)
    print(f"{len(records)} trajectories, {min(limit or len(records), len(records))} shown", file=out)
    if html_path is not None:
        print(f"page: {html_path}", file=out)


def _records(path: Path | str) -> list[dict[str, Any]]:
    records = read_jsonl(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or "steps" not in record:
            raise ValueError(f"{path}, line {number} is not a trajectory: give a file that a TrajectoryRecorder wrote")
    return records


def _show(record: Record, console: Console) -> None:
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
    environment = jinja2.Environment(loader=jinja2.PackageLoader("gradwire.rl", ""), autoescape=True)
    environment.globals |= {"colour": colour, "which": _which, "verdict": _verdict, "numbers": _numbers, "tool": _tool}
    return environment.get_template("viewer.html.jinja").render(records=records, title=title)


@app.command()
def main(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file of a TrajectoryRecorder.")],
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page to this file.")] = None,
    limit: Annotated[int, typer.Option(help="Number of newest trajectories to show; 0: all.")] = 20,
    iteration: Annotated[int | None, typer.Option(help="Only trajectories of this iteration.")] = None,
) -> None:
    """Show a file of recorded trajectories."""
    try:
        view(file, html_path=html, limit=limit, iteration=iteration)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    app()
