"""Shapes of the tensors that layers have in place of attention."""

from __future__ import annotations

from actors.stage.models.config import DecoderConfig, LinearAttention, Mamba2, ShortConv

Shapes = dict[str, tuple[int, ...]]
LinearShapes = dict[str, tuple[tuple[int, int], bool]]


def mixer_linear_shapes(config: DecoderConfig) -> LinearShapes:
    """Its linear layers: (out, in features) and whether there is a bias; none without a mixer."""
    names, hidden, mixer = config.names.mixer, config.hidden_size, config.mixer
    if mixer is None:
        return {}
    if isinstance(mixer, ShortConv):
        return {
            names.inputs: ((3 * hidden, hidden), mixer.bias),
            names.out: ((hidden, hidden), mixer.bias),
        }
    keys, values, heads = mixer.key_size, mixer.value_size, mixer.num_heads
    if isinstance(mixer, Mamba2):
        return {
            names.inputs: ((2 * values + 2 * keys + heads, hidden), mixer.bias),
            names.out: ((hidden, values), mixer.bias),
        }
    inputs = {names.inputs: 2 * keys + 2 * values, names.rates: 2 * heads}
    if names.z is not None and names.decays is not None:
        inputs = {
            names.inputs: 2 * keys + values,
            names.z: values,
            names.rates: heads,
            names.decays: heads,
        }
    shapes = {name: ((size, hidden), False) for name, size in inputs.items()}
    return {**shapes, names.out: ((hidden, values), False)}


def mixer_shapes(config: DecoderConfig) -> Shapes:
    """Its other tensors, as stored."""
    names, mixer = config.names.mixer, config.mixer
    if isinstance(mixer, ShortConv):
        size = config.hidden_size
        biases = {f"{names.conv}.bias": (size,)} if mixer.bias else {}
        return {f"{names.conv}.weight": (size, 1, mixer.taps), **biases}
    if mixer is None:
        return {}
    channels, heads = 2 * mixer.key_size + mixer.value_size, (mixer.num_heads,)
    shapes: Shapes = {
        f"{names.conv}.weight": (channels, 1, mixer.taps),
        names.decay_log: heads,
        names.step_bias: heads,
    }
    if isinstance(mixer, LinearAttention):
        return {**shapes, f"{names.norm}.weight": (mixer.value_dim,)}
    if mixer.conv_bias:
        shapes[f"{names.conv}.bias"] = (channels,)
    norm = {f"{names.norm}.weight": (mixer.value_size,)} if mixer.normed else {}
    return {**shapes, names.skip: heads, **norm}
