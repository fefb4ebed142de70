"""Transformers for a process that only needs its tokenizers."""

from __future__ import annotations

import os
import sys
from typing import cast


def import_tokenizers_alone() -> None:
    """Import transformers as where torch is not installed.

    Its tokenizers do not compute with torch, yet import it wherever it can be found: 3.5 s of a
    processor and 330 MiB in every process that answers HTTP. For processes of that kind only: from
    here on transformers has no models in this one. Does nothing where either is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch was not found
    modules = cast(dict[str, object], sys.modules)
    modules["torch"] = None  # as the import system marks what cannot be imported
    try:
        from transformers import AutoTokenizer  # noqa: F401  looks for torch, once
    finally:
        del modules["torch"]
