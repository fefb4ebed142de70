"""From a weight source to the packed weights of one rank of one stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from actors.stage.models.config import DecoderConfig
from actors.stage.models.decoder import StageWeights
from actors.stage.models.rope import cos_sin_table
from actors.stage.models.split import Range, Split
from actors.stage.spec import StageSpec
from actors.stage.weights.names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, layer_shapes
from actors.stage.weights.quantized import PackedLayers
from actors.stage.weights.source import WHOLE, Part, WeightSource
from kernels.interface import Backend, LayerWeights, Linear

Progress = Callable[[float], None]


@dataclass(slots=True)
class Loader:
    """Reads this rank's slices, lays fused projections side by side and packs them."""

    source: WeightSource
    config: DecoderConfig
    split: Split
    spec: StageSpec
    backend: Backend
    device: torch.device
    dtype: torch.dtype
    packed: PackedLayers | None = None
    num_parameters: int = 0

    def stage(self, max_model_len: int, progress: Progress) -> StageWeights:
        """Everything the stage holds. progress is told the fraction done, 0 to 1."""
        spec, config = self.spec, self.config
        first, end = self.split.layers
        parts_done, parts_all = 0, end - first + spec.is_first + spec.is_last

        def step() -> None:
            nonlocal parts_done
            parts_done += 1
            progress(parts_done / parts_all)

        tied = config.tied_embeddings
        vocabulary_VH = (
            self._vocabulary(EMBEDDING) if spec.is_first or (tied and spec.is_last) else None
        )
        if spec.is_first:
            step()
        layers = []
        for layer in range(first, end):
            layers.append(self._layer(layer))
            step()
        norm_H, head = None, None
        if spec.is_last:
            norm_H = self._vector(FINAL_NORM, config.hidden_size)
            head_VH = vocabulary_VH if tied else self._vocabulary(HEAD)
            if head_VH is None:
                raise RuntimeError("a tied head needs the embedding")
            # int4 is too coarse for the layer that names the token; it streams as int8.
            quantization = "none" if spec.quantization == "none" else "int8"
            head = self.backend.pack_linear(head_VH, None, quantization)
            step()
        return StageWeights(
            layers=layers,
            embedding_VH=vocabulary_VH if spec.is_first else None,
            final_norm_H=norm_H,
            head=head,
            vocab_start=self.split.vocab[0],
            cos_sin_PD=cos_sin_table(config.rope, max_model_len).to(self.device),
            hidden_size=config.hidden_size,
            dtype=self.dtype,
        )

    def _layer(self, layer: int) -> LayerWeights:
        prefix, config, part = layer_prefix(layer), self.config, self.split
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [("q_proj", part.q), ("k_proj", part.kv), ("v_proj", part.kv)]
        return LayerWeights(
            input_norm_H=self._vector(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=self._column_parallel(layer, [(attention + n, r) for n, r in qkv], config.qkv_bias),
            out=self._row_parallel(layer, attention + "o_proj", part.q, config.out_bias),
            post_norm_H=self._vector(
                prefix + "post_attention_layernorm.weight", config.hidden_size
            ),
            gate_up=self._column_parallel(
                layer, [(mlp + "gate_proj", part.inner), (mlp + "up_proj", part.inner)],
                config.mlp_bias,
            ),
            down=self._row_parallel(layer, mlp + "down_proj", part.inner, config.mlp_bias),
            q_norm_D=self._head_norm(attention + "q_norm.weight"),
            k_norm_D=self._head_norm(attention + "k_norm.weight"),
            sliding_window=config.sliding_windows[layer],
        )  # fmt: skip

    def _column_parallel(self, layer: int, named: list[tuple[str, Range]], biased: bool) -> Linear:
        """Projections whose output features are split over ranks, as one matrix."""
        parts = [(name, Part(rows=rows)) for name, rows in named]
        biases = [self._bias(layer, name, part, biased) for name, part in parts]
        bias_O = None
        if any(bias is not None for bias in biases):
            sizes = [rows[1] - rows[0] for _, rows in named]
            bias_O = torch.cat(
                [
                    torch.zeros(size, dtype=self.dtype, device=self.device) if b is None else b
                    for b, size in zip(biases, sizes, strict=True)
                ]
            )
        return self._pack(layer, parts, bias_O)

    def _row_parallel(self, layer: int, name: str, columns: Range, biased: bool) -> Linear:
        """A projection whose input features are split; ranks' results are summed, so rank 0 alone
        adds the bias."""
        bias_O = self._bias(layer, name, WHOLE, biased) if self.spec.rank == 0 else None
        return self._pack(layer, [(name, Part(columns=columns))], bias_O)

    def _pack(
        self, layer: int, parts: list[tuple[str, Part]], bias_O: torch.Tensor | None
    ) -> Linear:
        """Parts of layers, one above the other. Layers stored quantised stay as they are."""
        shapes = {name: self._shape(layer, f"{name}.weight") for name, _ in parts}
        if self.packed is not None and all(name in self.packed for name, _ in parts):
            whole = [self.packed.read(name, shapes[name], part) for name, part in parts]
            self.num_parameters += sum(weight.values_OK.numel() for weight in whole)
            return self.backend.pack_quantized(whole, bias_O, self.dtype, self.device)
        weights = [self._dense(name, shapes[name], part) for name, part in parts]
        weight_OK = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.backend.pack_linear(weight_OK, bias_O, self.spec.quantization)

    def _dense(self, name: str, shape: tuple[int, ...], part: Part) -> torch.Tensor:
        if self.packed is not None and name in self.packed:
            weight_OK = self.packed.read(name, shape, part).dequantize(self.dtype)
            self.num_parameters += weight_OK.numel()
            return weight_OK.to(self.device)
        return self._fetch(f"{name}.weight", shape, part)

    def _bias(self, layer: int, name: str, part: Part, biased: bool) -> torch.Tensor | None:
        """GPTQ tools store a bias with every layer, whether or not the architecture has one."""
        if not biased and not (self.packed is not None and self.packed.has_bias(name)):
            return None
        out_features = self._shape(layer, f"{name}.weight")[0]
        return self._fetch(f"{name}.bias", (out_features,), part)

    def _shape(self, layer: int, name: str) -> tuple[int, ...]:
        return layer_shapes(self.config)[name.removeprefix(layer_prefix(layer))]

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self._fetch(name, (size,), WHOLE)

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self._vector(name, self.config.head_dim) if self.config.qk_norm else None

    def _vocabulary(self, name: str) -> torch.Tensor:
        """This rank's rows of an embedding or head, padded with zeros to the common length."""
        size, (start, end) = self.config.vocab_size, self.split.vocab
        rows = (min(start, size), min(end, size))
        shape = (size, self.config.hidden_size)
        part_VH = self._dense(name.removesuffix(".weight"), shape, Part(rows=rows))
        missing = (end - start) - part_VH.shape[0]
        return functional.pad(part_VH, (0, 0, 0, missing)) if missing else part_VH

    def _fetch(self, name: str, shape: tuple[int, ...], part: Part) -> torch.Tensor:
        tensor = self.source.read(name, shape, part)
        self.num_parameters += tensor.numel()
        return tensor.to(self.device)
