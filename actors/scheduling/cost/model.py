"""The predicted time of a step: a small, explainable model, stored as data.

One micro-batch on one pipeline stage costs

    overhead_s                                 launching, planning, sampling
  + tokens_s[num_tokens]                       linear layers, norms, all-reduce: at first the
                                               time of streaming the weights (memory floor), then
                                               rising tile by tile. The floor is flat if all
                                               tokens read the same weights, and rises with the
                                               number of experts that they read
  + per_request_s * num_slices
  + prefill attention: per slice, per kv token read, per query-key pair, per chunk squared
  + decode attention:  per slice, per kv token read

Every term is linear in its coefficient, so a profile is fitted by non-negative least squares
(`actors.calibration.fit`), and evaluating one costs about a microsecond: cheap enough
for every iteration. The simulator, the budgets and the live engine use the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from actors.scheduling.cost.mix import Mix, causal_pairs


class StepTable:
    """A piecewise-linear function of a token count, with jumps.

    Knots are (tokens, seconds) in order. Between two knots the value is interpolated; a jump
    (tile quantization: 257 tokens cost far more than 256) is a pair of knots one token apart.
    Beyond the last knot it continues with the last slope over at least `tail` tokens.
    """

    __slots__ = ("_dense", "_last_tokens", "_tail_slope", "knots")

    def __init__(self, knots: Iterable[tuple[int, float]]) -> None:
        """Raises ValueError unless knots ascend strictly, start at 0 or more and never fall."""
        points = tuple((int(n), float(s)) for n, s in knots)
        if not points:
            points = ((0, 0.0),)
        for (n0, s0), (n1, s1) in pairwise(points):
            if n1 <= n0 or s1 < s0:
                raise ValueError(f"knots must ascend: ({n0}, {s0}) then ({n1}, {s1})")
        if points[0][0] < 0 or points[0][1] < 0:
            raise ValueError(f"first knot {points[0]} is negative")
        self.knots = points
        dense: list[float] = []
        for (n0, s0), (n1, s1) in pairwise(points):
            if not dense:
                dense = [s0] * n0
            slope = (s1 - s0) / (n1 - n0)
            dense.extend(s0 + slope * i for i in range(n1 - n0))
        if not dense:
            dense = [points[0][1]] * points[0][0]
        dense.append(points[-1][1])
        dense[0] = 0.0  # without tokens there is no work
        self._dense = dense
        self._last_tokens = len(dense) - 1
        self._tail_slope = _tail_slope(points)

    def __call__(self, num_tokens: int) -> float:
        if num_tokens <= self._last_tokens:
            return self._dense[num_tokens]
        return self._dense[-1] + (num_tokens - self._last_tokens) * self._tail_slope

    def largest(self, limit_s: float) -> int:
        """The most tokens whose value stays at or below limit_s (0 if none does)."""
        if limit_s < self._dense[-1]:
            return max(0, bisect_right(self._dense, limit_s) - 1)
        if self._tail_slope <= 0.0:
            return self._last_tokens
        return self._last_tokens + int((limit_s - self._dense[-1]) / self._tail_slope)


def _tail_slope(points: tuple[tuple[int, float], ...]) -> float:
    """Slope over the last half of the table, since that of a single tile step is misleading."""
    last_n, last_s = points[-1]
    index = min(bisect_left(points, (last_n // 2, 0.0)), len(points) - 2)
    if index < 0:
        return 0.0
    first_n, first_s = points[index]
    return (last_s - first_s) / (last_n - first_n)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step time of one deployment; all coefficients are for ONE pipeline stage, in seconds.

    tokens_s: knots (tokens, seconds) of everything that depends on the token count alone,
        the stage's tensor-parallel all-reduces included.
    transfer_s: knots of sending that many tokens' activations to the next stage. Calibration
        measures none, so that it is free by a calibrated model.
    last_stage_s: knots of what only the last stage does (the vocabulary projection), by slices.
    attention_window: positions a token sees at most (sliding window), 0 for all.
    ratio_quantiles: measured / predicted at given quantiles on held-out mixes, ascending.
    kv_tokens: KV capacity of the deployment in tokens, with the room that states take of it; 0 if
        unknown.
    state_tokens: room for the states of one request, in tokens of KV; 0: layers keep none.
    num_states: requests whose states the engine that was measured had room for; 0: none was, and
        they take at most half of `kv_tokens`.
    learnt: corrections learned by an engine for each kind of step, as initial values of the next
        engine: (number of the kind, mean, bound), in logs of measured / predicted (`online`).
    swap_block_s: moving one KV block to or from host memory; None: never measured.
    """

    name: str
    tokens_s: tuple[tuple[int, float], ...]
    num_stages: int = 1
    tensor_ranks: int = 1
    overhead_s: float = 0.0
    per_request_s: float = 0.0
    prefill_slice_s: float = 0.0
    prefill_kv_s: float = 0.0
    prefill_pair_s: float = 0.0
    prefill_square_s: float = 0.0
    decode_slice_s: float = 0.0
    decode_kv_s: float = 0.0
    transfer_s: tuple[tuple[int, float], ...] = ()
    last_stage_s: tuple[tuple[int, float], ...] = ()
    attention_window: int = 0
    tile_tokens: int = 1
    kv_tokens: int = 0
    state_tokens: int = 0
    num_states: int = 0
    max_model_len: int = 0
    swap_block_s: float | None = None
    ratio_quantiles: tuple[tuple[float, float], ...] = ((0.5, 1.0),)
    learnt: tuple[tuple[int, float, float], ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()
    _tokens: StepTable = field(init=False, repr=False, compare=False)
    _transfer: StepTable = field(init=False, repr=False, compare=False)
    _last: StepTable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_stages < 1 or self.tensor_ranks < 1:
            raise ValueError("num_stages and tensor_ranks are at least 1")
        object.__setattr__(self, "_tokens", StepTable(self.tokens_s))
        object.__setattr__(self, "_transfer", StepTable(self.transfer_s))
        object.__setattr__(self, "_last", StepTable(self.last_stage_s))

    # ---- predictions ------------------------------------------------------------------

    def linear_s(self, num_tokens: int) -> float:
        """Seconds of a stage's work that depends only on the number of tokens."""
        return self._tokens(num_tokens)

    def attention_s(self, mix: Mix) -> float:
        """Seconds one stage spends on attention."""
        return (
            self.decode_slice_s * mix.num_decodes
            + self.decode_kv_s * self._seen(mix)
            + self.prefill_slice_s * mix.num_prefills
            + self.prefill_kv_s * mix.prefill_kv_tokens
            + self.prefill_pair_s * mix.prefill_pairs
            + self.prefill_square_s * mix.prefill_squares
        )

    def _seen(self, mix: Mix) -> int:
        """KV tokens that its decodes read: of predicted ones, contexts may exceed the window."""
        seen, window = mix.decode_kv_tokens, self.attention_window
        return min(seen, mix.num_decodes * window) if window else seen

    def stage_s(self, mix: Mix) -> float:
        """Seconds the slowest (the last) stage is busy with this micro-batch."""
        slices = mix.num_decodes + mix.num_prefills
        return (
            self.overhead_s
            + self._tokens(mix.num_decodes + mix.prefill_tokens)
            + self._last(slices)
            + self.per_request_s * slices
            + self.decode_slice_s * mix.num_decodes
            + self.decode_kv_s * self._seen(mix)
            + self.prefill_slice_s * mix.num_prefills
            + self.prefill_kv_s * mix.prefill_kv_tokens
            + self.prefill_pair_s * mix.prefill_pairs
            + self.prefill_square_s * mix.prefill_squares
        )

    def last_s(self, num_slices: int) -> float:
        """Seconds of `stage_s` that only the last stage spends (the vocabulary projection)."""
        return self._last(num_slices)

    def send_s(self, num_tokens: int) -> float:
        """Seconds to hand a micro-batch's activations to the next stage."""
        return self._transfer(num_tokens)

    def latency_s(self, mix: Mix) -> float:
        """Seconds from the first stage's start to the last one's end, the pipeline being idle."""
        stage = self.stage_s(mix)
        if self.num_stages == 1:
            return stage
        early = stage - self._last(mix.num_slices)
        return (self.num_stages - 1) * (early + self._transfer(mix.num_tokens)) + stage

    def chunk_s(self, num_tokens: int, start: int) -> float:
        """Seconds that a prefill chunk adds beside its linear part: attention and per slice."""
        window = self.attention_window
        context = start + num_tokens
        return (
            self.per_request_s
            + self.prefill_slice_s
            + self.prefill_kv_s * (min(context, window + num_tokens) if window else context)
            + self.prefill_pair_s * causal_pairs(start, num_tokens, window)
            + self.prefill_square_s * (num_tokens * num_tokens)
        )

    def largest_chunk(self, mix: Mix, start: int, remaining: int, limit_s: float) -> int:
        """The longest next chunk of one prompt that keeps the step within limit_s; 0 if none.

        mix: the step so far. start, remaining: the prompt's computed and missing tokens. Exact
        to the token: step time never falls as a chunk grows, so it is found by bisection.
        """
        base_tokens = mix.num_decodes + mix.prefill_tokens
        base_s = (
            self.overhead_s
            + self.per_request_s * mix.num_slices
            + self._last(mix.num_slices + 1)
            + self.attention_s(mix)
        )
        room_s = limit_s - base_s
        # Attention only adds to the linear part, which therefore bounds the chunk from above.
        high = min(remaining, self._tokens.largest(room_s) - base_tokens)
        if high < 1:
            return 0
        tokens_s, chunk_s = self._tokens, self.chunk_s
        if tokens_s(base_tokens + high) + chunk_s(high, start) <= room_s:
            return high
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if tokens_s(base_tokens + middle) + chunk_s(middle, start) <= room_s:
                low = middle
            else:
                high = middle
        return low

    def stage_share_s(self, tbt_s: float, num_tokens: int) -> float:
        """Longest stage time with which a token passes all stages within tbt_s.

        With n stages a token takes n stages and n - 1 sends of (at most) num_tokens."""
        n = self.num_stages
        if n == 1:
            return tbt_s
        linear_s = self.linear_s(num_tokens)
        while num_tokens > 1 and linear_s * n > tbt_s:  # send only what fits a step
            num_tokens //= 2
            linear_s = self.linear_s(num_tokens)
        return (tbt_s - (n - 1) * self.send_s(num_tokens)) / n

    def ratio_at(self, quantile: float) -> float:
        """Measured / predicted step time at this quantile of the held-out error."""
        points = self.ratio_quantiles
        if quantile <= points[0][0]:
            return points[0][1]
        for (q0, r0), (q1, r1) in pairwise(points):
            if quantile <= q1:
                return r0 + (r1 - r0) * (quantile - q0) / (q1 - q0)
        return points[-1][1]

    # ---- as data ----------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; `from_dict` is its inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostModel:
        """Raises ValueError naming keys that are unknown or missing."""
        unknown = sorted(set(data) - _field_names())
        if unknown:
            raise ValueError(f"unknown cost model keys: {', '.join(unknown)}")
        missing = sorted({"name", "tokens_s"} - set(data))
        if missing:
            raise ValueError(f"missing cost model keys: {', '.join(missing)}")
        values = dict(data)
        for key in ("tokens_s", "transfer_s", "last_stage_s"):
            values[key] = tuple((int(n), float(s)) for n, s in values.get(key, ()))
        if "ratio_quantiles" in values:
            values["ratio_quantiles"] = tuple(
                (float(q), float(r)) for q, r in values["ratio_quantiles"]
            )
        values["learnt"] = tuple(
            (int(kind), float(mean), float(bound)) for kind, mean, bound in values.get("learnt", ())
        )
        values["notes"] = tuple(str(note) for note in values.get("notes", ()))
        return cls(**values)


def _field_names() -> set[str]:
    return {f.name for f in fields(CostModel) if f.init}
