"""Write the list of metrics into docs/operations.md: ``python tools/make_metrics_reference.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path

from gradwire_server.observability.metrics import CATALOGUE, Spec

PAGE = Path(__file__).parents[1] / "docs" / "operations.md"
BEGIN, END = "<!-- metrics: made by tools/make_metrics_reference.py -->", "<!-- end of metrics -->"


def item(spec: Spec) -> str:
    """Return the lines of a metric."""
    about = ", ".join([*(["histogram"] if spec.kind == "histogram" else []), *(f"`{label}`" for label in spec.labels)])
    line = f"- `{spec.name}`{f' ({about})' if about else ''}: {spec.help}"
    return textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    listed = "\n".join(map(item, CATALOGUE))
    PAGE.write_text(f"{before}{BEGIN}\n\n{listed}\n\n{END}{rest.split(END)[1]}")
