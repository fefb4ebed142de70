"""Files that settings name: those of a model's folder, chat templates, cost models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from actors.calibration.cache import cache_folder
from actors.stage.hub_folder import HubModel, all_files, parse_hub_name, pin, small_files
from actors.stage.models.config import DecoderConfig, ModelError, read_json
from actors.stage.models.read import load_config
from app.paths import locate


class SettingsError(ValueError):
    """The settings are invalid; the message names the key and, if possible, a remedy."""


# Settings that name a model.
_MODELS = (("model", "path"), ("speculation", "model"))


def hub_model(path: str) -> HubModel | None:
    """The model on the Hugging Face hub that a path names; None where it exists as a path, or
    cannot be a name."""
    return None if locate(path).exists() else parse_hub_name(path)


def hub_name(path: str | None, key: str = "model.path") -> str | None:
    """A name on the hub, with the commit that its revision means now; None for what is none.

    Raises SettingsError where the hub and its cache have no such model.
    """
    model = None if path is None else hub_model(path)
    if path is None or model is None:
        return None
    try:
        return str(pin(model))
    except ValueError as error:
        raise _neither(path, key, error) from error


def pin_models(args: Mapping[str, Any]) -> dict[str, Any]:
    """A deployment's valid `args` with the commits of names on the hub, so that every replica,
    whenever it starts, has the same weights. Raises SettingsError."""
    found = dict(args)
    for section, key in _MODELS:
        path = (found.get(section) or {}).get(key)
        if name := hub_name(path, f"{section}.{key}"):
            found[section] = {**found[section], key: name}
    if "models" in found:
        found["models"] = [pin_models(entry) for entry in found["models"]]
    return found


def model_folder(path: str, key: str = "model.path", with_weights: bool = False) -> Path:
    """The folder of setting `key`; for a GGUF file, or a folder with one, the folder made from it.

    That of a name on the Hugging Face hub is in the hub's cache. It has no weights, which each
    rank downloads on its own node, unless they are asked for.

    Raises SettingsError for a GGUF file that cannot be read, and a name that cannot be resolved.
    """
    found, model = locate(path), hub_model(path)
    if model is not None:
        try:
            found = all_files(model) if with_weights else small_files(model)
        except ValueError as error:
            raise _neither(path, key, error) from error
        if model.file is None:  # GGUF files beside it in the cache are other models
            return found
    elif found.suffix != ".gguf" and not (found.is_dir() and any(found.glob("*.gguf"))):
        return found.resolve()
    from actors.stage.gguf_folder import model_folder as folder_of  # here: it imports torch

    try:
        return folder_of(found, cache_folder()).resolve()
    except ValueError as error:
        raise SettingsError(f"{key}: {error}") from error
    except OSError as error:
        where = f"what the file describes is kept in {cache_folder()}, see LEGATO_CACHE"
        raise SettingsError(f"{key}: {error}; {where}") from error


def read_template(file: str | None) -> str | None:
    """The chat template of the settings, if there is one. Raises SettingsError."""
    if file is None:
        return None
    try:
        if not (text := locate(file).read_text(encoding="utf-8")).strip():
            raise ValueError("it is empty")
        return text
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"model.chat_template: {file}: {reason}") from error


def sampling_defaults(folder: str | Path) -> tuple[dict[str, float], list[str]]:
    """The sampling parameters that a model's generation_config.json recommends, by their names in
    requests, and what is wrong with those that no request may have. Raises SettingsError for a file
    that cannot be read."""
    from pydantic import ValidationError

    from app.api.schema.common import DEFAULTS, SamplingFields

    file, found, wrong = Path(folder) / "generation_config.json", dict[str, float](), list[str]()
    try:
        said = read_json(file) if file.is_file() else {}
    except ModelError as error:
        raise SettingsError(f"model.path: {error}") from error
    for name in DEFAULTS:
        try:
            value = getattr(SamplingFields.model_validate({name: said.get(name)}), name)
        except ValidationError as error:
            problem = error.errors()[0]
            wrong.append(f"{name} {problem['input']!r} of {file}: {problem['msg']}")
        else:
            if value is not None:
                found[name] = value
    return found, wrong


def read_cost_model(path: str) -> dict[str, Any]:
    """A fitted cost model's numbers (JSON or YAML)."""
    try:
        loaded = yaml.safe_load(locate(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"scheduling.cost_model: {path}: {error.strerror}") from error
    except ValueError as error:  # not text
        raise SettingsError(f"scheduling.cost_model: {path}: {error}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"scheduling.cost_model: {path} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise SettingsError(f"scheduling.cost_model: {path} is not a mapping")
    return loaded


def _neither(path: str, key: str, error: ValueError) -> SettingsError:
    return SettingsError(f"{key}: no folder {_searched(path)}, and {error}")


def _searched(path: str) -> str:
    """A relative path is looked up in the working folder, which is another one for a driver than
    for the replicas of a Ray cluster that was there before it."""
    is_absolute = Path(path).expanduser().is_absolute()
    return repr(path) if is_absolute else f"{path!r} in {Path.cwd()}"


def model_config(path: str, key: str = "model.path") -> dict[str, Any]:
    """The model folder's config.json. Raises SettingsError naming what is missing."""
    folder = model_folder(path, key)
    if not folder.is_dir():
        raise SettingsError(f"{key}: no folder {_searched(path)}")
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{key}: {path!r} holds no config.json") from None
    except OSError as error:  # as of another user's folder
        raise SettingsError(f"{key}: {file}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{key}: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{key}: {file} is not a JSON object")
    return config


def model_description(path: str, key: str = "model.path") -> DecoderConfig:
    """The decoder that the stages will build, whatever names its config.json has for its sizes.
    Unknown keys are left to them. Raises SettingsError."""
    model_config(path, key)
    try:
        return load_config(model_folder(path, key), refuse_unknown=False)
    except ModelError as error:
        raise SettingsError(f"{key}: {error}") from error


def vocabulary(path: str) -> dict[str, int]:
    """Ids of a tokenizer.json; empty where there is none or it has another form."""
    try:
        found = json.loads((model_folder(path) / "tokenizer.json").read_text(encoding="utf-8"))
        return dict(found["model"]["vocab"])
    except (OSError, ValueError, TypeError, KeyError):
        return {}
