"""The head of a GGUF file and its parts: metadata and tensor positions, all of it validated.

Layout (versions 2 and 3, little endian): "GGUF", version, number of tensors, number of keys; the
keys with typed values; per tensor its name, dimensions (innermost first), type and offset; then,
aligned, the tensors. Source: ggml's docs/gguf.md. Of a file in parts, the first has all metadata;
each has its number (from zero) and how many there are, under "split". Source: gguf-split.cpp.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.stage.models.config import ModelError
from actors.stage.weights.gguf_names import first_part, part_name
from kernels.ggml_blocks import BLOCK_TYPES, OTHER_TYPES, BlockType

_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """shape: outermost dimension first, as in torch. offset: in bytes, from the file's start."""

    shape: tuple[int, ...]
    kind: BlockType
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.features * self.kind.num_bytes


class GgufFile:
    """metadata by key, tensors by name, of all parts; close it to unmap them.

    path: of the first part, beside which are the others. Raises ModelError naming the file if one
    is missing, broken, truncated or has tensors of an unsupported type.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parts = [_Part(path)]
        self.metadata = self._parts[0].metadata
        try:
            self._open_others()
            self._part_of = {name: part for part in self._parts for name in part.tensors}
            self.tensors = {name: part.tensors[name] for name, part in self._part_of.items()}
            whole = self.metadata.get("split.tensors.count", len(self.tensors))
            if whole != len(self.tensors):
                raise ModelError(f"{path}: its parts hold {len(self.tensors)} tensors, not {whole}")
        except ModelError:
            self.close()
            raise

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        """(rows, bytes of a row) of a tensor as stored: a view of the file. All dimensions but the
        innermost count as rows."""
        return self._part_of[name].rows(name, begin, end)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _open_others(self) -> None:
        number, count = self._parts[0].number, self._parts[0].count
        if number:
            raise ModelError(
                f"{self.path} is part {number + 1} of {count}; name the first, "
                f"{first_part(self.path.name)}"
            )
        for number in range(1, count):
            beside = self.path.with_name(part_name(self.path.name, number + 1, count))
            if not beside.exists():
                raise ModelError(
                    f"{self.path} is in {count} parts, and {beside.name} is missing beside it"
                )
            part = _Part(beside)
            self._parts.append(part)
            if (part.number, part.count) != (number, count):
                raise ModelError(
                    f"{beside} is part {part.number + 1} of {part.count}, not {number + 1} of "
                    f"{count} as its name says"
                )


class _Part:
    """One file. number: from zero, of count parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as bad:  # ValueError: an empty file
            raise ModelError(f"{path} cannot be read: {bad}") from bad
        self._at = self.number = 0
        self.count = 1
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read_head()
        except ModelError:
            self.close()
            raise
        except (struct.error, IndexError, ValueError) as bad:
            self.close()
            raise ModelError(f"{path} is not a GGUF file or is truncated: {bad}") from bad

    def rows(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        tensor = self.tensors[name]
        start, size = tensor.offset + begin * tensor.row_bytes, (end - begin) * tensor.row_bytes
        flat = np.frombuffer(self._map, np.uint8, size, start)
        return flat.reshape(end - begin, tensor.row_bytes)

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # a view is in use; the map closes with it
            self._map.close()

    def _read_head(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file")
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; supported: 2 and 3")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(key, self._number("<I"))
        numbers = [self.metadata.get(f"split.{key}", 0) for key in ("no", "count")]
        if not all(isinstance(number, int) for number in numbers):
            raise ModelError(f"{self.path}: split.no and split.count are not numbers")
        self.number, self.count = numbers[0], max(1, numbers[1])
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment {alignment!r} is not a size")
        data = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in found:
            tensor = StoredTensor(shape, kind, data + offset)
            if tensor.offset + math.prod(shape[:-1]) * tensor.row_bytes > len(self._map):
                raise ModelError(f"{self.path} is truncated: tensor {name} reaches behind its end")
            self.tensors[name] = tensor

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name, num_dimensions = self._string(), self._number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ModelError(f"{self.path}: tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        code, offset = self._number("<I"), self._number("<Q")
        kind = BLOCK_TYPES.get(code)
        if kind is None:
            known = ", ".join(k.name for k in BLOCK_TYPES.values())
            called = OTHER_TYPES.get(code, f"number {code}")
            raise ModelError(
                f"{self.path}: tensor {name} is of type {called}, which cannot be read; "
                f"supported: {known}"
            )
        if min(shape) < 1 or shape[-1] % kind.features:
            raise ModelError(
                f"{self.path}: tensor {name} of shape {shape} is not whole {kind.name}s"
            )
        return name, shape, kind, offset

    def _number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        end = self._at + length
        if end > len(self._map):
            raise IndexError("a string reaches behind the end")
        text = self._map[self._at : end].decode()
        self._at = end
        return text

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: {key} is of unknown type {kind}")
        inner, length = self._number("<I"), self._number("<Q")
        if length > len(self._map):
            raise IndexError(f"{key} reaches behind the end")
        if inner in _NUMBERS:
            values = np.frombuffer(self._map, np.dtype(_NUMBERS[inner]), length, self._at)
            self._at += values.nbytes
            return values.tolist()
        if inner == _ARRAY:
            raise ModelError(f"{self.path}: {key} is an array of arrays")
        return [self._value(key, inner) for _ in range(length)]
