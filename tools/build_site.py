"""Build the documentation site into out/site; warnings, broken links and wrong docstrings are errors: ``make site``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCSTRING_WARNING = "griffe:"
"""Prefix of the warnings about docstrings, which ``--strict`` does not count."""
MERMAID = ROOT / ".venv-site" / "package" / "dist" / "mermaid.min.js"
"""Draws the diagrams; the theme would load it from another host."""
PAGES = {"SECURITY.md": "security.md", "deploy/README.md": "deploy.md"}
"""Pages of the site that the repository keeps outside docs/."""


def build() -> int:
    """Build the site; return the exit status."""
    shutil.copy(MERMAID, ROOT / "docs" / MERMAID.name)  # the generator copies what is in docs/
    for source, page in PAGES.items():
        (ROOT / "docs" / page).write_text((ROOT / source).read_text().replace("](../docs/", "]("))
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    try:
        built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        for page in PAGES.values():
            (ROOT / "docs" / page).unlink()
    print(built.stdout, end="")
    warnings = [line for line in built.stdout.splitlines() if line.startswith(DOCSTRING_WARNING)]
    if warnings:
        print(f"{len(warnings)} warnings about docstrings are errors", file=sys.stderr)
    return built.returncode or int(bool(warnings))


if __name__ == "__main__":
    sys.exit(build())
