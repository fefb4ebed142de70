"""Execute the notebooks and keep their outputs, so that a page on the web shows the pictures.

python notebooks/render.py [NAME ...]      all of them, or those named
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).resolve().parent
MAX_BYTES = 400_000  # of one notebook, outputs included
TIMEOUT_S = 240


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; raises CellExecutionError where a cell fails.

    Only what a reader needs is kept: no log lines (stderr), no times of execution, no name of the
    machine's kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": FOLDER}},
    )
    # A cluster of the caller's is not the notebook's.
    client.execute(env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")})
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def main(names: list[str]) -> int:
    paths = [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        text = nbformat.writes(execute(path))
        if len(text.encode()) > MAX_BYTES:
            print(f"{path.name}: {len(text.encode())} bytes, more than {MAX_BYTES}")
            return 1
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
        print(f"{path.name}: {len(text.encode()) // 1000} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
