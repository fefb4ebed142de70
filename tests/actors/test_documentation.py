"""The README names every file of the rooms it describes itself, and every other room."""

from __future__ import annotations

import re
from pathlib import Path

import actors

ROOM = Path(actors.__file__).parent
LISTED_BY_FILE = ("engine", "executor", "transport")


def test_the_readme_has_a_row_for_every_file() -> None:
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOM / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w./]+)`", row)}
    files = {
        f"{room}/{path.name}"
        for room in LISTED_BY_FILE
        for path in (ROOM / room).glob("*.py")
        if path.name != "__init__.py"
    }
    rooms = {path.parent.name for path in ROOM.glob("*/__init__.py")} - {*LISTED_BY_FILE}
    assert named == files | {f"{room}/" for room in rooms}
