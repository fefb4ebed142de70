"""Inside the simulator imports point one way: command, studies, tables, paper, run, hardware."""

from __future__ import annotations

import ast
from pathlib import Path

import app.simulate

ROOM = Path(app.simulate.__file__).parent
HEIGHT = {"workload": 0, "hardware": 0, "run": 1, "paper": 2, "options": 2, "way_options": 3}
HEIGHT |= {"tables": 3, "effects": 4, "studies": 4, "command": 5, "what_if": 5}


def test_rooms_import_from_below_only() -> None:
    wrong = []
    for path in sorted(ROOM.rglob("*.py")):
        room = path.relative_to(ROOM).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "app.simulate"
            ):
                continue
            rest = (node.module or "").split(".")[2:]
            targets = [rest[0]] if rest else [alias.name for alias in node.names]
            wrong += [
                f"{path.relative_to(ROOM)}:{node.lineno} imports {target}"
                for target in targets
                if target != room and HEIGHT[target] >= HEIGHT[room]
            ]
    assert not wrong, "\n".join(wrong)
