"""The notebook trains across cells, in a real kernel, plots while it trains, and warns of nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.long


class Watched(NotebookClient):
    """Counts the messages that change a plot which is shown already."""

    updates = 0

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        self.updates += msg["msg_type"] == "update_display_data" and "image/png" in msg["content"]["data"]
        return super().process_message(msg, cell, cell_index)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_trains_across_cells(root: Path) -> None:
    notebook = nbformat.read(root / "examples" / "train_across_cells.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import warnings\n\nwarnings.simplefilter('error')"))
    client = Watched(notebook, timeout=500, resources={"metadata": {"path": str(root / "examples")}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = {name: [each["text"] for each in outputs if each.get("name") == name] for name in ("stdout", "stderr")}
    assert any("causal_lm" in text for text in printed["stdout"])
    assert any("->" in text for text in printed["stdout"])
    assert not printed["stderr"]
    pictures = [output for output in outputs if "image/png" in output.get("data", ())]
    assert len(pictures) == 2  # the curve that is updated, and the history
    assert client.updates == 20  # one a step
