"""Loads what layers have in place of attention: this rank's heads or channels of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from actors.stage.models.config import DecoderConfig, LinearAttention, Mamba2, ShortConv
from actors.stage.models.mixers import LinearAttentionMixer, Mamba2Mixer, ShortConvMixer
from actors.stage.models.split import Range, Split
from actors.stage.weights.linears import LinearLoader
from actors.stage.weights.mixer_names import mixer_shapes
from actors.stage.weights.names import Piece
from actors.stage.weights.source import Shard
from kernels.layer_weights import Linear, MixerBeside
from kernels.recurrence import Mixer, Recurrence

Fetch = Callable[..., torch.Tensor]  # (name, *rows), these rows one below another


def mixer_pieces(config: DecoderConfig, part: Split) -> list[Piece]:
    """What `LayerWeights.qkv` is in a layer with a mixer."""
    names, mixer = config.names.mixer, config.mixer
    if isinstance(mixer, LinearAttention):
        ranges = _ranges(mixer, part.mixer)
        if names.z is not None:
            *inputs, gates = ranges
            return [*(Piece(names.inputs, rows) for rows in inputs), Piece(names.z, gates)]
        heads, key, values = mixer.values_per_key, mixer.key_dim, mixer.value_dim
        return [_grouped(names.inputs, part.mixer, (key, key, heads * values, heads * values))]
    if isinstance(mixer, Mamba2):
        return [Piece(names.inputs, rows) for rows in _mamba_ranges(mixer, part.mixer)]
    size, (begin, end) = config.hidden_size, part.mixer
    return [Piece(names.inputs, (i * size + begin, i * size + end)) for i in range(3)]


def rate_pieces(config: DecoderConfig, part: Split) -> list[Piece]:
    """What `LayerWeights.gates` is in a layer with a mixer: empty without rates and decays."""
    names, mixer = config.names.mixer, config.mixer
    if not isinstance(mixer, LinearAttention):
        return []
    each, (begin, end) = mixer.values_per_key, part.mixer
    if names.decays is None:
        return [_grouped(names.rates, part.mixer, (each, each))]
    return [Piece(name, (begin * each, end * each)) for name in (names.rates, names.decays)]


def load_rates(loader: LinearLoader, prefix: str) -> Linear | None:
    """One layer's rates and decays, if it has them, which are never quantized."""

    def weight(piece: Piece) -> torch.Tensor:
        shape, rows = loader.shapes[piece.name][0], Shard(rows=piece.rows)
        return loader.dense(prefix + piece.name, shape, rows, piece.order)

    weights = [weight(piece) for piece in rate_pieces(loader.config, loader.split)]
    return loader.backend.pack_linear(torch.cat(weights), None) if weights else None


def load_mixer(loader: LinearLoader, prefix: str) -> Mixer:
    """One layer's."""
    config, part, mixer = loader.config, loader.split.mixer, loader.config.mixer
    names, shapes = config.names.mixer, mixer_shapes(config)

    def fetch(name: str, *rows: Range) -> torch.Tensor:
        parts = [
            loader.fetch(prefix + name, shapes[name], Shard(rows=one), dtype=torch.float32)
            for one in rows
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    conv, bias = f"{names.conv}.weight", f"{names.conv}.bias"
    if isinstance(mixer, ShortConv):
        return ShortConvMixer(
            backend=loader.backend,
            conv_JC=fetch(conv, part)[:, 0].T.contiguous(),
            conv_bias_C=fetch(bias, part) if mixer.bias else None,
            dtype=loader.dtype,
        )
    if isinstance(mixer, Mamba2):
        return _mamba(loader, mixer, prefix, fetch)
    if mixer is None:
        raise RuntimeError("the layer has attention")

    begin, end = part
    heads = (begin * mixer.values_per_key, end * mixer.values_per_key)
    return LinearAttentionMixer(
        backend=loader.backend,
        form=Recurrence(
            end - begin, heads[1] - heads[0], mixer.key_dim, mixer.value_dim, delta=True
        ),
        conv_JC=fetch(conv, *_ranges(mixer, part)[:3])[:, 0].T.contiguous(),
        log_decay_N=-fetch(names.decay_log, heads).exp(),
        step_bias_N=fetch(names.step_bias, heads),
        norm_D=loader.fetch(f"{prefix}{names.norm}.weight", (mixer.value_dim,)),
        eps=config.norm_eps,
        dtype=loader.dtype,
    )


def load_beside(loader: LinearLoader, prefix: str) -> MixerBeside:
    """One layer's."""
    return MixerBeside(
        loader.column_parallel(prefix, mixer_pieces(loader.config, loader.split)),
        load_mixer(loader, prefix),
        loader.row_parallel(prefix, loader.config.names.mixer.out, loader.split.mixed),
    )


def _mamba(loader: LinearLoader, mixer: Mamba2, prefix: str, fetch: Fetch) -> Mamba2Mixer:
    names, heads, ranks = loader.config.names.mixer, loader.split.mixer, loader.spec.tensor_ranks
    first, last = _groups(mixer, heads)
    start = mixer.value_size  # gates, which are before the convolution's channels
    ranges = [(begin - start, end - start) for begin, end in _mamba_ranges(mixer, heads)[:3]]
    conv, skip_N = f"{names.conv}.bias", fetch(names.skip, heads)
    return Mamba2Mixer(
        backend=loader.backend,
        form=Recurrence(
            last - first, heads[1] - heads[0], mixer.state_dim, mixer.head_dim, delta=False
        ),
        conv_JC=fetch(f"{names.conv}.weight", *ranges)[:, 0].T.contiguous(),
        conv_bias_C=fetch(conv, *ranges) if mixer.conv_bias else None,
        log_decay_N=-fetch(names.decay_log, heads).exp(),
        step_bias_N=fetch(names.step_bias, heads),
        step_limits=mixer.step_limits,
        skip_X=skip_N.repeat_interleave(mixer.head_dim),
        ones_X=skip_N.new_ones(len(skip_N) * mixer.head_dim // (last - first)),
        norm_X=fetch(f"{names.norm}.weight", loader.split.mixed) if mixer.normed else None,
        num_norms=last - first,
        num_ranks=1 if mixer.num_groups > 1 else ranks,
        eps=mixer.norm_eps,
        dtype=loader.dtype,
    )


def _mamba_ranges(mixer: Mamba2, heads: Range) -> list[Range]:
    """Rows of queries, keys, values, gates and steps of these heads. Stored are gates, values,
    keys, queries and steps, of which all but the gates and the steps are the convolution's."""
    values, keys = mixer.value_size, mixer.key_size
    groups = _groups(mixer, heads)
    parts = (
        (2 * values + keys, mixer.state_dim, groups),
        (2 * values, mixer.state_dim, groups),
        (values, mixer.head_dim, heads),
        (0, mixer.head_dim, heads),
        (2 * values + 2 * keys, 1, heads),
    )
    return [(start + begin * width, start + end * width) for start, width, (begin, end) in parts]


def _groups(mixer: Mamba2, heads: Range) -> Range:
    """The groups of these heads."""
    each = mixer.num_heads // mixer.num_groups
    return heads[0] // each, -(-heads[1] // each)


def _ranges(mixer: LinearAttention, heads: Range) -> list[Range]:
    """Rows of queries, keys, values and gates of these key heads, where each are stored together;
    gates count from their own first row."""
    begin, end = heads
    key, value = mixer.key_dim, mixer.values_per_key * mixer.value_dim
    starts = ((0, key), (mixer.key_size, key), (2 * mixer.key_size, value), (0, value))
    return [(start + begin * width, start + end * width) for start, width in starts]


def _grouped(name: str, groups: Range, widths: tuple[int, ...]) -> Piece:
    """Rows stored group by group, each of parts of these widths -> the parts of all groups, one
    after another."""
    begin, end = groups
    size = sum(widths)
    starts = torch.arange(end - begin)[:, None] * size
    offsets = torch.split(torch.arange(size), list(widths))
    order = torch.cat([(starts + offset).flatten() for offset in offsets])
    return Piece(name, (begin * size, end * size), order)
