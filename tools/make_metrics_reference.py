"""Write the table of metrics into docs/operations.md: ``python tools/make_metrics_reference.py``."""

from __future__ import annotations

from pathlib import Path

from gradwire_server.observability.metrics import CATALOGUE

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
BEGIN, END = "<!-- metrics: made by tools/make_metrics_reference.py -->", "<!-- end of metrics -->"


def table() -> str:
    """Return the table in Markdown."""
    rows = ["| metric | type | labels | description |", "| --- | --- | --- | --- |"]
    for spec in CATALOGUE:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        rows.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.help} |")
    return "\n".join(rows)


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}")
