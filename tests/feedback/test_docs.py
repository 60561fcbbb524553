"""The commands of docs/feedback.md run as written, in order, against a service that has learned nothing yet."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.feedback import FeedbackService

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[2] / "docs" / "feedback.md"


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page's commands need curl")
def test_the_commands_of_the_page_work(service: FeedbackService, tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 8
    printed = ""
    for block in blocks:
        script = "set -e\n" + block.replace("http://127.0.0.1:8000", service.url).replace("curl ", "curl -sS ")
        ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        printed += ran.stdout
    assert '"version":"v15"' in printed and '"status":"dry_run"' in printed
