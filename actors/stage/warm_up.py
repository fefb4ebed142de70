"""Imports of a stage ahead of their use, in a standby process."""

from __future__ import annotations

import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

# Below the steps of other processes, which go on meanwhile. Not the lowest: on a machine that is
# always busy the standby would never be ready. A process that is below it already must stay there.
_LOW_PRIORITY = 10
_NEEDED_TO_LOAD = ("actors.stage.runner", "kernels.cpu.backend")
_NEEDED_BY_GRAMMARS = ("xgrammar", "transformers.models.auto.tokenization_auto")


def import_all(with_grammars: bool) -> None:
    """Import what loading and, with_grammars, the first grammar need; returns when done."""
    modules = (*_NEEDED_TO_LOAD, *(_NEEDED_BY_GRAMMARS if with_grammars else ()))
    with ThreadPoolExecutor(1) as pool:  # a priority is a thread's own
        pool.submit(_import, modules).result()


def _import(modules: tuple[str, ...]) -> None:
    thread = threading.get_native_id()
    priority = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, thread))
    os.setpriority(os.PRIO_PROCESS, thread, priority)
    for module in modules:
        importlib.import_module(module)
