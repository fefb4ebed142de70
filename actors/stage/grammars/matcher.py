"""A grammar's matcher, whichever library it is of, and how long its masks may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray


class Matcher(Protocol):
    """Follows one text through a grammar, token by token."""

    @property
    def is_over(self) -> bool:
        """Whether only an end token may follow, if any."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether the library has given the grammar up: it needs too much time or memory."""
        ...

    def mask(self) -> NDArray[np.uint32]:
        """A bit for each token that may follow, end tokens among them; none at a dead end."""
        ...

    def take(self, token: int) -> bool:
        """Go on by a token; False, and no change, where it may not follow."""
        ...

    def go_back(self, num_tokens: int) -> None:
        """Undo the last ones taken."""
        ...


class MaskTime:
    """Whether a grammar's masks take too long, as those of one that matches a text in very many
    ways do: they are made within the step, in which all other streams wait.

    A mask of a usual grammar takes well below `FAIR_S`, and so does moving past a token. `is_up`
    once all together have taken `MOST_S` more. clock: the processor time of this thread, so that a
    busy machine makes no grammar slow.
    """

    FAIR_S: ClassVar = 0.002
    MOST_S: ClassVar = 0.2

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.clock = clock
        self._over_s = 0.0

    @property
    def is_up(self) -> bool:
        return self._over_s > self.MOST_S

    def add(self, begin_s: float) -> None:
        """One mask or token has taken from then until now."""
        self._over_s = max(0.0, self._over_s + self.clock() - begin_s - self.FAIR_S)

    def end(self) -> None:
        """There is to be no further mask."""
        self._over_s = math.inf
