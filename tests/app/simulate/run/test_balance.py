"""Simulated engines with roles hand what is late to each other, within their role."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.simulate.run.simulation import simulate
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.lengths import uniform_lengths
from app.simulate.workload.requests import generate
from tests.app.simulate.run.test_handover import FAST, check_all_ended, divided, workload
from tests.app.simulate.run.test_handover import in_order as in_order

pytestmark = pytest.mark.heavy


def test_prompts_that_wait_go_to_the_other_engine_for_prompts(in_order: None) -> None:
    """Taken in turn, one of two engines gets all the long ones."""
    rows = [(0.02 * i, 100 if i % 2 else 3000, 20) for i in range(80)]
    traffic = workload(*rows)
    plain = replace(divided(FAST, "split", 2, 2, ttft_s=2.0), routing="round_robin")
    ends_s, num_moves = [], []
    for rebalance in (False, True):
        run = simulate(traffic, replace(plain, rebalance=rebalance))
        check_all_ended(run, traffic)
        prefilled = [replica.core.num_prefilled_tokens for replica in run.replicas]
        assert sum(prefilled[:2]) == int(traffic.prompt_tokens.sum()), "each is computed once"
        ends_s.append(float(np.quantile(run.record.first_token_s - traffic.arrival_s, 0.75)))
        num_moves.append(len(run.moves))
    assert num_moves[0] == 0 < num_moves[1]
    assert ends_s[1] < 0.8 * ends_s[0]


@pytest.mark.parametrize("way", ["split", "flexible"])
@pytest.mark.parametrize("kv_tokens", [60_000, 8_000])
def test_streams_go_to_the_other_engine_that_decodes(
    way: str, kv_tokens: int, in_order: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast it is, the first of those has a stream too many."""

    def num_excess(engine: Any) -> int:
        return int(engine.engine_id == "engine-2")

    monkeypatch.setattr("actors.fleet.balance._num_excess", num_excess)
    traffic = generate(poisson(12.0), uniform_lengths(50, 1500, 4.0), 50)
    plain = divided(replace(FAST, kv_tokens=kv_tokens), way, 2, 2)
    run = simulate(traffic, replace(plain, rebalance=True))
    check_all_ended(run, traffic)
    begun = run.record.first_token_s
    moved = {request for time_s, request in run.moves if time_s > begun[request]}
    assert moved
    assert {run.record.replica[request] for request in moved} == {3}
