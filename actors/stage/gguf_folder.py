"""A GGUF file as a model folder: config and tokenizer made from its metadata, weights by links.

The folder stands in Legato's cache, named after the file and what it was when it was read, so
that every part that reads a model folder reads this one too, and a file that changes makes
another one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from actors.stage.models.config import GGUF_LINK, ModelError
from actors.stage.weights.gguf_config import config_of
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_names import first_part, model_stem, part_name, part_names
from actors.stage.weights.gguf_tokenizer import write_tokenizer

_LAST = 3  # llama.cpp's number of this pooling
_FORMAT = 5  # of the folders made here: another one makes them anew


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means, or the first of its parts: itself, or the only one in a
    folder without a model of another format. Raises ModelError for a folder with several."""
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / GGUF_LINK).is_symlink() or any(path.glob("*.safetensors")):
        return None
    found = sorted({first_part(file.name) for file in path.glob("*.gguf")})
    if len(found) > 1:
        raise ModelError(f"{path} holds several GGUF files ({', '.join(found)}): name one of them")
    return path / found[0] if found else None


def model_folder(path: Path, cache: Path) -> Path:
    """The folder to serve a model from: the path itself, or one below `cache` made from a GGUF
    file. Raises ModelError naming the file where it is missing, broken or not supported."""
    file = gguf_in(path)
    if file is None:
        return path
    same, parts = str(_FORMAT), list[Path]()
    names = part_names(file.name)
    for number, name in enumerate(names, 1):
        part = file.with_name(name)
        try:
            parts.append(part.resolve(strict=True))
            status = part.stat()
        except OSError as bad:
            which = f", part {number} of {len(names)}," if len(names) > 1 else ""
            raise ModelError(f"{part}{which} cannot be read: {bad.strerror}") from bad
        same += f" {parts[-1]} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(same.encode()).hexdigest()[:16]
    folder = cache / "gguf" / f"{model_stem(file.name)}-{digest}"
    if not folder.is_dir():
        _make(file, parts, folder)
    return folder


def _make(file: Path, parts: Sequence[Path], folder: Path) -> None:
    """Whole or not at all: it is made beside its place and then moved there."""
    with contextlib.closing(GgufFile(file)) as opened:
        _make_from(opened, parts, folder)


def _make_from(opened: GgufFile, parts: Sequence[Path], folder: Path) -> None:
    config = config_of(opened)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".making-"))
    try:
        if "tokenizer.ggml.tokens" in opened.metadata:
            write_tokenizer(opened, made)
        generation = {"eos_token_id": config["eos_token_id"]}
        (made / "config.json").write_text(json.dumps(config, indent=1))
        (made / "generation_config.json").write_text(json.dumps(generation))
        if opened.metadata.get(f"{opened.metadata['general.architecture']}.pooling_type") == _LAST:
            pooling = made / "1_Pooling"  # as in folders of embedding models
            pooling.mkdir()
            (pooling / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
        for number, part in enumerate(parts, 1):
            (made / part_name(GGUF_LINK, number, len(parts))).symlink_to(part)
        made.chmod(0o755)
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
