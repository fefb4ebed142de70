"""The metadata of a GGUF file's architecture."""

from __future__ import annotations

from typing import Any

from actors.stage.models.config import ModelError
from actors.stage.models.keys import is_neutral
from actors.stage.weights.gguf_file import GgufFile


class GgufMetadata:
    """The keys of a file's architecture; tracks which were read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        self._prefix = f"{self.architecture}."
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self.file.metadata.get(self._prefix + key, default)

    def number(self, key: str) -> Any:
        """A number. Raises ModelError if it is missing or differs between layers."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.file.path}: {self._prefix}{key} is {value!r}, not a number")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def factors(self, tensor: str) -> list[float]:
        """The values of a small float32 tensor."""
        found = self.file.tensors[tensor]
        if len(found.shape) != 1:
            raise ModelError(f"{self.file.path}: tensor {tensor} has shape {found.shape}")
        return [float(x) for x in found.kind.decode(self.file.rows(tensor, 0, 1)).flatten()]

    def unread(self) -> str | None:
        """A key that was not read and may change results."""
        for key, value in self.file.metadata.items():
            name = key.removeprefix(self._prefix)
            if key.startswith(self._prefix) and name not in self._read:
                # As folders call it, with its group or without: attention.scale, attention.causal.
                called = (name.replace(".", "_"), name.rpartition(".")[2])
                if not all(is_neutral(each, value) for each in called):
                    return key
        return None
