"""A rank's part of the model: layers by stage, heads and columns by rank."""

from __future__ import annotations

from dataclasses import dataclass

from actors.stage.models.config import DecoderConfig, LinearAttention, ModelError
from actors.stage.spec import StageSpec

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """Half-open ranges of the whole model that belong to one rank of one stage.

    q and kv are feature rows (heads times head_dim), attended those of the heads' results. kv heads
    are replicated if there are fewer of them than ranks. Every rank's `vocab` range has the same
    length; the last one may extend past the vocabulary, where rows are zero. mixer: key heads of
    linear attention, or channels of a convolution; mixed: features of its results.
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


def split(config: DecoderConfig, spec: StageSpec) -> Split:
    """The part of `spec`'s rank. Raises ModelError if heads or inner size do not divide."""
    rank, ranks = spec.rank, spec.tensor_ranks
    heads, kv_heads, inner = config.num_heads, config.num_kv_heads, config.inner_size
    if heads % ranks:
        raise ModelError(f"{heads} attention heads cannot be split over {ranks} ranks")
    if kv_heads % ranks and ranks % kv_heads:
        raise ModelError(f"{kv_heads} key/value heads cannot be split over {ranks} ranks")
    expert, shared = config.expert_size, config.shared_expert_size
    for size in (inner, expert, shared):
        if size % ranks:
            raise ModelError(f"inner size {size} cannot be split over {ranks} ranks")
    units, width, unit = config.hidden_size, 1, "channels"
    if isinstance(mixer := config.mixer, LinearAttention):
        units, unit = mixer.num_key_heads, "key heads of linear attention"
        width = mixer.values_per_key * mixer.value_dim
    if mixer is not None and units % ranks:
        raise ModelError(f"{units} {unit} cannot be split over {ranks} ranks")
    units_of_rank = (rank * units // ranks, (rank + 1) * units // ranks)
    local_heads, local_kv = heads // ranks, max(1, kv_heads // ranks)
    first_kv = rank * kv_heads // ranks
    value_dim = config.head_dim if config.latent is None else config.latent.value_dim
    chunk = -(-config.vocab_size // ranks)
    return Split(
        layers=split_layers(config.num_layers, spec.num_stages)[spec.stage],
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
