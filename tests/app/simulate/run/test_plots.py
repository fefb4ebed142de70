"""What the pictures of a run show of it."""

from __future__ import annotations

import pytest

from app.simulate.run import plots
from app.simulate.run.record import Steps


def _steps(num_steps: int, first_s: float = 5.0) -> Steps:
    """Steps of one second each."""
    steps = Steps()
    for number in range(num_steps):
        steps.start_s.append(first_s + number)
        steps.end_s.append(first_s + number + 1)
        steps.decode_tokens.append(8)
        steps.prefill_tokens.append(100)
    return steps


@pytest.mark.parametrize(
    ("num_steps", "shown"), [(6, (5, 11)), (20, (5, 25)), (30, (10, 30)), (100, (45, 65))]
)
def test_the_middle_of_a_run_is_shown_and_all_of_a_short_one(
    num_steps: int, shown: tuple[float, float]
) -> None:
    assert plots.batch_composition(_steps(num_steps)).axes[0].get_xlim() == shown
    trace = plots.budget_trace(_steps(3 * num_steps), 0.1).axes[0]
    assert trace.get_xlim()[0] >= 5
    assert trace.get_xlim()[1] <= 5 + 3 * num_steps
