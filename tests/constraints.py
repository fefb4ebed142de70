"""The versions that the suite has passed with: `make lock` writes those installed into
constraints.txt, for `pip install -c`.

Every package that Legato's own dependencies and extras need, directly or not, is in it, but not
what a torch for CUDA brings along: torch names the versions of these itself.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PATH = ROOT / "constraints.txt"
EXTRAS = ("dev",)  # those that install everywhere
_LEFT_TO_TORCH = ("triton", "nvidia-", "cuda-")  # beginnings of names
_HEAD = """\
# Versions known to work together, on Python 3.11 and 3.12: pip install -c constraints.txt .
# Written by `make lock`.
"""


def needed() -> dict[str, str]:
    """Name -> installed version, without a build's own part, of all that is needed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [*project["dependencies"]]
    for extra in EXTRAS:
        own += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(line), "") for line in own]
    while left:
        requirement, extra = left.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if name.startswith(_LEFT_TO_TORCH) or (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            package = metadata.distribution(name)
            found[name] = Version(package.version).public
            left += [(Requirement(line), wanted) for line in package.requires or ()]
    return found


def locked() -> dict[str, str]:
    """Name -> version, as constraints.txt has them."""
    lines = [line for line in PATH.read_text().splitlines() if not line.startswith("#")]
    pairs = [(name, version) for name, _, version in (line.partition("==") for line in lines)]
    return dict(pairs)


if __name__ == "__main__":
    rows = [f"{name}=={version}\n" for name, version in needed().items()]
    PATH.write_text(_HEAD + "".join(sorted(rows)))
