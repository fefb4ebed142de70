"""A cost model with tile edges."""

from __future__ import annotations

from actors.scheduling.cost.model import CostModel

# A memory floor of 10 ms, then 6.5 ms a tile of 64 tokens: flat inside, a jump at each edge.
_TILES = [(edge, 0.0070 + 0.0065 * edge / 64) for edge in range(64, 2049, 64)]
TILED = CostModel(
    "tiled",
    (
        (1, 0.010),
        *(
            knot
            for edge, seconds in _TILES
            for knot in ((edge, seconds), (edge + 1, seconds + 0.0060))
        ),
    ),
    per_request_s=2e-5,
    decode_kv_s=2e-8,
    prefill_pair_s=4e-9,
    kv_tokens=64_000,
    max_model_len=4096,
)
