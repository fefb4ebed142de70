"""Anything may happen at any time, under any policy: tokens, blocks and promises survive it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import Reconfigure, Tick
from actors.scheduling.policies import POLICIES
from actors.scheduling.queue import ORDERS
from actors.scheduling.request import Objective, Request, SamplingParams
from tests.scheduling.driver import Driver
from tests.scheduling.fake_stages import expected_output

MAX_LEN = 40
COSTS = {"name": "toy", "tokens_s": [[1, 0.010], [64, 0.042]], "per_request_s": 0.0001}


def configs() -> st.SearchStrategy[SchedulerConfig]:
    def build(
        block_size: int,
        extra_blocks: int,
        max_requests: int,
        num_stages: int,
        token_budget: int,
        **rest: object,
    ) -> SchedulerConfig:
        return SchedulerConfig(
            num_blocks=-(-MAX_LEN // block_size) + extra_blocks,
            block_size=block_size,
            max_requests=max_requests,
            max_model_len=MAX_LEN,
            max_step_tokens=max(max_requests, 24),
            num_stages=num_stages,
            token_budget=token_budget if rest["budget"] in ("fixed", "throttled") else None,
            **rest,  # type: ignore[arg-type]
        )

    return st.builds(
        build,
        block_size=st.sampled_from([1, 2, 4, 16]),
        extra_blocks=st.sampled_from([0, 1, 3, 30]),
        num_host_blocks=st.sampled_from([0, 6, 60]),
        max_requests=st.sampled_from([1, 3, 8]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        pipeline_depth=st.sampled_from([None, None, 1, 4]),
        lookahead=st.booleans(),
        micro_batches=st.sampled_from(["greedy", "uniform"]),
        overlap_chunks=st.booleans(),
        prefix_cache=st.booleans(),
        allocation=st.sampled_from(["prompt", "chunk"]),
        swap=st.sampled_from(["always", "auto", "never"]),
        policy=st.sampled_from(sorted(POLICIES)),
        order=st.sampled_from(["auto", "auto", *sorted(ORDERS)]),
        token_budget=st.sampled_from([1, 4, 7, 16]),
        budget=st.sampled_from(["fixed", "throttled", "profiled", "adaptive"]),
        cost_model=st.sampled_from([COSTS, COSTS | {"swap_block_s": 0.001}]),
        tbt_s=st.sampled_from([0.02, 0.2]),
        tile=st.sampled_from([1, 1, 4]),
        max_chunk=st.sampled_from([None, None, 3]),
        max_running_per_tenant=st.sampled_from([None, None, 1, 2]),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
    )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    # prompts of few tokens and few kinds, so that prefixes are shared
    kind = draw(st.integers(0, 2))
    length = draw(st.integers(1, MAX_LEN - 1))
    prompt = tuple((i * (kind + 1)) % 5 for i in range(length))
    sampling = SamplingParams(
        max_tokens=draw(st.integers(1, 14)),
        min_tokens=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.sampled_from([(), (3,), (1, 2)])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    pooling = draw(st.sampled_from([None, None, None, None, "mean", "last"]))
    return Request(
        request_id=-1,
        prompt=prompt,
        sampling=sampling,
        arrival_s=0.0,
        tenant=draw(st.sampled_from(["a", "b", "c"])),
        priority=draw(st.integers(-1, 2)),
        objective=Objective(ttft_s=draw(st.sampled_from([None, 0.05, 1.0]))),
        pooling=pooling,
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
    )


class AnythingGoes(RuleBasedStateMachine):
    driver: Driver

    @initialize(config=configs())
    def begin(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.num_submitted = 0
        self.num_groups = 0
        self.poisoned: set[int] = set()

    def _submit(self, request: Request, **changes: object) -> None:
        self.num_submitted += 1
        self.driver.submit(
            replace(request, request_id=self.num_submitted, arrival_s=self.driver.now_s, **changes)
        )

    @rule(request=requests())
    def submit(self, request: Request) -> None:
        self._submit(request)

    @rule(request=requests(), fraction=st.floats(0, 1))
    def submit_replay(self, request: Request, fraction: float) -> None:
        if request.pooling is None:
            tokens, _ = expected_output(request, MAX_LEN)
            self._submit(request, output=tuple(tokens[: int(fraction * len(tokens))]))

    @rule(request=requests(), n=st.integers(2, 4))
    def submit_group(self, request: Request, n: int) -> None:
        self.num_groups += 1
        for k in range(n):
            sampling = replace(request.sampling, seed=k)
            self._submit(request, group=f"g{self.num_groups}", sampling=sampling, pooling=None)

    @rule(which=st.integers(0, 10))
    def abort(self, which: int) -> None:
        if self.driver.callers:
            ids = sorted(self.driver.callers)
            self.driver.abort(ids[-1 - which % len(ids)])

    @precondition(lambda self: self.driver.outstanding)
    @rule(times=st.integers(1, 6))
    def answer(self, times: int) -> None:
        for _ in range(times):
            if self.driver.outstanding:
                self.driver.answer()

    @precondition(lambda self: self.driver.outstanding)
    @rule(applied=st.booleans())
    def fail(self, applied: bool) -> None:
        # a step with one member would be blamed on it if it failed twice
        if len(self.driver.outstanding[0].slices) > 1:
            self.driver.fail(applied)
            while self.driver.core.requests.waiting.isolated and self.driver.outstanding:
                self.driver.answer()

    @precondition(lambda self: self.driver.outstanding)
    @rule(which=st.integers(0, 10))
    def fail_with_culprit(self, which: int) -> None:
        slices = self.driver.outstanding[0].slices
        culprit = slices[which % len(slices)].request_id
        self.poisoned.add(culprit)
        self.driver.fail(applied=True, culprit=culprit)

    @precondition(lambda self: self.num_submitted)
    @rule()
    def poison_the_newest(self) -> None:
        self.poisoned.add(self.num_submitted)
        self.driver.poison.add(self.num_submitted)

    @rule()
    def lose(self) -> None:
        if self.driver.core.faults._lost_since_answer:
            return  # twice in a row blames what was in flight: tested elsewhere
        self.driver.lose()

    @rule(seconds=st.sampled_from([0.1, 5.0, 60.0]))
    def tick(self, seconds: float) -> None:
        self.driver.send(Tick(), after_s=seconds)

    @rule(
        policy=st.sampled_from(sorted(POLICIES)),
        order=st.sampled_from(["auto", *sorted(ORDERS)]),
        budget=st.sampled_from([2, 9, 30]),
        cap=st.sampled_from([None, 1, 3]),
        places=st.integers(0, 7),
        kind=st.sampled_from(["fixed", "throttled", "profiled", "adaptive"]),
    )
    def reconfigure(
        self, policy: str, order: str, budget: int, cap: int | None, places: int, kind: str
    ) -> None:
        self.driver.send(
            Reconfigure(
                {
                    "scheduling.policy": policy,
                    "order": order,
                    "scheduling.token_budget": budget if kind in ("fixed", "throttled") else None,
                    "budget": kind,
                    "max_running_per_tenant": cap,
                    "max_requests": 1 + places % self.driver.config.max_requests,
                }
            )
        )

    @rule()
    def reconfigure_badly(self) -> None:
        before = self.driver.core.config
        too_many = self.driver.config.max_requests + 1
        for changes in (
            {"policy": "nonsense"},
            {"num_blocks": 3},
            {"token_budget": 0},
            {"max_requests": too_many},
        ):
            with pytest.raises(ConfigError) as caught:
                self.driver.core.handle(Reconfigure(changes), self.driver.now_s)
            assert caught.value.key in changes
        assert self.driver.core.config == before

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check_everyone_finished(but_errors=self.poisoned)


TestAnythingGoes = AnythingGoes.TestCase
