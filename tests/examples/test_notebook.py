"""The notebook trains across cells, in a real kernel."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


@pytest.mark.timeout(600)
def test_the_notebook_trains_across_cells(root: Path) -> None:
    notebook = nbformat.read(root / "examples" / "train_across_cells.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit the notebook without outputs"
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(root / "examples")}})
    client.execute()
    printed = [
        output["text"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    ]
    assert any("causal_lm" in text for text in printed)
    assert any("->" in text for text in printed)
