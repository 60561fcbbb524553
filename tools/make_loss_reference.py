"""Writes docs/losses.md from the registry: ``python tools/make_loss_reference.py [FILE]``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gradwire_losses.registry import FieldSpec, LossSpec, all_losses, load_builtin_losses

TARGET = Path(__file__).parents[1] / "docs" / "losses.md"
HEADER = """# Losses

<!-- Made by tools/make_loss_reference.py from what the losses declare. Do not edit: `make docs`. -->

What `loss_fn` accepts, with the batch fields, the arguments (`loss_kwargs`) and the metrics of each loss. A running
server says the same, its own additions included: `await service.list_losses()`.

Fields hold one entry a row (`[rows]`) or one a token (`[rows, tokens]`), as padded arrays with a mask or as ragged
lists. Everything a token is aligned with the token itself: entry t belongs to token t, and the first token of a
sequence is never scored. A per-token field may also hold one entry a *scored* token. Log-probabilities are in nats.
A batch with `target_tokens` is in Tinker's convention instead: nothing is shifted, and entry t of every field is about
the prediction made after reading `input_ids[..t]`.

Every loss of tokens takes `reduction`, which says what its sum is divided by, over the whole accumulation however it is
cut into calls: `"token_mean"`, the tokens; `"sequence_mean"`, the sequences, of the mean over each one's tokens;
`"sequence_mean_token_sum"`, the sequences, of the sum over each one's tokens; `"fixed"`, that and `reduction_divisor`;
`"sum"`, nothing. What is not scored counts nowhere.

{differences}
## The losses

| loss | in short | batch | head |
| --- | --- | --- | --- |
"""


def reference() -> str:
    """The page, for the losses of this package."""
    load_builtin_losses()
    losses = [spec for spec in all_losses() if spec.function.__module__.startswith("gradwire_losses.")]
    index = "".join(
        f"| [`{s.name}`](#{s.name}) | {_cell(s.summary)} | {s.layout} | {s.head or '–'} |\n" for s in losses
    )
    differences = (Path(__file__).parent / "loss_differences.md").read_text()
    return HEADER.replace("{differences}", differences) + index + "\n" + "\n".join(map(_section, losses))


def _section(spec: LossSpec) -> str:
    properties = spec.config.model_json_schema().get("properties", {})
    parts = [f"## {spec.name}\n", spec.summary + "\n"]
    if spec.head:
        parts.append(f'The run needs a {spec.head} head: `create_run(..., head="{spec.head}")`.\n')
    parts.append(f"```text\n{spec.formula}\n```\n")
    parts.append(_table(("batch field", "type", "", "what it is"), [_field_row(field) for field in spec.fields]))
    if properties:
        rows = [(f"`{name}`", *_argument(schema)) for name, schema in properties.items()]
        parts.append(_table(("argument", "values", "default", "what it does"), rows))
    parts.append(_table(("metric", "what it is"), [(f"`{name}`", text) for name, text in spec.metrics.items()]))
    parts.append(f"Source: {spec.reference}.\n")
    return "\n".join(parts)


def _field_row(field: FieldSpec) -> tuple[str, str, str, str]:
    notes = [field.description]
    if field.padding_mask:
        notes.append(f"`{field.padding_mask}` says what is padding.")
    shapes = " or ".join(field.shapes)
    return f"`{field.name}`", f"{field.dtype} {shapes}", "required" if field.required else "", " ".join(notes)


def _argument(schema: dict[str, Any]) -> tuple[str, str, str]:
    options = schema.get("anyOf", [schema])
    values = " or ".join(_values(option) for option in options)
    default = json.dumps(schema["default"]) if "default" in schema else "required"
    return (
        values,
        f"`{default.replace('null', 'None').replace('true', 'True').replace('false', 'False')}`",
        (schema.get("description", "")),
    )


def _values(option: dict[str, Any]) -> str:
    if "enum" in option:
        return ", ".join(f"`{json.dumps(value)}`" for value in option["enum"])
    if "const" in option:
        return f"`{json.dumps(option['const'])}`"
    names = {"number": "float", "integer": "int", "boolean": "bool", "string": "str", "null": "None"}
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {option[key]:g}" for key, sign in signs.items() if key in option]
    return " ".join([names.get(option.get("type", ""), option.get("type", "")), ", ".join(bounds)]).strip()


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "".join("| " + " | ".join(map(_cell, line)) + " |\n" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(reference())
    print(target)
