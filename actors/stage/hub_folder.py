"""Models by their name on the Hugging Face hub, downloaded into the hub library's own cache.

`org/name` is a model of safetensors, `org/name/file.gguf` one of its GGUF files, with all its parts
if it is the first of some; `@revision` after either is a branch, a tag or a commit, `main` where it
is absent. A process looks a revision up once. The library reads HF_HOME, HF_TOKEN, HF_ENDPOINT and
HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from actors.stage.spec import StageSpec
from actors.stage.weights.gguf_names import first_part, part_names

_PART = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:/(?P<file>(?:{_PART}/)*{_PART}\.gguf))?(?:@(?P<revision>.+))?",
    re.ASCII,
)
_OF_FILES = (".yaml", ".yml", ".json", ".gguf", ".safetensors")  # a path, where no model has it
# Config and tokenizer; and the card, as the library warns where nothing matches.
_SMALL = ["*.json", "*.jinja", "*.model", "*.txt", "README.md"]
# Folders, but for 1_Pooling of embedding models and additional_chat_templates.
_NOT_SMALL = ["*/*/*", "[!1a]*/*", "1[!_]*/*", "a[!d]*/*", "ad[!d]*/*"]
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"  # read even beside an index


class HubError(ValueError):
    """A model that the hub or its cache does not give; a clause that names it and, if possible, a
    remedy."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """repo: "org/name". revision: branch, tag or commit. file: of a GGUF file in it, or None."""

    repo: str
    revision: str
    file: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self.file))) + f"@{self.revision}"


def parse_hub_name(text: str) -> HubModel | None:
    """The model of a name; None for a text that can only be a path.

    >>> str(parse_hub_name("org/name/q4.gguf@v1"))
    'org/name/q4.gguf@v1'
    >>> parse_hub_name("serve/demo.yaml"), parse_hub_name("./org/name"), parse_hub_name("a/b/c")
    (None, None, None)
    """
    match = _NAME.fullmatch(text)
    if match is None or match["repo"].endswith(_OF_FILES):
        return None
    return HubModel(match["repo"], match["revision"] or "main", match["file"])


def pin(model: HubModel) -> HubModel:
    """The model with its commit as the revision, which needs no network once it is downloaded."""
    return replace(model, revision=_snapshot(model).name)


def small_files(model: HubModel) -> Path:
    """The folder of its config and tokenizer, in which weights may be missing; a GGUF file, which
    is all in one, itself. Raises HubError."""
    return _snapshot(model) / (model.file or "")


def all_files(model: HubModel) -> Path:
    """The folder with its weights too, or the GGUF file. Raises HubError."""
    folder = _snapshot(model)
    if model.file is None:
        _download_weights(replace(model, revision=folder.name), folder)
    return folder / (model.file or "")


def on_this_node(spec: StageSpec) -> StageSpec:
    """The specification with folders of this node, where they are downloaded if they are missing.
    Raises HubError."""
    folder, draft_folder = spec.model_path, spec.draft_model_path
    if spec.hub_model is not None:
        folder = _folder_here(spec.hub_model, folder, spec.load_format != "dummy")
    if spec.hub_draft_model is not None and draft_folder is not None:
        draft_folder = _folder_here(spec.hub_draft_model, draft_folder)
    return replace(spec, model_path=folder, draft_model_path=draft_folder)


def _folder_here(name: str, elsewhere: str, with_weights: bool = True) -> str:
    """elsewhere: the folder on the node where the specification was made."""
    model = parse_hub_name(name)
    assert model is not None, name
    found = all_files(model) if with_weights else small_files(model)
    if model.file is not None:
        from actors.stage.gguf_folder import model_folder  # here: it imports torch

        return str(model_folder(found, Path(elsewhere).parents[1]).resolve())
    return str(found)


@functools.cache
def _snapshot(model: HubModel) -> Path:
    """The folder of one commit in the cache, with the small files or the GGUF file."""
    from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download
    from huggingface_hub.errors import RemoteEntryNotFoundError
    from huggingface_hub.utils import tqdm

    with _errors_of(model):
        if model.file is not None:
            if (first := first_part(model.file)) != model.file:
                raise HubError(f"{model.file} is a part of a file; name the first, {first}")
            try:
                path = hf_hub_download(model.repo, first, revision=model.revision)
            except RemoteEntryNotFoundError:
                files = list_repo_files(model.repo, revision=model.revision)
                raise HubError(f"{model.repo} has no {first}{_gguf(model, files)}") from None
            for name in part_names(first)[1:]:
                try:
                    hf_hub_download(model.repo, name, revision=model.revision)
                except RemoteEntryNotFoundError:
                    raise HubError(f"{model.repo} has no {name}, a part of {first}") from None
            return Path(path.removesuffix(model.file))
        folder = Path(
            snapshot_download(
                model.repo, revision=model.revision, allow_patterns=_SMALL,
                ignore_patterns=_NOT_SMALL, tqdm_class=functools.partial(tqdm, disable=True),
            )
        )  # fmt: skip
        if not (folder / "config.json").is_file():
            files = _files_of(model)
            raise HubError(f"{model.repo} holds no config.json{_gguf(model, files)}")
        return folder


@functools.cache
def _download_weights(model: HubModel, folder: Path) -> None:
    """File by file in this thread, where Ctrl-C ends a download at once; the library divides a
    large file among connections itself."""
    from huggingface_hub import hf_hub_download

    with _errors_of(model):
        for name in _weights_of(model, folder):
            hf_hub_download(model.repo, name, revision=model.revision)


def _weights_of(model: HubModel, folder: Path) -> list[str]:
    """Names of the safetensors that a loader of the folder reads."""
    top = {name for name in _files_of(model) if "/" not in name}
    found = {name for name in (top or _names_in(folder)) if name.endswith(".safetensors")}
    if _SINGLE in found:
        return [_SINGLE]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        return sorted({str(file) for file in index["weight_map"].values()})
    if not found:
        raise HubError(f"{model.repo} holds no safetensors, and pickles are not read")
    return sorted(found)


def _names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _files_of(model: HubModel) -> list[str]:
    """The revision's files, as the cache lists them; empty where another program filled it."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [file.path for file in get_cached_repo_tree(model.repo, revision=model.revision)]
    except CachedRepoTreeNotFoundError:
        return []


def _gguf(model: HubModel, files: Iterable[str]) -> str:
    """What to name instead, as the end of a message."""
    firsts = sorted({first_part(name) for name in files if name.endswith(".gguf")})
    found = [f"{model.repo}/{name}" for name in firsts]
    return f"; name a GGUF file of it: {', '.join(found)}" if found else ""


@contextlib.contextmanager
def _errors_of(model: HubModel) -> Iterator[None]:
    """Says the library's errors in a clause."""
    from huggingface_hub import constants, errors

    hub, repo = constants.ENDPOINT.partition("://")[2], model.repo
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: accept its terms at {constants.ENDPOINT}/{repo} and set HF_TOKEN to "
            "a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{hub} has no model {repo}, or shows it only to a token (HF_TOKEN) that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo} has no revision {model.revision!r} on {hub}") from error
    except errors.LocalEntryNotFoundError as error:
        missing = f"{model} is not whole in {constants.HF_HUB_CACHE}"
        if constants.HF_HUB_OFFLINE:
            raise HubError(f"HF_HUB_OFFLINE is set, and {missing}") from error
        raise HubError(f"{hub} cannot be reached, and {missing}: {_cause(error)}") from error
    except Exception as error:  # of the library's HTTP client, another one in each version of it
        raise HubError(f"{model} cannot be downloaded from {hub}: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """One line of the first error that led to this one."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    if isinstance(error, ModuleNotFoundError) and error.name == "socksio":
        return "ALL_PROXY, HTTPS_PROXY or HTTP_PROXY names a SOCKS proxy: `pip install socksio`"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
