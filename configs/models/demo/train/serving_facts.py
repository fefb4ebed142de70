"""What the demo model knows about serving language models, about Legato and about itself.

The facts stand in serving_facts.txt: a line of subjects (or whole questions) parted by " | ", then
one line "= answer" for each answer. Any way of asking may get any of the answers.
"""

from pathlib import Path

Entry = tuple[tuple[str, ...], tuple[str, ...]]


def _read() -> tuple[tuple[Entry, ...], ...]:
    sections: list[list[Entry]] = []
    text = (Path(__file__).parent / "serving_facts.txt").read_text(encoding="utf-8")
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("# "):
            sections.append([])
            continue
        answers = tuple(line.removeprefix("= ") for line in lines[1:])
        sections[-1].append((tuple(lines[0].split(" | ")), answers))
    return tuple(tuple(section) for section in sections)


DEFINITIONS, QUESTIONS = _read()
