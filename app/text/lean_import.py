"""Libraries that import torch, for processes that compute nothing with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, cast


def import_tokenizers_alone() -> None:
    """Import transformers as where torch is not installed.

    Its tokenizers do not compute with torch, yet import it wherever it can be found: 3.5 s of a
    processor and 330 MiB in every process that answers HTTP. For processes of that kind only: from
    here on transformers has no models in this one. Does nothing where either is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch was not found
    with _torch_is(None):
        from transformers import AutoTokenizer  # noqa: F401  looks for torch, once


def import_grammars_alone() -> None:
    """Import xgrammar and transformers' tokenizers without torch, for a process that only tries
    grammars: 2 s of a processor, not 6.

    xgrammar needs torch for functions of token bitmasks only, which do not work here. Does nothing
    where torch or transformers is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    import_tokenizers_alone()
    with _torch_is(None), suppress(ImportError):  # which xgrammar uses since 0.2
        import tvm_ffi  # noqa: F401  works without torch
    with _torch_is(_Names("torch")):
        import xgrammar  # noqa: F401


class _Name:
    """Any of torch's types, in an annotation, and any of its tensors, in a constant."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


class _Names(ModuleType):
    def __getattr__(self, name: str) -> type[_Name]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name


@contextmanager
def _torch_is(module: ModuleType | None) -> Iterator[None]:
    """None: torch cannot be imported, as the import system marks it."""
    modules = cast(dict[str, object], sys.modules)
    modules["torch"] = module
    try:
        yield
    finally:
        del modules["torch"]
