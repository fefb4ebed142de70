"""Names in `backticks`, in documents, docstrings and comments, occur in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("actors", "app", "configs", "kernels", "notebooks", "tests")
CODE = (".py", ".cpp", ".h", ".js", ".html", ".yaml", ".toml")
NAME = re.compile(r"(?<![\w*])(?:[a-z]+_[a-z0-9_]*[a-z0-9]|(?:[A-Z][a-z]+){2,})(?![\w*])")
COMMENT = re.compile(r"(?m)(?:^ *|  )# .*$")
METRICS = "legato_"  # a prefix that `app.telemetry` adds
ELSEWHERE = {"AutoscalingConfig", "AutoscalingContext"}  # of Ray Serve
ELSEWHERE |= {"KillMode", "TimeoutStopSec"}  # of systemd


def files(*suffixes: str) -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.suffix in suffixes)
    for folder in FOLDERS:
        yield from (p for p in (ROOT / folder).rglob("*") if p.suffix in suffixes)


@cache
def split(path: Path) -> tuple[str, str]:
    """The code of a module, and its docstrings and comments, as ruff's format sets them off."""
    lines, prose = path.read_text().splitlines(), list[str]()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            span = slice(node.lineno - 1, node.end_lineno)
            prose += lines[span]
            lines[span] = [""] * len(lines[span])
    code = "\n".join(lines)
    return COMMENT.sub("", code), "\n".join([*prose, *COMMENT.findall(code)])


@cache
def known() -> set[str]:
    words = {word for path in files(*CODE) for word in re.findall(r"\w+", path.stem)}
    for path in files(*CODE):
        text = split(path)[0] if path.suffix == ".py" else path.read_text()
        words.update(re.findall(r"\w+", text))
    return (
        words | ELSEWHERE | {f"{word[:-2]}_ms" for word in words if word.endswith("_s")}
    )  # in the YAML


@cache
def module_paths() -> list[str]:
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in files(".py")]


def lost(text: str) -> set[str]:
    ours = re.sub(r"(?m)(?<=^## Glossary\n)(.|\n)*", first_column, text)
    spans = [span for span in re.findall(r"`([^`\n]+)`", ours) if "..." not in span]
    names = {name for span in spans for name in NAME.findall(span) if ".py" not in span}
    modules = {span for span in spans if re.fullmatch(r"[\w/]+\.py", span)}
    return {name for name in names if name not in known() and not name.startswith(METRICS)} | {
        module for module in modules if not any(p.endswith(f"/{module}") for p in module_paths())
    }


def first_column(glossary: re.Match[str]) -> str:
    """A glossary without the columns of other projects' names."""
    return re.sub(r"(?m)^(\|[^|]*\|).*$", r"\1", glossary[0])


@pytest.mark.heavy
def test_names_exist() -> None:
    wrong = {path: lost(path.read_text()) for path in files(".md")}
    wrong |= {path: lost(split(path)[1]) for path in files(".py")}
    assert not {str(path): names for path, names in wrong.items() if names}


@pytest.mark.heavy
def test_a_stale_name_is_noticed() -> None:
    stale = {"no_such" + "_name", "NoSuch" + "Name"}
    assert lost(f"`Core.handle`, `num_computed_tokens`, `{'`, `'.join(stale)}`") == stale
