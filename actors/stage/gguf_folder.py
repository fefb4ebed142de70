"""A GGUF file as a model folder: config and tokenizer made from its metadata, weights by a link.

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
from pathlib import Path

from actors.stage.models.config import GGUF_LINK, ModelError
from actors.stage.weights.gguf_config import config_of
from actors.stage.weights.gguf_file import GgufFile
from actors.stage.weights.gguf_tokenizer import write_tokenizer

_LAST = 3  # llama.cpp's number of this pooling
_FORMAT = 5  # of the folders made here: another one makes them anew


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that a path means: itself, or the only one in a folder without a model of
    another format. Raises ModelError for a folder with several."""
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / GGUF_LINK).is_symlink() or any(path.glob("*.safetensors")):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelError(f"{path} holds several GGUF files ({names}): name one of them")
    return found[0] if found else None


def model_folder(path: Path, cache: Path) -> Path:
    """The folder to serve a model from: the path itself, or one below `cache` made from a GGUF
    file. Raises ModelError naming the file where it is missing, broken or not supported."""
    file = gguf_in(path)
    if file is None:
        return path
    try:
        file = file.resolve(strict=True)
        status = file.stat()
    except OSError as bad:
        raise ModelError(f"{file} cannot be read: {bad.strerror}") from bad
    same = f"{_FORMAT} {file} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(same.encode()).hexdigest()[:16]
    folder = cache / "gguf" / f"{file.stem}-{digest}"
    if not folder.is_dir():
        _make(file, folder)
    return folder


def _make(file: Path, folder: Path) -> None:
    """Whole or not at all: it is made beside its place and then moved there."""
    with contextlib.closing(GgufFile(file)) as opened:
        _make_from(opened, file, folder)


def _make_from(opened: GgufFile, file: Path, folder: Path) -> None:
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
        (made / GGUF_LINK).symlink_to(file)
        made.chmod(0o755)
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
