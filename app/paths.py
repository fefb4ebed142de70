"""The installation or checkout that runs: its version, and the files that come with it."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

# `configs` is beside the package `app`, in a checkout and in site-packages.
PACKAGES = Path(__file__).resolve().parents[1]
CONFIGS = PACKAGES / "configs"

DEMO_CONFIG = Path("configs/serve/demo.yaml")  # of commands that are given no other; see `locate`


def version() -> str:
    """The installed package's version; "0" in a folder that is run without being installed."""
    try:
        return metadata.version("legato-serve")
    except metadata.PackageNotFoundError:
        return "0"


def own_command(module: str, *arguments: str) -> list[str]:
    """Runs one of our modules in a process with `own_environment`, whatever is in the working
    folder: a user's own package may be named `app` too."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment() -> dict[str, str]:
    """This process's, with which a child imports from where this process does."""
    search = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    return {**os.environ, "PYTHONPATH": search}


def locate(path: str | Path) -> Path:
    """The file or folder that a user or a config names.

    As given, relative to the working folder and with `~` for the home folder, if it exists there;
    else a path that begins with `configs/` is looked up below the installation. A path that is in
    neither place comes back as given, for the caller to refuse by its name.
    """
    given = Path(path).expanduser()
    if given.exists() or given.is_absolute() or given.parts[:1] != (CONFIGS.name,):
        return given
    shipped = CONFIGS.parent / given
    return shipped if shipped.exists() else given
