"""A draft model whose layers keep a state: it changes how many tokens a step yields, never which,
and after a wrong draft goes on from the state of what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.plan import StepPlan, StepResult
from actors.scheduling.request import Request
from tests import tiny_models
from tests.actors.stage.greedy_reference import skip_unless_available
from tests.actors.stage.mini_planner import Execute as Run
from tests.actors.stage.mini_planner import chain, make_chain, make_runner
from tests.actors.stage.rank_pool import RankPool
from tests.actors.stage.test_draft_model import MODEL as WITHOUT
from tests.actors.stage.test_draft_model import long_requests
from tests.actors.stage.test_speculation import BASE, NUM_BLOCKS, Answer, serve
from tests.actors.stage.test_speculation_with_states import FAMILIES, PLAIN, redone

Folder = Callable[..., Path]
MODEL = replace(PLAIN, drafter="model", draft_model="small", max_drafts=4)


def stages(folder: Path, draft: Path | None, num_stages: int = 1, **spec: object) -> Run:
    path = None if draft is None else str(draft)
    options = {"backend": "cpu", "draft_model_path": path, "max_drafts": 4, **spec}
    return make_chain(folder, num_stages, NUM_BLOCKS, **options)


class Spoilt:
    """Stages that draft for themselves, of whose offers some lose a token after others that are
    right. What they offer must be what the answers go on with all the same."""

    def __init__(self, run: Run, answers: dict[int, Answer]) -> None:
        self._run, self._answers, self._known = run, answers, Counter[int]()
        self.num_right = self.num_spoilt = 0

    def __call__(self, plan: StepPlan) -> StepResult:
        result = self._run(plan)
        self._known.update(request_id for request_id, _ in result.tokens)
        self._known.update({i: len(tokens) for i, tokens in result.extra_tokens})
        offered = []
        for request_id, tokens in result.drafts_offered:
            first, answer = self._known[request_id], self._answers[request_id].tokens
            assert list(tokens) == answer[first : first + len(tokens)], request_id
            self.num_right += 1
            if (plan.step_id + request_id) % 3 == 0:
                wrong = (plan.step_id // 3) % len(tokens)
                tokens = (*tokens[:wrong], (tokens[wrong] + 1) % 256, *tokens[wrong + 1 :])
                self.num_spoilt += 1
            offered.append((request_id, tokens))
        return replace(result, drafts_offered=tuple(offered))


def check_spoilt(
    plain: SchedulerConfig, drafted: SchedulerConfig, make: Callable[[bool], Run],
    requests: Sequence[Request] | None = None,
) -> list[StepPlan]:  # fmt: skip
    """make: stages, without or with drafts. Returns the plans with drafts."""
    requests = long_requests() if requests is None else requests
    answers, _, _ = serve(plain, make(False), requests=requests)
    run = Spoilt(make(True), answers)
    found, core, plans = serve(drafted, run, requests=requests)
    assert found == answers
    assert run.num_right > 2 * run.num_spoilt > 10
    assert 0 < core.outcomes.num_accepted_drafts < core.speculation.num_drafts
    return plans


@pytest.mark.parametrize("variant", FAMILIES)
def test_after_wrong_drafts_it_is_right_again(tiny_model: Folder, variant: str) -> None:
    """Of every family, at temperature 1 as well: it draws with the same noise."""
    skip_unless_available("cpu")
    folder = tiny_model(variant)
    plans = check_spoilt(PLAIN, MODEL, lambda drafts: stages(folder, folder if drafts else None))
    assert redone(plans)


CHANGES: dict[str, dict[str, object]] = {
    "no lookahead": {"lookahead": False},
    "small KV": {"num_blocks": 40},
    "small KV, no cache": {
        "num_blocks": 40, "prefix_cache": False, "num_saved_states": 0, "watermark": 0.0,
    },
    "small chunks": {"token_budget": 15},
    "one draft": {"max_drafts": 1},
    "vllm": {"policy": "vllm"},
    "two stages": {"num_stages": 2},
    "two stages, small KV": {"num_stages": 2, "num_blocks": 40},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_it_is_right_again_under_any_schedule(tiny_model: Folder, name: str) -> None:
    skip_unless_available("cpu")
    config = replace(MODEL, **CHANGES[name])  # type: ignore[arg-type]
    num_stages, folder = config.num_stages, tiny_model("qwen3-5")
    plans = check_spoilt(
        replace(PLAIN, num_stages=num_stages),
        config,
        lambda drafts: stages(folder, folder if drafts else None, num_stages),
    )
    started = [start.request_id for plan in plans for start in plan.started]
    if config.num_blocks < NUM_BLOCKS:
        assert len(started) > len(set(started)), "no request was preempted"


SWAPS = {"small KV, swaps": {"num_blocks": 40, "num_host_blocks": 40, "swap": "always"}}
PAIRS = [
    ("qwen3-5", "qwen3-5", "default"),
    *[("qwen3-5", "lfm2", name) for name in CHANGES],
    *[("llama", "qwen3-5", name) for name in CHANGES | SWAPS],
]
# The other pairs under a schedule: `make test-long`.
SHORT = {
    PAIRS[0], ("qwen3-5", "lfm2", "no lookahead"), ("qwen3-5", "lfm2", "two stages, small KV"),
    ("llama", "qwen3-5", "small KV"), ("llama", "qwen3-5", "small KV, swaps"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "draft", "name"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.long) for pair in PAIRS],
)
def test_equal_bytes(tiny_model: Folder, variant: str, draft: str, name: str) -> None:
    """Of all kinds of sampling, several answers to one prompt among them: with a model that is
    mostly right, the served one, and with others, which are mostly wrong."""
    skip_unless_available("cpu")
    changes = dict((CHANGES | SWAPS).get(name, {}))
    plain, base = PLAIN, MODEL
    if variant == "llama":
        plain, base = BASE, WITHOUT
        changes.pop("num_saved_states", None)
    config = replace(base, **changes)  # type: ignore[arg-type]
    folder, num_stages = tiny_model(variant), config.num_stages
    expected, _, _ = serve(replace(plain, num_stages=num_stages), stages(folder, None, num_stages))
    runners = [
        make_runner(
            folder, NUM_BLOCKS, config.num_host_blocks, num_stages=num_stages, stage=stage,
            backend="cpu", draft_model_path=str(tiny_model(draft)), max_drafts=4,
        )
        for stage in range(num_stages)
    ]  # fmt: skip
    found, core, plans = serve(config, chain(runners))
    assert found == expected
    assert any(plan.drafts for plan in plans)
    accepted = core.outcomes.num_accepted_drafts / core.speculation.num_drafts
    assert accepted > 0.9 if draft == variant else accepted < 0.5


def test_a_smaller_model_of_the_same_family(tiny_model: Folder, tmp_path: Path) -> None:
    """Another size of state than the served model's, on the CPU library and in torch."""
    small = tiny_models.write(
        tmp_path / "small", "qwen3-5", hidden_size=32, linear_num_value_heads=2
    )
    for backend in ("cpu", "torch"):
        skip_unless_available(backend)
        folder = tiny_model("qwen3-5")
        expected, _, _ = serve(PLAIN, stages(folder, None, backend=backend))
        found, core, _ = serve(MODEL, stages(folder, small, backend=backend))
        assert {i: a.tokens for i, a in found.items()} == {i: a.tokens for i, a in expected.items()}
        assert core.speculation.num_drafts > 0


@pytest.mark.parametrize("num_stages", [pytest.param(1, marks=pytest.mark.long), 2])
def test_on_two_ranks(ranks: RankPool, tiny_model: Folder, num_stages: int) -> None:
    """The draft model runs in one of them, undivided, and its states are memory of that one."""
    skip_unless_available("cpu")
    folder = tiny_model("qwen3-5")
    options = {"backend": "cpu", "draft_model_path": str(folder), "max_drafts": 4}

    def make(drafts: bool) -> Run:
        infos = ranks.make(folder, num_stages, NUM_BLOCKS, **(options if drafts else {
            "backend": "cpu",
        }))  # fmt: skip
        assert (infos[0][-1].state_bytes > infos[1][-1].state_bytes) == drafts
        return ranks.execute

    plain, drafted = (replace(c, num_stages=num_stages) for c in (PLAIN, MODEL))
    check_spoilt(plain, drafted, make)


def test_a_step_repeated_gives_the_same(tiny_model: Folder) -> None:
    skip_unless_available("cpu")
    folder = tiny_model("granite-4")

    def make(drafts: bool) -> Run:
        run = stages(folder, folder if drafts else None)

        def twice(plan: StepPlan) -> StepResult:
            first = run(plan)
            assert run(plan) == first
            return first

        return twice

    check_spoilt(PLAIN, MODEL, make)


def test_no_known_token_is_computed_again(tiny_model: Folder) -> None:
    """But for the newest ones: also where the served model goes back and writes its KV anew."""
    skip_unless_available("cpu")
    folder = tiny_model("qwen3-5")
    runner = make_runner(folder, NUM_BLOCKS, backend="cpu", draft_model_path=str(folder),
                         max_drafts=4)  # fmt: skip
    drafting, reached, again = runner._drafting, Counter[int](), list[Any]()
    assert drafting is not None
    lengths_of = drafting._lengths

    def noted(asking: list[Any]) -> list[int]:
        lengths = lengths_of(asking)
        for one, length in zip(asking, lengths, strict=True):
            if one.start != reached[one.request_id]:
                again.append(one)
            reached[one.request_id] = min(one.start + length, one.last)
        return lengths

    drafting._lengths = noted  # type: ignore[method-assign]
    check_spoilt(PLAIN, MODEL, lambda drafts: chain([runner]) if drafts else stages(folder, None))
    assert min(reached.values()) > 40
    assert not again
