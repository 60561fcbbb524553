"""Rows drawn at random, of the formats in which people have data, with the oddities of such data, and what they mean.

A comparison with another loader takes :func:`draw` and writes ``rows`` to a file with :func:`write`.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Messages = list[dict[str, Any]]
KINDS = {
    "messages": "conversations", "sharegpt": "conversations", "prompt_completion": "conversations",
    "texts": "conversations", "alpaca": "conversations", "chosen_rejected": "preferences",
    "whole_pairs": "preferences", "openai_pairs": "preferences", "rated": "ratings", "rated_messages": "ratings",
    "prompts": "prompts",
}  # fmt: skip
"""Format -> kind of its rows."""
ODDITIES = (
    "nothing", "json_text", "nulls", "extra_column", "system_column", "repeated_prompt", "parts", "long", "nan",
    "number", "object", "empty", "half_character", "python_text", "bad_label",
)  # fmt: skip
REFUSED = ("number", "object", "empty", "half_character", "python_text", "bad_label")
"""Oddities with which nothing should be learned of a row."""
CITIES = ("Bern", "Zürich", "Genève", "東京", "😀 city")
PROPERTIES = {"city": {"type": "string"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}}


@dataclass(frozen=True)
class Drawn:
    """A row.

    Attributes:
        format: One of :data:`KINDS`.
        oddity: One of :data:`ODDITIES`.
        row: The row.
        context: The messages before what is learned.
        answers: What is learned: an answer, or that chosen and that rejected; messages each. None where the row is to
            be refused.
        tools: Schemas.
    """

    format: str
    oddity: str
    row: Row
    context: Messages
    answers: list[Messages] | None
    tools: tuple[Any, ...] = ()

    @property
    def kind(self) -> str:
        return KINDS[self.format]


def draw(format: str, oddity: str, seed: int = 0) -> Drawn | None:
    """Draw a row; None where the format cannot have the oddity."""
    rng = random.Random(f"{format} {oddity} {seed}")
    plain = format in ("texts", "alpaca")
    context = [_said("user", rng)]
    if not plain and rng.random() < 0.5:
        context += [_said("assistant", rng), _said("user", rng)]
    has_system = oddity == "system_column" or (not plain and rng.random() < 0.5)
    system = [_said("system", rng)] if has_system else []
    answer: Messages = [_said("assistant", rng)]
    tools: tuple[Any, ...] = ()
    if not plain and KINDS[format] != "prompts" and rng.random() < 0.4:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": rng.choice(CITIES)}}}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        context, tools = [*context, called, {"role": "tool", "content": "3 °C"}], (TOOL,)
    if not plain and format != "sharegpt" and KINDS[format] != "prompts" and rng.random() < 0.3:
        answer = [answer[0] | {"reasoning_content": "because"}]
    if oddity == "long":
        answer = [answer[0] | {"content": "long " * 40_000}]
    worse = [{"role": "assistant", "content": f"not {answer[0]['content']}"}]
    if oddity in SPOILED:
        answer = [{"role": "assistant", "content": SPOILED[oddity]}]
    row = WRITTEN[format]([*([] if oddity == "system_column" else system), *context], answer, worse)
    if tools:
        row["tools"] = [each["function"] for each in tools] if format == "sharegpt" else list(tools)
    if oddity == "system_column":
        row["system"] = system[0]["content"]
    changed = CHANGES[oddity](row) if oddity in CHANGES else row
    if changed is None:
        return None
    learned = [answer, worse] if KINDS[format] == "preferences" else [] if KINDS[format] == "prompts" else [answer]
    refused = oddity in REFUSED and (KINDS[format] != "prompts" or oddity == "python_text")
    return Drawn(format, oddity, changed, [*system, *context], None if refused else learned, tools)


def write(rows: list[Row], path: Path) -> None:
    """Write rows as the file's name says: ``.jsonl``, ``.json``, ``.csv`` (lists as JSON) or ``.parquet``."""
    if path.suffix == ".csv":
        names = list(dict.fromkeys(name for row in rows for name in row))
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                cells = {
                    name: json.dumps(each) if isinstance(each, dict | list) else each for name, each in row.items()
                }
                writer.writerow({name: "" if each != each else each for name, each in cells.items()})
    elif path.suffix == ".parquet":
        import_module("pyarrow.parquet").write_table(import_module("pyarrow").Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))


def _said(role: str, rng: random.Random) -> dict[str, Any]:
    return {"role": role, "content": f"{role} says {rng.choice(CITIES)} {rng.randrange(10**6)}"}


def _sharegpt(messages: Messages) -> Messages:
    roles = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    turned = []
    for message in messages:
        if calls := message.get("tool_calls"):
            turned.append({"from": "function_call", "value": json.dumps(calls[0]["function"])})
        else:
            turned.append({"from": roles[message["role"]], "value": message["content"]})
    return turned


WRITTEN: Mapping[str, Callable[[Messages, Messages, Messages], Row]] = {
    "messages": lambda context, answer, worse: {"messages": [*context, *answer]},
    "sharegpt": lambda context, answer, worse: {"conversations": _sharegpt([*context, *answer])},
    "prompt_completion": lambda context, answer, worse: {"prompt": context, "completion": answer},
    "texts": lambda context, answer, worse: {"prompt": context[-1]["content"], "completion": answer[0]["content"]},
    "alpaca": lambda context, answer, worse: {
        "instruction": context[-1]["content"], "input": "", "output": answer[0]["content"]
    },
    "chosen_rejected": lambda context, answer, worse: {"prompt": context, "chosen": answer, "rejected": worse},
    "whole_pairs": lambda context, answer, worse: {"chosen": [*context, *answer], "rejected": [*context, *worse]},
    "openai_pairs": lambda context, answer, worse: {
        "input": {"messages": context}, "preferred_output": answer, "non_preferred_output": worse
    },
    "rated": lambda context, answer, worse: {"prompt": context, "completion": answer, "label": True},
    "rated_messages": lambda context, answer, worse: {"messages": [*context, *answer], "label": 1},
    "prompts": lambda context, answer, worse: {"prompt": context, "answer": "4"},
}  # fmt: skip
SPOILED: Mapping[str, Any] = {"number": 42, "object": {"a": 1}, "empty": "", "half_character": "hi \ud83d"}


def _lists(row: Row, change: Callable[[Any], Any]) -> Row | None:
    """The row with its lists of messages changed; None if it has none."""
    names = [name for name, value in row.items() if isinstance(value, list) and name != "tools"]
    return {**row, **{name: change(row[name]) for name in names}} if names else None


def _with_nulls(messages: Messages) -> Messages:
    return [{**each, "tool_call_id": None, "name": None, "weight": None} for each in messages]


def _in_parts(messages: Messages) -> Messages:
    """Each text in two parts, where it is one."""
    cut = []
    for each in messages:
        text = each.get("content")
        parts = [{"type": "text", "text": part} for part in (text[:3], text[3:])] if text else text
        cut.append(each if "from" in each else each | {"content": parts})
    return cut


def _repeated(row: Row) -> Row | None:
    """Answers that begin with their prompt, as whole conversations do."""
    if not isinstance(row.get("prompt"), list) or "answer" in row:
        return None
    names = [name for name in ("completion", "chosen", "rejected") if name in row]
    return {**row, **{name: [*row["prompt"], *row[name]] for name in names}}


CHANGES: Mapping[str, Callable[[Row], Row | None]] = {
    "json_text": lambda row: _lists(row, json.dumps),
    "python_text": lambda row: _lists(row, str),
    "nulls": lambda row: _lists(row, _with_nulls),
    "parts": lambda row: _lists(row, _in_parts),
    "extra_column": lambda row: row | {"id": 7, "source": "a book"},
    "repeated_prompt": _repeated,
    "nan": lambda row: row | {"weight": float("nan"), "margin": float("nan")},
    "bad_label": lambda row: row | {"label": 0} if {"messages", "completion", "output"} & set(row) else None,
}
