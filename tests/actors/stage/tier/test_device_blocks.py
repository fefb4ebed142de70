"""What a device keeps of what it saved last: the oldest gives way, but none that is being sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from actors.stage.tier.direct import DeviceBlocks
from tests.actors.stage.tier.test_shared import digest

SHAPE = (2, 3, 8)  # of a block: layers, and whatever a backend keeps of one


def block(number: int) -> torch.Tensor:
    return torch.arange(48, dtype=torch.int32).view(SHAPE) + 1000 * number


def blocks_of(num_places: int, *numbers: int) -> DeviceBlocks:
    made = DeviceBlocks(torch.zeros((num_places, *SHAPE), dtype=torch.int32))
    for number in numbers:
        assert made.put(digest(number), fills(number))
    return made


def fills(number: int) -> Callable[[torch.Tensor], None]:
    def fill(place: torch.Tensor) -> None:
        place.copy_(block(number))

    return fill


def there(blocks: DeviceBlocks, *numbers: int) -> list[int]:
    """Numbers of those that are lent when these are asked for."""
    with blocks.lent([digest(n) for n in numbers]) as places:
        return [int(place.flatten()[0]) // 1000 for place in places]


def test_the_oldest_gives_its_place() -> None:
    blocks = blocks_of(3, 1, 2, 3)
    assert blocks.put(digest(1), pytest.fail), "it is there: nothing is copied"
    assert blocks.put(digest(4), fills(4))
    assert there(blocks, 3, 1, 4, 2, 3) == [3, 1, 4]
    assert there(blocks, 2) == []


def test_what_is_being_sent_keeps_its_place() -> None:
    blocks = blocks_of(2, 1, 2)
    with blocks.lent([digest(1)]) as (place,):
        assert blocks.put(digest(3), fills(3))
        assert there(blocks, 2) == []
        with blocks.lent([digest(3), digest(1)]):
            assert not blocks.put(digest(4), pytest.fail)
        assert torch.equal(place, block(1))
    assert blocks.put(digest(4), fills(4))
    assert there(blocks, 3, 4) == [3, 4]


def test_a_place_that_could_not_be_filled_is_free_again() -> None:
    blocks = blocks_of(1)

    def fails(place: torch.Tensor) -> None:
        raise RuntimeError("no copy")

    with pytest.raises(RuntimeError):
        blocks.put(digest(1), fails)
    assert there(blocks, 1) == []
    assert blocks.put(digest(2), fills(2))
    assert there(blocks, 2) == [2]


def test_what_is_being_sent_when_all_is_forgotten_keeps_its_place_until_it_is_sent() -> None:
    blocks = blocks_of(2, 1, 2)
    with blocks.lent([digest(1)]) as (place,):
        blocks.clear()
        assert there(blocks, 1) == there(blocks, 2) == []
        assert blocks.put(digest(3), fills(3))
        with blocks.lent([digest(3)]):
            assert not blocks.put(digest(4), pytest.fail)
        assert torch.equal(place, block(1))
    assert blocks.put(digest(4), fills(4))
    assert there(blocks, 3, 4) == [3, 4]
