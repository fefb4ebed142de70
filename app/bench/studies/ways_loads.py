"""Parts of `legato bench ways`: the requests of a load, the objectives, and how much work it is."""

from __future__ import annotations

from functools import lru_cache

from actors.scheduling.build import CONTEXT, DECODE_STEPS, STREAMS
from actors.scheduling.cost.mix import Mix
from app.simulate.hardware.deployments import load_model
from app.simulate.paper.published import DATASETS as PAPER
from app.simulate.paper.published import SLOS
from app.simulate.run.work import Work
from app.simulate.workload.arrivals import poisson
from app.simulate.workload.requests import Workload, generate, multi_turn
from app.simulate.workload.specs import parse_lengths

TIGHT_STEPS = 2  # of 32 streams with 4096 tokens each; the paper's strict objective has five
OBJECTIVES = ("tight", *SLOS)
CONVERSATIONS = "conversations"
# Of prompts and outputs. Conversations have six turns on average, of a quarter of ShareGPT's.
DATASETS = {**{name: name for name in PAPER}, "mixed": "mixed", CONVERSATIONS: "sharegpt4/4"}
_TURNS, _THINK_S, _LONGEST = 6.0, 20.0, 8192


def tight_s(model: str, strict_s: float) -> float:
    """Two decode steps, of the paper's engines or of the simulated ones, whichever is shorter."""
    step_s = load_model(model).latency_s(Mix(STREAMS, STREAMS * CONTEXT))
    return TIGHT_STEPS * min(strict_s / DECODE_STEPS["strict"], step_s)


def work_of(model: str, dataset: str) -> Work:
    """The work of a request of a dataset, on an engine of a deployment."""
    return Work.of(load_model(model), requests_at(1.0, dataset, 2000, 0))


@lru_cache(maxsize=2)
def requests_at(qps: float, dataset: str, num_requests: int, seed: int) -> Workload:
    """Requests of a dataset, the same at every rate; of conversations, turns, whose users take the
    same time to think at every rate. Bring them `at_rate`: their own is near it."""
    lengths = parse_lengths(DATASETS.get(dataset, dataset))
    if dataset != CONVERSATIONS:
        return generate(poisson(1.0), lengths, num_requests, seed=seed)
    sessions = num_requests  # each has a turn, and what arrives after that many is left out
    whole = multi_turn(qps / _TURNS, _TURNS, lengths, sessions, _THINK_S, _LONGEST, seed)
    kept = slice(num_requests)
    return Workload(
        whole.arrival_s[kept], whole.prompt_tokens[kept], whole.output_tokens[kept],
        whole.sessions[kept], whole.shared_tokens[kept], name=CONVERSATIONS,
    )  # fmt: skip
