"""Reading slices of tensors from a Hugging Face folder of safetensors.

Opening a folder checks every shard's header against its file before any weight is read, so a
missing, truncated or foreign shard is named at once. Pickled weights are refused, because
unpickling runs code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from actors.stage.models.config import ModelError
from actors.stage.weights.source import CPU, WHOLE, Shard

_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint:
    """The tensors of one folder by name. Close it to unmap the shards.

    optional_prefix: precedes every name but those of the head; some checkpoints omit it.
    prefixes: of stored names, and what they are here; tensors with one of None are left out.
    single: file name of an unsharded checkpoint. device: of the tensors read; they are checked and
    converted there.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        optional_prefix: str = "",
        head: str = "lm_head",
        single: str = "model.safetensors",
        device: torch.device = CPU,
        prefixes: tuple[tuple[str, str | None], ...] = (),
    ) -> None:
        self.folder = folder
        self._dtype = dtype
        self._device = device
        self._handles: dict[Path, Any] = {}
        self._shard_of: dict[str, Path] = {}
        # As in transformers: saved anew as one file, a model may leave an index and shards behind.
        indexed = {} if (folder / single).is_file() else _read_index(folder)
        for shard in sorted(set(indexed.values())) if indexed else _shards(folder, single):
            handle = _open(shard)
            self._handles[shard] = handle
            for name in handle.keys():  # noqa: SIM118 - a safetensors handle is not iterable
                if name in self._shard_of:
                    raise ModelError(
                        f"tensor {name} stands in both {self._shard_of[name]} and {shard}"
                    )
                self._shard_of[name] = shard
        for name, shard in indexed.items():
            if self._shard_of.get(name) != shard:
                raise ModelError(f"{folder / _INDEX} lists {name} in {shard.name}: it is not there")
        self._stored: dict[str, str] = {}  # by name: the stored one
        named = {stored: _named(stored, prefixes) for stored in self._shard_of}
        omitted = not any(name and name.startswith(optional_prefix) for name in named.values())
        for stored, name in named.items():
            if name is not None and omitted and not name.startswith(head + "."):
                name = optional_prefix + name
            if name in self._stored:
                raise ModelError(
                    f"{folder}: tensors {self._stored[name]} and {stored} stand for one"
                )
            if name is not None:
                self._stored[name] = stored
        self._shard_of = {name: self._shard_of[stored] for name, stored in self._stored.items()}

    @property
    def names(self) -> Collection[str]:
        return self._shard_of.keys()

    def stores(self, name: str) -> bool:
        return name in self._shard_of

    def rename(self, old: str, new: str) -> None:
        self._stored[new], self._shard_of[new] = self._stored.pop(old), self._shard_of.pop(old)

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor. Raises ModelError if none does."""
        shard = self._shard_of.get(name)
        if shard is None:
            files = ", ".join(path.name for path in self._handles)
            raise ModelError(f"tensor {name} is missing from {self.folder} (read: {files})")
        return shard

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor as stored. Raises ModelError if it is missing."""
        shard = self.file_of(name)
        return tuple(self._handles[shard].get_slice(self._stored[name]).get_shape())

    def dtype_of(self, name: str) -> str:
        """Stored type of a tensor, as safetensors calls it. Raises ModelError if it is missing."""
        shard = self.file_of(name)
        return str(self._handles[shard].get_slice(self._stored[name]).get_dtype())

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: Shard = WHOLE,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        view, shard = self._view(name, shape), self._shard_of[name]
        try:
            tensor = _slice(view, part, len(shape))
        except (SafetensorError, OSError) as bad:
            raise ModelError(f"{shard}: tensor {name} cannot be read: {bad}") from bad
        if not tensor.is_floating_point():
            raise ModelError(f"{shard}: tensor {name} holds {tensor.dtype}, not a float type")
        tensor = tensor.to(self._device)
        # A sum is finite only if every term is: one pass, no second tensor.
        if not torch.isfinite(tensor.sum(dtype=torch.float32)):
            raise ModelError(f"{shard}: tensor {name} holds values that are not finite")
        # Copied, because the mapped file may change while the weight is in use.
        copies = self._device.type == "cpu"
        return tensor.to(dtype or self._dtype, copy=copies).contiguous()

    def read_raw(self, name: str, row: int | None = None) -> torch.Tensor:
        """A tensor as stored, whole or one row, packed integers and narrow floats included."""
        shard, stored = self.file_of(name), self._stored[name]
        try:
            if row is not None:
                return torch.Tensor.clone(self._handles[shard].get_slice(stored)[row])
            return torch.Tensor.clone(self._handles[shard].get_tensor(stored))
        except (SafetensorError, OSError) as bad:
            raise ModelError(f"{shard}: tensor {name} cannot be read: {bad}") from bad

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        optional: Collection[str] = (),
        ignored_endings: tuple[str, ...] = (),
    ) -> None:
        """Check the whole folder against the whole model, before any weight is read.

        shapes: of all tensors of the model, by name. optional: tensors that may be absent.
        ignored_endings: of names in old checkpoints that are not read. Raises ModelError for the
        first tensor that is missing, unexpected or of another shape.
        """
        for name, shape in shapes.items():
            if name not in optional or name in self._shard_of:
                self._view(name, shape)
        for name, shard in self._shard_of.items():
            if name not in shapes and not name.endswith(ignored_endings):
                raise ModelError(f"{shard}: unexpected tensor {name}; the model has none such")

    def _view(self, name: str, shape: tuple[int, ...]) -> Any:
        shard = self.file_of(name)
        view = self._handles[shard].get_slice(self._stored[name])
        found = tuple(view.get_shape())
        if found != shape:
            raise ModelError(f"{shard}: tensor {name} has shape {found}, the config says {shape}")
        return view

    def close(self) -> None:
        self._handles.clear()


def _named(stored: str, prefixes: tuple[tuple[str, str | None], ...]) -> str | None:
    """The name here of a stored tensor; None for one that is not read."""
    for prefix, ours in prefixes:
        if stored.startswith(prefix):
            return None if ours is None else ours + stored.removeprefix(prefix)
    return stored


def _slice(view: Any, part: Shard, rank: int) -> torch.Tensor:
    rows = slice(*part.rows) if part.rows is not None else slice(None)
    if rank == 1:
        return view[rows]
    columns = slice(*part.columns) if part.columns is not None else slice(None)
    return view[rows, columns]


def _open(shard: Path) -> Any:
    if not shard.is_file():
        raise ModelError(f"weight file {shard} is missing")
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as bad:
        if _is_lfs_pointer(shard):
            raise ModelError(
                f"weight file {shard} is only Git LFS's pointer to it: `git lfs pull` fetches it"
            ) from bad
        if not os.access(shard, os.R_OK):  # which safetensors calls a file that is not there
            raise ModelError(f"weight file {shard} may not be read by this user") from bad
        raise ModelError(f"weight file {shard} is corrupt or truncated: {bad}") from bad


def _is_lfs_pointer(file: Path) -> bool:
    """Whether it is what a clone without Git LFS leaves in the place of a large file."""
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def _read_index(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard; empty if the folder has no index."""
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        shards = {str(name): folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise ModelError(f"{path} is not a safetensors index: {bad}") from bad
    for shard in shards.values():
        if shard.parent != folder:
            raise ModelError(f"{path} points outside the folder: {shard}")
    return shards


def _shards(folder: Path, name: str) -> list[Path]:
    single = folder / name
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLED)
    if pickled:
        raise ModelError(
            f"{folder / pickled[0]} is a pickle, which can run code; convert it to safetensors"
        )
    raise ModelError(f"model folder {folder} holds no *.safetensors weights")
