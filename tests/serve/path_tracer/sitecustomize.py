"""Notes which of Legato's functions run, in every process of a server, while a file says so.

Python imports a module of this name at start: with this folder on PYTHONPATH the product needs no
hook of its own. In the folder `$LEGATO_TRACE`:

    <pid>.known   a process that obeys, written when it starts
    on            while it is there, processes take notes
    <pid>.on      this process has begun to
    <pid>.json    and has ended: rows of [file, function, the functions of ours that called it]
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FLOORS = tuple(f"{ROOT}/{floor}/" for floor in ("app", "actors", "kernels"))

seen: set[tuple[str, str, tuple[str, ...]]] = set()
is_on = False


def note(frame: FrameType, event: str, argument: object) -> None:
    if event != "call" or not is_on or not frame.f_code.co_filename.startswith(FLOORS):
        return
    callers, outer = list[str](), frame.f_back
    while outer is not None:
        if outer.f_code.co_filename.startswith(FLOORS):
            callers.append(outer.f_code.co_qualname)
        outer = outer.f_back
    file = frame.f_code.co_filename[len(str(ROOT)) + 1 :]
    seen.add((file, frame.f_code.co_qualname, tuple(callers)))


def watch(folder: Path) -> None:
    global is_on
    mine = folder / str(os.getpid())
    while True:
        if (folder / "on").exists() != is_on:
            is_on = not is_on
            if is_on:
                mine.with_suffix(".on").touch()
            else:
                part = mine.with_suffix(".part")
                part.write_text(json.dumps(list(seen)))
                part.rename(mine.with_suffix(".json"))
                seen.clear()
        time.sleep(0.005)


import_module = builtins.__import__


def import_unwatched(*arguments: Any, **more: Any) -> Any:
    """Nearly all calls of a start are in imports, and each of them costs one of `note`."""
    if is_on or sys.getprofile() is not note:
        return import_module(*arguments, **more)
    sys.setprofile(None)
    try:
        return import_module(*arguments, **more)
    finally:
        sys.setprofile(note)


class ProfileStages(importlib.abc.MetaPathFinder):
    """Threads that Ray's C++ makes have no profile of their own: set it where a stage waits."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "actors.transport.wire":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            receive = module.Mailbox.receive

            def profiled_receive(self: Any) -> bytes:
                sys.setprofile(note)
                return bytes(receive(self))

            module.Mailbox.receive = profiled_receive

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "LEGATO_TRACE" in os.environ:
    sys.meta_path.insert(0, ProfileStages())
    builtins.__import__ = import_unwatched
    threading.setprofile(note)
    sys.setprofile(note)
    trace = Path(os.environ["LEGATO_TRACE"])
    (trace / f"{os.getpid()}.known").touch()
    threading.Thread(target=watch, args=(trace,), daemon=True).start()
