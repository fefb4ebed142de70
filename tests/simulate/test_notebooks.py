"""Every notebook runs from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebook_runs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": FOLDER}}
    ).execute()
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), (
        "commit notebooks without outputs"
    )
