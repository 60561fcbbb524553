"""What the processes load: pages stay out of the client and the front, torch and the server out of the pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGES = "import gradwire_console.application, gradwire_feedback.running"


@pytest.mark.long
@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("import gradwire, gradwire.cli.app", {"nicegui", "fastapi", "gradwire_shell", "gradwire_server"}),
        (
            "import gradwire_server.server, gradwire_server.cli.serve",
            {"nicegui", "gradwire_shell", "gradwire", "torch"},
        ),
        (PAGES, {"torch", "transformers", "gradwire_server", "gradwire_losses"}),
        ("import gradwire_shell.frame, gradwire_shell.serving", {"gradwire", "gradwire_console", "gradwire_feedback"}),
    ],
)
def test_a_process_loads_what_is_its_own(imported: str, absent: set[str]) -> None:
    code = f"import sys; {imported}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not absent & set(loaded)
