"""Shapes of the tensors that layers have in place of attention."""

from __future__ import annotations

from actors.stage.models.config import DecoderConfig, LinearAttention, ShortConv

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
    if isinstance(mixer, LinearAttention):
        return {
            f"{names.conv}.weight": (2 * mixer.key_size + mixer.value_size, 1, mixer.taps),
            names.decay_log: (mixer.num_heads,),
            names.step_bias: (mixer.num_heads,),
            f"{names.norm}.weight": (mixer.value_dim,),
        }
    return {}
