"""A rank's part of the model: layers by stage, heads and columns by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from actors.stage.models.config import DecoderConfig, LinearAttention, Mamba2, ModelError
from actors.stage.spec import StageSpec

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """Half-open ranges of the whole model that belong to one rank of one stage.

    q and kv are feature rows (heads times head_dim), attended those of the heads' results. kv heads
    are replicated if there are fewer of them than ranks. Every rank's `vocab` range has the same
    length; the last one may extend past the vocabulary, where rows are zero. mixer: key heads of
    linear attention, heads of Mamba-2 or channels of a convolution; mixed: features of its results.
    """

    layers: Range
    num_heads: int
    num_kv_heads: int
    q: Range
    kv: Range
    attended: Range
    inner: Range
    expert_inner: Range
    shared_inner: Range
    vocab: Range
    mixer: Range
    mixed: Range


def split_layers(num_layers: int, num_stages: int) -> tuple[Range, ...]:
    """Layers of each stage, as even as possible.

    The remainder goes to the middle stages first, then to the first stage, because the last one
    also computes the language-model head, and a pipeline is as slow as its slowest stage.

    >>> split_layers(7, 3)
    ((0, 2), (2, 5), (5, 7))
    """
    if num_stages > num_layers:
        raise ModelError(f"{num_layers} layers cannot fill {num_stages} pipeline stages")
    base, remainder = divmod(num_layers, num_stages)
    takers = [*range(1, num_stages - 1), 0][:remainder]
    ranges: list[Range] = []
    start = 0
    for stage in range(num_stages):
        end = start + base + (stage in takers)
        ranges.append((start, end))
        start = end
    return tuple(ranges)


def _check_stages(config: DecoderConfig, ranges: Sequence[Range]) -> None:
    if config.layer_input_size and len(ranges) > 1:
        raise ModelError(
            f"hidden_size_per_layer_input {config.layer_input_size}: a model whose layers have "
            f"inputs of their own cannot be split into {len(ranges)} pipeline stages"
        )
    for first, end in ranges:
        for layer, kind in enumerate(config.kinds[first:end], first):
            if kind.kv_source < first:
                raise ModelError(
                    f"num_kv_shared_layers: layer {layer} attends to the keys and values of layer "
                    f"{kind.kv_source}, which is in another of {len(ranges)} pipeline stages"
                )


def _check_sizes(config: DecoderConfig, ranks: int) -> None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % ranks:
        raise ModelError(f"{heads} attention heads cannot be split over {ranks} ranks")
    if kv_heads % ranks and ranks % kv_heads:
        raise ModelError(f"{kv_heads} key/value heads cannot be split over {ranks} ranks")
    for size in (config.inner_size, config.expert_size, config.shared_expert_size):
        if size % ranks:
            raise ModelError(f"inner size {size} cannot be split over {ranks} ranks")
    groups = config.mixer.num_groups if isinstance(config.mixer, Mamba2) else 1
    if groups > 1 and groups % ranks:
        raise ModelError(f"{groups} groups of Mamba-2's heads cannot be split over {ranks} ranks")
    units, unit = _mixer_units(config)
    if config.mixer is not None and units % ranks:
        raise ModelError(f"{units} {unit} cannot be split over {ranks} ranks")


def _mixer_units(config: DecoderConfig) -> tuple[int, str]:
    """What a mixer is split by over ranks: how many, and their name."""
    if isinstance(config.mixer, LinearAttention):
        return config.mixer.num_key_heads, "key heads of linear attention"
    if isinstance(config.mixer, Mamba2):
        return config.mixer.num_heads, "heads of Mamba-2"
    return config.hidden_size, "channels"


def split(config: DecoderConfig, spec: StageSpec) -> Split:
    """The part of `spec`'s rank, of the sizes that are not a layer's own. Raises ModelError if
    heads or inner size of any layer do not divide, or if a stage would need another's cache."""
    rank, ranks = spec.rank, spec.tensor_ranks
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.inner_size
    expert, shared = config.expert_size, config.shared_expert_size
    for one in (config, *map(config.at, range(len(config.kinds)))):
        _check_sizes(one, ranks)
    units, _ = _mixer_units(config)
    units_of_rank = (rank * units // ranks, (rank + 1) * units // ranks)
    mixer, width = config.mixer, 1
    if isinstance(mixer, LinearAttention):
        width = mixer.values_per_key * mixer.value_dim
    elif isinstance(mixer, Mamba2):
        width = mixer.head_dim
    local_heads, local_kv = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * kv_heads // ranks
    value_dim = config.head_dim if config.latent is None else config.latent.value_dim
    chunk = -(-config.vocab_size // ranks)
    ranges = split_layers(config.num_layers, spec.num_stages)
    _check_stages(config, ranges)
    return Split(
        layers=ranges[spec.stage],
        num_heads=local_heads,
        num_kv_heads=local_kv,
        q=(rank * local_heads * config.head_dim, (rank + 1) * local_heads * config.head_dim),
        kv=(first_kv * config.head_dim, (first_kv + local_kv) * config.head_dim),
        attended=(rank * local_heads * value_dim, (rank + 1) * local_heads * value_dim),
        inner=(rank * inner // ranks, (rank + 1) * inner // ranks),
        expert_inner=(rank * expert // ranks, (rank + 1) * expert // ranks),
        shared_inner=(rank * shared // ranks, (rank + 1) * shared // ranks),
        vocab=(rank * chunk, (rank + 1) * chunk),
        mixer=units_of_rank,
        mixed=(units_of_rank[0] * width, units_of_rank[1] * width),
    )
