"""Imports of a stage ahead of their use."""

from __future__ import annotations

import importlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

_NEEDED_TO_LOAD = ("actors.stage.runner", "kernels.cpu.backend")
_NEEDED_BY_GRAMMARS = ("llguidance", "xgrammar", "transformers.models.auto.tokenization_auto")


def import_all(with_grammars: bool, when_idle: bool) -> None:
    """Import what loading and, with_grammars, the first grammar need; returns when done.

    when_idle: on idle cores only, since even a tenth of a core would delay every step there.
    """
    modules = (*_NEEDED_TO_LOAD, *(_NEEDED_BY_GRAMMARS if with_grammars else ()))
    with ThreadPoolExecutor(1) as pool:  # a priority is a thread's own
        pool.submit(_import, modules, when_idle).result()


def _import(modules: tuple[str, ...], when_idle: bool) -> None:
    if when_idle:
        with suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    for module in modules:
        importlib.import_module(module)
