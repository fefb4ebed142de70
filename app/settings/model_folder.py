"""Files of a model's folder that settings are checked against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.calibration.cache import cache_folder
from app.paths import locate


class SettingsError(ValueError):
    """The settings are invalid; the message names the key and, if possible, a remedy."""


def model_folder(path: str, key: str = "model.path") -> Path:
    """The folder of setting `key`; for a GGUF file, or a folder with one, the folder made from it.

    Raises SettingsError for a GGUF file that cannot be read.
    """
    found = locate(path)
    if found.suffix != ".gguf" and not (found.is_dir() and any(found.glob("*.gguf"))):
        return found.resolve()
    from actors.stage.gguf_folder import model_folder as folder_of  # here: it imports torch

    try:
        return folder_of(found, cache_folder()).resolve()
    except ValueError as error:
        raise SettingsError(f"{key}: {error}") from error


def model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """The model folder's config.json. Raises SettingsError naming what is missing."""
    folder = model_folder(path, key)
    if not folder.is_dir():
        raise SettingsError(f"{key}: no folder {path!r}")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise SettingsError(f"{key}: {path!r} holds no config.json") from None
    except ValueError as error:
        raise SettingsError(f"{key}: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{key}: {file} is not a JSON object")
    return config


def vocabulary(path: str) -> dict[str, int]:
    """Ids of a tokenizer.json; empty where there is none or it has another form."""
    try:
        found = json.loads((model_folder(path) / "tokenizer.json").read_text())
        return dict(found["model"]["vocab"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
