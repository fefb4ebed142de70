"""The README names every file of the room and of the transport."""

from __future__ import annotations

import re
from pathlib import Path

import actors

ROOM = Path(actors.__file__).parent


def test_the_readme_has_a_row_for_every_file() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOM / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    files = {path.name for path in ROOM.glob("*.py")}
    files |= {f"transport/{path.name}" for path in (ROOM / "transport").glob("*.py")}
    rooms = {f"{path.parent.name}/" for path in ROOM.glob("*/__init__.py")} - {"transport/"}
    assert named == {name for name in files if not name.endswith("__init__.py")} | rooms
