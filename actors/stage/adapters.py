"""The adapter slots of one rank: LoRA adapters held beside the packed weights of its layers."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from actors.stage.load_pace import LoadPace, check_wanted
from actors.stage.models.config import GGUF_LINK, DecoderConfig, ModelError, Multipliers
from actors.stage.models.split import Range, Split, split
from actors.stage.spec import StageSpec
from actors.stage.weights.adapter_folder import AdapterFolder
from actors.stage.weights.mixers import mixer_pieces, rate_pieces
from actors.stage.weights.names import (
    Piece,
    gate_pieces,
    gate_up_pieces,
    layer_prefix,
    mlp_prefix,
    num_rows,
    qkv_pieces,
)
from actors.stage.weights.source import Shard
from kernels.adapters import AdapterModule, LayerAdapters, adapter_module
from kernels.huge_pages import Arena
from kernels.interface import Backend
from kernels.upload import SideStream

_ONES = Multipliers(attention=1.0, mixer=1.0, mixer_inputs=(), gate=1.0, mlp=1.0)
_PIECE_BYTES = 1 << 20  # of floats: read, checked and copied in about a millisecond


def _zeros(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


class _Part(NamedTuple):
    """A linear layer of a checkpoint, named whole, and this rank's rows of it, each with a factor
    that multiplies its results. All have one A."""

    name: str
    pieces: list[tuple[Piece, float]]

    @property
    def width(self) -> int:
        return sum(num_rows(piece) for piece, _ in self.pieces)


class _Place(NamedTuple):
    """A linear layer of this rank that adapters may change. field: of `LayerAdapters`. columns: of
    its input features."""

    field: str
    parts: list[_Part]
    columns: Range


class StageAdapters:
    """Slots 0 to max_adapters - 1. `layers` are to be joined to the layers' weights.

    Ranks hold the rows of B of what is split by output features, and the columns of A of what is
    split by input features, so that sums over ranks stay what they are without adapters.
    pace: of loads, which run beside steps. Raises ModelError for a model that cannot have them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        part: Split,
        spec: StageSpec,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if config.mixer_beside and (Path(spec.model_path) / GGUF_LINK).is_symlink():
            raise ModelError(
                f"adapters.max_adapters: {spec.model_path} is a GGUF file of Falcon-H1. Its "
                "weights have been multiplied by factors that the file does not name and that an "
                "adapter's would need, too; a folder of safetensors can be served with adapters"
            )
        self._config = config
        self._spec = spec
        self._dtype = dtype
        self._zeros = Arena().zeros if device.type == "cpu" else partial(_zeros, device)
        self._stream = SideStream(device)
        self._places = [_places_of(config, number, part, spec) for number in range(*part.layers)]
        self.pace = LoadPace()
        self.filled: set[int] = set()  # slots counted from 1, as requests name them
        self.layers = [
            LayerAdapters(**{place.field: self._module(place) for place in layer})
            for layer in self._places
        ]

    def _module(self, place: _Place) -> AdapterModule:
        return adapter_module(
            self._spec.max_adapters, self._spec.max_adapter_rank,
            place.columns[1] - place.columns[0], tuple(part.width for part in place.parts),
            self._dtype, self._zeros,
        )  # fmt: skip

    def prepare(self, backend: Backend) -> None:
        """Compile ahead of the first adapter: no step that is measured at the start has one."""
        for layer, adapters in zip(self._places, self.layers, strict=True):
            for place in layer:
                backend.prepare_adapters(getattr(adapters, place.field))

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
                for layer, adapters in zip(self._places, self.layers, strict=True):
                    for place in layer:
                        self._fill(adapter, slot, place, getattr(adapters, place.field))
            self.filled.add(slot + 1)
        finally:
            adapter.close()

    def _fill(
        self, adapter: AdapterFolder, slot: int, place: _Place, module: AdapterModule
    ) -> None:
        for index, (name, pieces) in enumerate(place.parts):
            rank = 0
            if name in adapter.modules:
                rank = adapter.config.rank
                each = 4 * (module.a_CMRK.shape[-1] + module.widths[index])  # bytes of a rank
                step = max(1, _PIECE_BYTES // each)
                for begin in range(0, rank, step):
                    ranks = (begin, min(begin + step, rank))
                    a_RK = adapter.down(name, Shard(ranks, place.columns))
                    b_each = [
                        adapter.up(name, Shard(piece.rows, ranks), piece.order, factor)
                        for piece, factor in pieces
                    ]
                    check_wanted()  # files may have hung
                    module.put(slot, index, begin, a_RK, torch.cat(b_each))
                    if ranks[1] < rank:
                        self.pace.pause()
            module.end(slot, index, rank)
            self.pace.pause()


def _places_of(config: DecoderConfig, layer: int, part: Split, spec: StageSpec) -> list[_Place]:
    """The linear layers of one layer that adapters may change. part: of a layer without sizes of
    its own."""
    one, prefix, by = config.at(layer), layer_prefix(config, layer), config.multipliers or _ONES
    if one is not config:
        part = split(one, spec)
    names, hidden = one.names, (0, config.hidden_size)

    def inputs(
        field: str, where: str, pieces: list[Piece], factors: tuple[float, ...] = ()
    ) -> _Place:
        each = zip(pieces, factors or (1.0,) * len(pieces), strict=True)
        by_name = groupby(each, key=lambda pair: where + pair[0].name)
        return _Place(field, [_Part(name, list(rows)) for name, rows in by_name], hidden)

    def out(field: str, name: str, columns: Range, factor: float) -> _Place:
        return _Place(field, [_Part(name, [(Piece(name, hidden), factor)])], columns)

    if config.has_mixer(layer):
        found = [
            inputs("qkv", prefix, mixer_pieces(one, part)),
            inputs("gates", prefix, rate_pieces(one, part)),
            out("out", prefix + names.mixer.out, part.mixed, 1.0),
        ]
    else:
        found = [
            inputs("qkv", prefix, qkv_pieces(one, part)),
            inputs("gates", prefix, gate_pieces(one, part)),
            out("out", prefix + names.out, part.attended, by.attention),
        ]
    if config.mixer_beside:
        found += [
            inputs("beside_inputs", prefix, mixer_pieces(one, part), by.mixer_inputs),
            out("beside_out", prefix + names.mixer.out, part.mixed, by.mixer),
        ]
    if config.has_mlp(layer) and not config.has_experts(layer):
        mlp, pieces = mlp_prefix(config, layer), gate_up_pieces(one, part)
        factors = (*[by.gate] * (len(pieces) - 1), 1.0)
        found += [
            inputs("gate_up", mlp, pieces, factors),
            out("down", mlp + names.down, part.inner, by.mlp),
        ]
    return [place for place in found if place.parts]
