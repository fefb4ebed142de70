"""The adapter slots of one rank: LoRA adapters held beside the packed weights of its layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from actors.stage.load_pace import LoadPace, check_wanted
from actors.stage.models.config import DecoderConfig
from actors.stage.models.split import Range, Split, split
from actors.stage.spec import StageSpec
from actors.stage.weights.adapter_folder import AdapterFolder
from actors.stage.weights.names import (
    Piece,
    gate_up_pieces,
    layer_prefix,
    num_rows,
    qkv_pieces,
)
from actors.stage.weights.source import Shard
from kernels.adapters import AdapterModule, LayerAdapters, adapter_module
from kernels.huge_pages import Arena
from kernels.interface import Backend
from kernels.upload import SideStream

_PIECE_BYTES = 1 << 20  # of floats: read, checked and copied in about a millisecond


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _Part(NamedTuple):
    """A rank's part of a layer."""

    split: Split
    qkv: list[Piece]
    gate_up: list[Piece]


class StageAdapters:
    """Slots 0 to max_adapters - 1. `layers` are to be joined to the layers' weights.

    Ranks hold the rows of B of what is split by output features, and the columns of A of what is
    split by input features, so that sums over ranks stay what they are without adapters.
    pace: of loads, which run beside steps.
    """

    def __init__(
        self,
        config: DecoderConfig,
        part: Split,
        spec: StageSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._spec = spec
        self._dtype = dtype
        self._zeros = Arena().zeros if device.type == "cpu" else partial(_zeros, device)
        self._stream = SideStream(device)
        self._parts = {number: self._part(number, part) for number in range(*part.layers)}
        self.pace = LoadPace()
        self.filled: set[int] = set()  # slots counted from 1, as requests name them
        self.layers = [self._layer(number) for number in self._parts]

    def _part(self, number: int, part: Split) -> _Part:
        config = self._config.at(number)
        if config is not self._config:
            part = split(config, self._spec)
        return _Part(part, qkv_pieces(config, part), gate_up_pieces(config, part))

    def _layer(self, number: int) -> LayerAdapters:
        part, qkv_rows, gate_up_rows = self._parts[number]
        hidden = self._config.hidden_size
        qkv = self._module(hidden, [num_rows(piece) for piece in qkv_rows])
        out = self._module(part.attended[1] - part.attended[0], [hidden])
        if self._config.has_experts(number):
            return LayerAdapters(qkv, out)
        return LayerAdapters(
            qkv,
            out,
            self._module(hidden, [num_rows(piece) for piece in gate_up_rows]),
            self._module(part.inner[1] - part.inner[0], [hidden]),
        )

    def _module(self, in_features: int, widths: list[int]) -> AdapterModule:
        return adapter_module(
            self._spec.max_adapters, self._spec.max_adapter_rank, in_features, tuple(widths),
            self._dtype, self._zeros,
        )  # fmt: skip

    def prepare(self, backend: Backend) -> None:
        """Compile ahead of the first adapter: no step that is measured at the start has one."""
        for layer in self.layers:
            for module in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if module is not None:
                    backend.prepare_adapters(module)

    def load(self, slot: int, folder: Path) -> None:
        """Fill a slot, which no running request may use, with the adapter of a folder.

        The whole folder is checked before the slot is touched. Steps may run meanwhile in another
        thread. Raises ModelError naming the file and the cause.
        """
        if not 0 <= slot < self._spec.max_adapters:
            raise ValueError(f"adapter slot {slot} of {self._spec.max_adapters}")
        adapter = AdapterFolder(folder, self._config, self._spec.max_adapter_rank, self._dtype)
        try:
            self.pace.begin()
            self.filled.discard(slot + 1)
            with self._stream.apart():  # or waits for steps would count as the load's time
                for number, layer in zip(self._parts, self.layers, strict=True):
                    self._load_layer(adapter, slot, number, layer)
            self.filled.add(slot + 1)
        finally:
            adapter.close()

    def _load_layer(
        self, adapter: AdapterFolder, slot: int, number: int, layer: LayerAdapters
    ) -> None:
        prefix, names = layer_prefix(self._config, number), self._config.names
        part = self._parts[number]

        def fill(module: AdapterModule | None, pieces: list[Piece], columns: Range | None) -> None:
            for index, piece in enumerate(pieces if module is not None else ()):
                assert module is not None
                name, rank = prefix + piece.name, 0
                if name in adapter.modules:
                    rank = adapter.config.rank
                    each = 4 * (module.a_CMRK.shape[-1] + module.widths[index])  # bytes of a rank
                    step = max(1, _PIECE_BYTES // each)
                    for begin in range(0, rank, step):
                        ranks = (begin, min(begin + step, rank))
                        a_RK = adapter.down(name, Shard(ranks, columns))
                        b_OR = adapter.up(name, Shard(piece.rows, ranks), piece.order)
                        check_wanted()  # files may have hung
                        module.put(slot, index, begin, a_RK, b_OR)
                        if ranks[1] < rank:
                            self.pace.pause()
                module.end(slot, index, rank)
                self.pace.pause()

        whole = (0, self._config.hidden_size)
        fill(layer.qkv, part.qkv, None)
        fill(layer.out, [Piece(names.out, whole)], part.split.attended)
        fill(layer.gate_up, part.gate_up, None)
        fill(layer.down, [Piece(names.down, whole)], part.split.inner)
