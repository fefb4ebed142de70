"""What the documents point at exists: files, headings, commands, modules, targets of make."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from app.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("actors", "app", "configs", "kernels", "notebooks", "tests")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.md"))]
)
MODULES = [p.relative_to(ROOT).as_posix() for room in ROOMS for p in (ROOT / room).rglob("*.py")]
MOST_LINES = 200
PLACEHOLDER = ".NAME"  # stands for any module of a room
LONG = (
    "app/simulate/results/",
    "configs/models/demo/",
    "configs/README.md",
)  # tables, a model card

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)

every_document = pytest.mark.parametrize(
    "document", [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in DOCUMENTS]
)


def anchors(document: Path) -> set[str]:
    """The headings as GitHub names them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", document.read_text())):
        text = LINK.sub(lambda link: link[0][link[0].index("[") + 1 : link[0].index("]")], heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = sum(
            name == slug or re.fullmatch(f"{slug}-\\d+", name) is not None for name in found
        )
        found.add(f"{slug}-{count}" if count else slug)
    return found


def code(document: Path) -> Iterator[str]:
    """Inline code, and the command lines of fenced blocks."""
    text = document.read_text()
    for language, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if language != "console":
                yield line.strip()
            elif line.startswith("$ "):  # the rest is what a command printed
                yield line[2:]
    yield from CODE_SPAN.findall(FENCE.sub("", text))


def calls(document: Path, name: str) -> Iterator[list[str]]:
    """The arguments of each call of program `name`, up to a comment, a pipe or an operator."""
    for line in code(document):
        words = shlex.split(line, comments=True) if line.count("'") % 2 == 0 else line.split()
        for at, word in enumerate(words):
            shell = all("=" in before or before in ("$", "&&") for before in words[:at])
            if word == name and shell:
                end = next((k for k, w in enumerate(words) if k > at and w in "|&&;>"), len(words))
                yield words[at + 1 : end]
                break


def complaint(arguments: list[str]) -> str | None:
    """Why `legato <arguments>` cannot be called, as far as names go."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    for word in arguments:
        if not isinstance(command, TyperGroup) or word[0] in "-<":  # an option, or any command
            break
        found = command.get_command(context, word)
        if found is None:
            return f"no command {word!r}"
        command = found
    known = {"--help", *(name for p in command.params for name in (*p.opts, *p.secondary_opts))}
    options = [word.split("=")[0] for word in arguments if word.startswith("--")]
    unknown = [name for name in options if name not in known]
    return f"no option {unknown[0]}" if unknown else None


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    text = CODE_SPAN.sub("", FENCE.sub("", document.read_text()))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@every_document
def test_named_modules_exist(document: Path) -> None:
    """A module in backticks is the end of some module's path."""
    named = set(re.findall(r"`([\w/]+\.py)`", FENCE.sub("", document.read_text())))
    lost = [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in MODULES)]
    assert not lost, f"no module {', '.join(lost)}"


def stands(dotted: str) -> bool:
    """Whether `room.module.name` is a module of ours, or a name that it holds."""
    place, *names = dotted.split(".")
    path = ROOT / place
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    if names and (path / f"{names[0]}.py").exists():
        path /= f"{names.pop(0)}.py"
    else:
        path /= "__init__.py"
    return not names or re.search(rf"\b{names[0]}\b", path.read_text()) is not None


@every_document
def test_dotted_names_exist(document: Path) -> None:
    text = "\n".join(code(document))
    named = re.findall(r"(?<![\w.])(?:app|actors|kernels|tests)(?:\.\w+)+", text)
    lost = [
        dotted
        for dotted in named
        if not dotted.endswith((".py", PLACEHOLDER)) and not stands(dotted)
    ]
    assert not lost, ", ".join(lost)


@every_document
def test_commands_exist(document: Path) -> None:
    for arguments in calls(document, "legato"):
        wrong = complaint(arguments)
        assert wrong is None, f"legato {' '.join(arguments)}: {wrong}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for arguments in calls(document, "make"):
        assert set(arguments) <= targets, f"make {' '.join(arguments)}"
    for arguments in calls(document, "python"):
        if arguments[:1] == ["-m"] and arguments[1].split(".")[0] in ROOMS:
            if arguments[1].endswith(PLACEHOLDER):
                continue
            assert find_spec(arguments[1]) is not None, f"python -m {arguments[1]}"


@every_document
def test_a_document_is_read_in_one_sitting(document: Path) -> None:
    if document.relative_to(ROOT).as_posix().startswith(LONG):
        pytest.skip("tables of results, a model card, the reference of settings")
    assert len(document.read_text().splitlines()) <= MOST_LINES


def test_the_checks_notice_what_is_wrong(tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text("# A b: `c`\n\n# A b: `c`\n\n`X=1 legato bench nothing` [here](none.md)\n")
    assert anchors(document) == {"a-b-c", "a-b-c-1"}
    assert [complaint(call) for call in calls(document, "legato")] == ["no command 'nothing'"]
    assert complaint(["bench", "overhead", "--streams", "8"]) is None
    assert stands("actors.scheduling.core.Core.handle")
    assert not stands("actors.scheduling.kernel.Core")
    assert not stands("actors.scheduling.core.Kernel")
    assert complaint(["bench", "overhead", "--stream", "8"]) == "no option --stream"
    with pytest.raises(AssertionError, match=r"none\.md"):
        test_links_lead_somewhere(document)


def test_the_family_of_contributing_is_the_code() -> None:
    """Without its docstring."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (shown,) = (block for _, block in FENCE.findall(text) if block.startswith("def granite("))
    module = ast.parse((ROOT / "actors/stage/models/families_llama.py").read_text())
    (function,) = (node for node in module.body if getattr(node, "name", "") == "granite")
    assert isinstance(function, ast.FunctionDef)
    del function.body[0]
    assert ast.dump(ast.parse(shown).body[0]) == ast.dump(function)
