from __future__ import annotations

import pytest

from actors.stage.grammars.matcher import MaskTime


@pytest.mark.parametrize(("mask_s", "count"), [(0.0019, None), (0.0125, 20), (0.3, 1)])
def test_time_is_up_after_what_is_more_than_fair(mask_s: float, count: int | None) -> None:
    now_s = 0.0
    spent = MaskTime(lambda: now_s)
    ended = None
    for number in range(1, 1000):
        begin_s, now_s = now_s, now_s + mask_s
        spent.add(begin_s)
        if spent.is_up:
            ended = number
            break
    assert ended == count


def test_time_can_be_ended() -> None:
    spent = MaskTime(lambda: 0.0)
    spent.end()
    spent.add(0.0)
    assert spent.is_up
