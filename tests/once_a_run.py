"""Answers of a reference that take seconds, computed once for all workers of a run."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P, R = ParamSpec("P"), TypeVar("R")


def once_a_run(compute: Callable[P, R]) -> Callable[P, R]:
    """A function of plain arguments to plain data (JSON's), which is kept beside what the run's
    engines measure (tests/conftest.py)."""

    @functools.cache
    def kept(*args: Any, **options: Any) -> Any:
        asked = repr((compute.__module__, compute.__qualname__, args, sorted(options.items())))
        folder = Path(os.environ["LEGATO_CACHE"]) / "references"
        file = folder / hashlib.sha256(asked.encode()).hexdigest()
        if not file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f"{file.name}-{os.getpid()}")
            part.write_text(json.dumps(compute(*args, **options)))
            part.rename(file)
        return json.loads(file.read_text())

    return functools.wraps(compute)(kept)
