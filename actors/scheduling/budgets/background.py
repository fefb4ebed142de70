"""How much background work a step of live requests may hold."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from actors.scheduling.cost.mix import Mix
from actors.scheduling.cost.online import OnlineCostModel
from actors.scheduling.plan import StepShape

LENGTHENED = 1.1  # times, a step of live decodes, by the background work that it holds too


@dataclass(slots=True)
class BackgroundRoom:
    """Background work lengthens steps of live decodes by a tenth at most.

    Where one token takes more, some steps have none, so that it is a tenth of all their time. A
    step with a live prompt, which is among the longest as it is and so decides the P99 of the time
    between tokens, has one token, or more that cost nothing. Steps of a pipeline between two of
    live decodes are as long as these.
    """

    cost: OnlineCostModel
    _limit_s: float = field(init=False, default=0.0)
    _between_s: float = field(init=False, default=0.0)  # of a step between two of the live decodes
    _num_live: int = field(init=False, default=0)  # decodes
    _saved_s: float = field(init=False, default=0.0)  # a tenth of the steps since one had some
    _has_turn: bool = field(init=False, default=True)  # the step may have some

    def num_decodes(self, live: StepShape, most: int, context: int) -> int:
        """As `TokenBudget.num_background_decodes`."""
        mix = Mix.of_shape(live, self.cost.profile.attention_window)
        self._num_live = num_live = mix.num_decodes
        kv_tokens = mix.decode_kv_tokens
        live_s = 0.0
        if mix.num_slices:
            live_s = self._seconds(mix)
            self._between_s = LENGTHENED * self._seconds(self._decodes(live))
        has_prompt = len(live.prefills) > live.num_drafted
        self._limit_s = live_s if has_prompt else self._between_s

        def seconds(count: int) -> float:
            mix.num_decodes, mix.decode_kv_tokens = num_live + count, kv_tokens + count * context
            return self._seconds(mix)

        count = bisect_right(range(1, most + 1), self._limit_s, key=seconds)
        self._saved_s += (LENGTHENED - 1.0) * live_s
        self._has_turn = count > 0 or live_s == 0.0 or seconds(1) - live_s <= self._saved_s
        if not self._has_turn:
            return 0
        self._saved_s = 0.0
        return max(1, count)

    def num_tokens(self, shape: StepShape, most: int) -> int:
        """As `TokenBudget.room_for_background`, at most `most`."""
        if not self._has_turn:
            return 0
        mix = Mix.of_shape(shape, self.cost.profile.attention_window)
        room = self.cost.profile.largest_chunk(mix, 0, most, self._limit_s / self.cost.ratio(mix))
        return max(room, int(mix.num_decodes == self._num_live))

    def _decodes(self, live: StepShape) -> Mix:
        """Those of a step, one at least."""
        decodes = live._replace(prefills=live.prefills[: live.num_drafted])
        mix = Mix.of_shape(decodes, self.cost.profile.attention_window)
        return mix if mix.num_slices else Mix(1)

    def _seconds(self, mix: Mix) -> float:
        return self.cost.profile.stage_s(mix) * self.cost.ratio(mix)
