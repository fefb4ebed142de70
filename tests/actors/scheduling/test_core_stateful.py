"""Anything may happen at any time, under any policy: tokens, blocks and promises survive it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from actors.scheduling.config import ConfigError, SchedulerConfig
from actors.scheduling.events import FetchEarly, Reconfigure, ResetPrefixCache, SaveNow, Tick
from actors.scheduling.plan import Slice
from actors.scheduling.policies import POLICIES
from actors.scheduling.queue import ORDERS
from actors.scheduling.request import Grammar, Objective, Request, SamplingParams
from actors.scheduling.state import RequestStatus, prefix_digests
from tests.actors.scheduling.driver import Driver
from tests.actors.scheduling.fake_stages import expected_output

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
        if rest["num_saved_states"] is not None:
            rest |= {"swap": "never", "tier_ranks": 0, "hands_over": False}
        if rest["drafter"] == "none":
            rest["max_drafts"] = None
        rest["draft_model"] = "small" if rest["drafter"] == "model" else None
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
        tier_ranks=st.sampled_from([0, 1, 2]),
        tier_shared=st.booleans(),
        hands_over=st.booleans(),
        most_saved=st.sampled_from([64, 1, 16]),
        last_chunk=st.sampled_from([0, 0, 1, 5]),
        max_requests=st.sampled_from([1, 3, 8]),
        num_stages=st.sampled_from([1, 1, 2, 3]),
        pipeline_depth=st.sampled_from([None, None, 1, 4]),
        lookahead=st.booleans(),
        micro_batches=st.sampled_from(["greedy", "uniform"]),
        overlap_chunks=st.booleans(),
        prefix_cache=st.booleans(),
        num_saved_states=st.sampled_from([None, None, None, 0, 1, 4]),
        drafter=st.sampled_from(["none", "lookup", "model", "auto"]),
        max_drafts=st.sampled_from([None, 1, 3]),
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
        grammar=draw(st.sampled_from([None, None, None, Grammar("regex", "a*")])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    pooling = draw(st.sampled_from([None, None, None, None, "mean", "last"]))
    return Request(
        request_id=-1,
        prompt=prompt,
        sampling=sampling,
        arrival_s=0.0,
        tenant=draw(st.sampled_from(["a", "b", "c"])),
        priority=draw(st.sampled_from([0, 0, 1, 2, -1, -1000])),
        objective=Objective(ttft_s=draw(st.sampled_from([None, 0.05, 1.0]))),
        pooling=pooling,
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
    )


class AnythingGoes(RuleBasedStateMachine):
    driver: Driver

    @initialize(config=configs())
    def begin(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.driver.stages.wrong = 4  # every fourth guess of a draft model
        self.num_submitted = 0
        self.num_groups = 0
        self.newest_group: Request | None = None
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
        self.newest_group = request

    @precondition(lambda self: self.newest_group)
    @rule()
    def join_the_newest_group(self) -> None:
        assert self.newest_group is not None
        self._submit(self.newest_group, group=f"g{self.num_groups}", pooling=None)

    @rule(request=requests(), num_losses=st.integers(1, 2))
    def submit_from_a_lost_engine(self, request: Request, num_losses: int) -> None:
        self._submit(request, num_losses=num_losses)

    @precondition(lambda self: self.driver.core.requests.running.num_requests)
    @rule(request=requests(), steps=st.integers(20, 80))
    def flood(self, request: Request, steps: int) -> None:
        """Those that come later, as many as can be, hold up none that came first, unless they are
        live and it is of the background.

        Each has a second token: those that end with their prompt do hold up decodes where prompts
        go first, as in vLLM's first scheduler.
        """
        driver = self.driver
        sampling = replace(request.sampling, max_tokens=max(2, request.sampling.max_tokens))
        running = driver.core.requests.running
        states = [*running.decoding, *running.prefilling]
        first = min(states, key=lambda s: (s.is_background, s.order_key))
        if first.is_background and request.priority >= 0:
            return
        order = driver.core.order
        before, younger = (first.num_tokens, first.num_computed_tokens), self.num_submitted
        length = min(len(request.prompt), 3)
        for _ in range(steps):
            if driver.core.requests.num_waiting < 3:
                self._submit(
                    request,
                    prompt=request.prompt[:length],
                    sampling=sampling,
                    pooling=None,
                    tenant="d",
                )
            if not driver.outstanding or driver.failures or first.suspicion:
                return
            driver.answer()
            moved = (first.num_tokens, first.num_computed_tokens) != before
            if moved or first.status is not RequestStatus.RUNNING or order != "fcfs":
                return
        ended = [c for i, c in driver.callers.items() if i > younger and c.finish is not None]
        assert len(ended) < 8, f"{first} stood still while {len(ended)} younger ones ended"

    @rule()
    def reset_the_prefix_cache(self) -> None:
        self.driver.send(ResetPrefixCache())

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

    @rule(request=requests(), skip=st.integers(0, 3), is_last=st.booleans())
    def expect(self, request: Request, skip: int, is_last: bool) -> None:
        """Told of blocks that may be anywhere, or nowhere, by a peer that may be wrong."""
        size = self.driver.config.block_size
        digests = prefix_digests(request.prompt, size, request.cache_salt)
        self.driver.send(FetchEarly(tuple(digests[skip:]), is_last))

    @rule(which=st.none() | st.integers(0, 10))
    def save_now(self, which: int | None) -> None:
        """What is complete, or the blocks of one stream before all others."""
        live = list(self.driver.core.live_requests.values())
        first: list[bytes] = []
        if which is not None and live:
            state = live[which % len(live)]
            first = state.block_hashes(state.num_committed_blocks, self.driver.config.block_size)
        self.driver.send(SaveNow(tuple(first)))

    @precondition(lambda self: self.driver.moves)
    @rule(which=st.integers(0, 5), most=st.sampled_from([0, 1, 1000, 1000]))
    def answer_move(self, which: int, most: int) -> None:
        self.driver.answer_move(which % len(self.driver.moves), most)

    @rule(rank=st.integers(0, 1), which=st.integers(0, 50), tells=st.booleans())
    def forget_a_kept_block(self, rank: int, which: int, tells: bool) -> None:
        self.driver.stages.stores.forget(rank, which, tells)

    @precondition(lambda self: self.driver.outstanding)
    @rule(applied=st.booleans())
    def fail(self, applied: bool) -> None:
        slices = self.driver.outstanding[0].named_slices
        suspicion = self.driver.core.requests.by_id[slices[0].request_id].suspicion
        if len(slices) == 1 and suspicion is not None and suspicion.num_failures:
            return  # failing alone again would be held against it
        self.driver.fail(applied)

    @precondition(lambda self: self.driver.outstanding)
    @rule(which=st.integers(0, 10))
    def overflow(self, which: int) -> None:
        slices = self.driver.outstanding[0].named_slices
        culprit = slices[which % len(slices)].request_id
        self.poisoned.add(culprit)
        self.driver.overflow(culprit)

    @precondition(lambda self: self.num_submitted)
    @rule(kills=st.booleans(), begin=st.integers(0, MAX_LEN), start_only=st.booleans())
    def poison_the_newest(self, kills: bool, begin: int, start_only: bool) -> None:
        """Its slices from some token on raise, or lose the pipeline."""

        def is_fatal(part: Slice) -> bool:
            return (part.start if start_only else part.start + part.num_tokens) >= begin

        self.poisoned.add(self.num_submitted)
        deadly = self.driver.killers if kills else self.driver.poison
        deadly[self.num_submitted] = is_fatal
        self.driver.num_kills[self.num_submitted] = 0  # with another poison it may be cleared first

    @rule()
    def lose(self) -> None:
        in_flight = {
            part.request_id for plan in self.driver.outstanding for part in plan.named_slices
        }
        states = [self.driver.core.requests.by_id.get(number) for number in in_flight]
        if any(s is not None and s.suspicion and s.suspicion.num_losses > 1 for s in states):
            return  # a third time would be held against it
        self.driver.lose()

    @rule(seconds=st.sampled_from([0.1, 5.0, 60.0]))
    def tick(self, seconds: float) -> None:
        self.driver.send(Tick(), after_s=seconds)

    @rule(
        policy=st.sampled_from(sorted(POLICIES)),
        order=st.sampled_from(["auto", *sorted(ORDERS)]),
        budget=st.sampled_from([2, 9, 24]),
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
        num_requests = len(self.driver.core.requests.by_id)
        too_many = self.driver.config.max_requests + 1
        for changes in (
            {"policy": "nonsense"},
            {"num_blocks": 3},
            {"token_budget": 0},
            {"max_requests": too_many},
            {"order": "priority", "order_options": {"ageing_s": "10"}},
            {"order": "mlfq", "order_options": {"quantum_tokens": 1.5}},
            {"order": "deadline", "order_options": {"prefill_tokens_per_s": 0}},
            {"order": "fair", "order_options": {"weights": {"a": 0}}},
            {"policy": "orca", "policy_options": {"max_batch": -1}},
            {"max_running_per_tenant": 0},
            {"queue_timeout_s": -1.0},
        ):
            with pytest.raises(ConfigError) as caught:
                self.driver.core.handle(Reconfigure(changes), self.driver.now_s)
            assert caught.value.key in changes
            assert len(self.driver.core.requests.by_id) == num_requests
        assert self.driver.core.config == before

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.drain()
            self.driver.check_everyone_finished(but_errors=self.poisoned)


TestAnythingGoes = AnythingGoes.TestCase
