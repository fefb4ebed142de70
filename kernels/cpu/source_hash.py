"""The C++ sources as one hash: built into the library, and compared when it is loaded.

`setup.py` runs this file by its path, so it imports the standard library alone.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SOURCES = Path(__file__).with_name("src")


def source_hash(folder: Path = SOURCES) -> str | None:
    """Hash of names and contents of sources and headers; None if there are none, as in a wheel."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".cpp", ".h"))
    if not files:
        return None
    found = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()
