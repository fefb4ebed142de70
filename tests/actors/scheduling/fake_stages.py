"""Stages whose answers can be computed by hand.

A KV slot holds the hash of all tokens up to its position, so attention over a wrong, stale,
unshared or overwritten block is noticed at once. The next token is a function of that hash, so
the whole output of a request is known in advance, whatever happens in between.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, reduce
from itertools import islice, product

from actors.scheduling.config import SchedulerConfig
from actors.scheduling.plan import Slice, StepPlan, StepResult, TokenLogprobs
from actors.scheduling.request import FinishReason, Request, SamplingParams
from tests.actors.scheduling.fake_stores import FakeStores

VOCABULARY = 11
GARBAGE = -7  # a token no request may ever receive
ROOT = 17


def extend(prefix: int, token: int) -> int:
    return hash((prefix, token))


def draw(prefix: int, seed: int) -> int:
    return hash((prefix, seed, 23)) % VOCABULARY


def expected_output(request: Request, limit: int) -> tuple[list[int], FinishReason]:
    """Tokens that the request must receive in all, those in `request.output` included."""
    tokens, reason = _whole_answer(tuple(request.prompt), request.sampling, limit)
    return list(tokens), reason


@lru_cache(4096)  # asked for at every token of the answer
def _whole_answer(
    prompt: tuple[int, ...], sampling: SamplingParams, limit: int
) -> tuple[list[int], FinishReason]:
    prefix = reduce(extend, prompt, ROOT)
    tokens: list[int] = []
    while True:
        token = draw(prefix, sampling.seed)
        tokens.append(token)
        if token in sampling.stop_token_ids and len(tokens) > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) >= min(sampling.max_tokens, limit - len(prompt)):
            return tokens, FinishReason.LENGTH
        prefix = extend(prefix, token)


@dataclass
class Mirror:
    """What the stages know of one request. prefixes: of as many tokens as have been computed.
    states: the hash of all tokens before a position, of a model whose layers keep states: where the
    last slice began, and where it ended."""

    tokens: list[int]
    blocks: list[int]
    num_prompt: int
    seed: int
    pooling: str | None
    computed: int
    corrupt: bool = False
    states: dict[int, int] = field(default_factory=dict)
    prefixes: list[int] = field(default_factory=list)

    def prefixes_to(self, end: int) -> list[int]:
        """The hash that belongs into the slot of each of the first tokens."""
        for token in self.tokens[len(self.prefixes) : end]:
            self.prefixes.append(extend(self.prefixes[-1] if self.prefixes else ROOT, token))
        return self.prefixes[:end]

    def forget(self, end: int) -> None:
        """Tokens from there on: drafts that do not stand."""
        del self.tokens[end:], self.prefixes[end:]


@dataclass
class FakeStages:
    """Applies plans exactly in the order of fields that StepPlan documents."""

    config: SchedulerConfig
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> hash
    # host block -> offset -> hash; None: a copy that failed
    host: dict[int, dict[int, int] | None] = field(default_factory=dict)
    known: dict[int, Mirror] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)  # row -> state
    # Of the draft model: which tokens it guesses wrong, and seconds of a pass
    wrong: int = 1 << 30
    pass_s: float = 0.0
    offers: bool = True

    def __post_init__(self) -> None:
        self.stores = FakeStores(self.config.tier_ranks, self.config.block_size)

    def run(self, plan: StepPlan) -> StepResult:
        self._prepare(plan)
        tokens: list[tuple[int, int]] = []
        pooled: list[tuple[int, tuple[float, ...]]] = []
        prompt_logprobs: list[tuple[int, int, tuple[TokenLogprobs, ...]]] = []
        drafts, extra_tokens = dict(plan.drafts), list[tuple[int, tuple[int, ...]]]()
        asked, offered = dict(plan.drafts_asked), list[tuple[int, tuple[int, ...]]]()
        asked = asked if self.offers else {}
        for part in plan.named_slices:
            mirror = self.known[part.request_id]
            if part.request_id in drafts:
                first, *more = self._verify(part, mirror, drafts[part.request_id])
                tokens.append((part.request_id, first))
                if more:
                    extra_tokens.append((part.request_id, tuple(more)))
                if part.request_id in asked:
                    at = part.start + part.num_tokens - len(drafts[part.request_id]) + len(more)
                    guesses = self._guess(mirror, at, asked[part.request_id])
                    offered.append((part.request_id, guesses))
                continue
            token = GARBAGE if mirror.corrupt else self._compute(part, mirror)
            self._save_states(plan, part, mirror)
            end = part.start + part.num_tokens
            if part.samples:
                tokens.append((part.request_id, token))
                if self.config.num_stages == 1:
                    mirror.tokens.append(token)
                if part.request_id in asked:
                    guesses = self._guess(mirror, end, asked[part.request_id])
                    offered.append((part.request_id, guesses))
            if mirror.pooling and end == mirror.num_prompt:
                pooled.append((part.request_id, (float(token),)))
            last = min(end + 1, mirror.num_prompt)
            if part.start + 1 < last:
                entries = tuple(
                    TokenLogprobs(mirror.tokens[p], -float(p), 1, ())
                    for p in range(part.start + 1, last)
                )
                prompt_logprobs.append((part.request_id, part.start + 1, entries))
        return StepResult(
            plan.step_id,
            tuple(tokens),
            pooled=tuple(pooled),
            prompt_logprobs=tuple(prompt_logprobs),
            extra_tokens=tuple(extra_tokens),
            drafts_offered=tuple(offered),
            drafting_s=self.pass_s * max(asked.values(), default=0),
            draft_pass_s=self.pass_s if asked else 0.0,
        )

    def _guess(self, mirror: Mirror, at: int, count: int) -> tuple[int, ...]:
        """What will be drawn behind the token drawn at a position, but for every `wrong`-th."""
        if mirror.corrupt:
            return (GARBAGE,) * count
        prefix, guesses = [ROOT, *mirror.prefixes_to(at)][-1], list[int]()
        for number in range(count + 1):
            token = draw(prefix, mirror.seed)
            prefix = extend(prefix, token)
            is_wrong = (at + number) % self.wrong == self.wrong - 1
            guesses.append((token + is_wrong) % VOCABULARY)
        return tuple(guesses[1:])  # the first is of the token that this step has drawn

    def _verify(self, part: Slice, mirror: Mirror, drafts: tuple[int, ...]) -> list[int]:
        """Draw behind the known token and behind each draft that stands."""
        first = part.start + part.num_tokens - len(drafts)  # that is drawn
        assert first == part.start + 1 or self.config.num_saved_states is not None
        if mirror.corrupt:
            return [GARBAGE]
        mirror.tokens += drafts
        self._compute(part, mirror)
        drawn: list[int] = []
        for draft in (*drafts, None):
            prefix = self.slots[self._slot(mirror, first - 1 + len(drawn))]
            drawn.append(draw(prefix, mirror.seed))
            if drawn[-1] != draft:
                break
        last = first - 1 + len(drawn)
        mirror.forget(last)
        goes_back = self.config.num_saved_states is not None and len(drawn) <= len(drafts)
        mirror.computed = part.start if goes_back else last
        if self.config.num_stages == 1:
            mirror.tokens.append(drawn[-1])
        return drawn

    def fail(self, plan: StepPlan, applied: bool) -> None:
        """The step raises: not applied at all, or applied with garbage in the KV it writes."""
        touched = {part.request_id for part in plan.named_slices}
        if applied:
            self._prepare(plan)
            for part in plan.named_slices:
                mirror = self.known[part.request_id]
                for position in range(part.start, part.start + part.num_tokens):
                    if mirror.corrupt:
                        break
                    self.slots[self._slot(mirror, position)] = GARBAGE
        else:
            # later plans mention requests and blocks that the stages never heard of
            for start in plan.started:
                self.known[start.request_id] = Mirror([], [], 0, 0, None, 0, corrupt=True)
            for _, host in plan.swap_out:
                self.host[host] = None
        for request_id in touched | set(plan.released):
            if request_id in self.known:
                self.known[request_id].corrupt = True
        for part in plan.named_slices if applied else ():
            self._save_states(plan, part, self.known[part.request_id])

    def lose(self) -> tuple[tuple[bytes, ...], ...]:
        """Returns what the new ones find in their stores."""
        self.slots.clear()
        self.host.clear()
        self.known.clear()
        self.saved.clear()
        return self.stores.restart()

    def _prepare(self, plan: StepPlan) -> None:
        size = self.config.block_size
        for request_id in plan.released:
            self.known.pop(request_id, None)
        for device, host in plan.swap_out:
            assert 0 <= host < self.config.num_host_blocks
            self.host[host] = {
                o: self.slots[device, o] for o in range(size) if (device, o) in self.slots
            }
        failed_copies: set[int] = set()
        for host, device in plan.swap_in:
            copy = self.host[host]
            if copy is None:
                failed_copies.add(device)
            for offset in range(size):
                self.slots[device, offset] = (copy or {}).get(offset, GARBAGE)
        for source, destination in plan.copies:
            assert source != destination
            for offset in range(size):
                self.slots[destination, offset] = self.slots.get((source, offset), GARBAGE)
        for start in plan.started:
            assert start.request_id not in self.known or self.known[start.request_id].corrupt
            begin = next(s.start for s in plan.named_slices if s.request_id == start.request_id)
            assert start.pooling != "mean" or begin == 0, "a mean without its first tokens"
            self.known[start.request_id] = Mirror(
                list(start.tokens),
                list(start.block_ids),
                start.num_prompt_tokens,
                start.sampling.seed,
                start.pooling,
                begin,
                corrupt=bool(failed_copies & set(start.block_ids)),
            )
            if self.config.num_saved_states is not None:
                assert (start.state_row is None) == (begin == 0), "no state to begin with"
                row = start.state_row
                state = ROOT if row is None else self.saved[row]
                self.known[start.request_id].states[begin] = state
        for request_id, num_blocks in plan.trimmed:
            assert request_id in dict(plan.new_blocks)
            del self.known[request_id].blocks[num_blocks:]
        for request_id, blocks in plan.new_blocks:
            self.known[request_id].blocks += blocks
        for request_id, position, token in plan.fed:
            mirror = self.known[request_id]
            assert self.config.num_stages > 1
            if not mirror.corrupt:
                assert position == len(mirror.tokens), "a token is fed twice or missed"
                mirror.tokens.append(token)

    def _save_states(self, plan: StepPlan, part: Slice, mirror: Mirror) -> None:
        """States after the first tokens of a slice, whose request may be corrupt."""
        for request_id, position, row in plan.saved_states:
            if request_id == part.request_id:
                assert row not in {start.state_row for start in plan.started}, "read and written"
                assert 0 <= row < (self.config.num_saved_states or 0)
                assert part.start < position <= part.start + part.num_tokens
                state = GARBAGE if mirror.corrupt else mirror.prefixes[position - 1]
                self.saved[row] = state

    def _slot(self, mirror: Mirror, position: int) -> tuple[int, int]:
        size = self.config.block_size
        return mirror.blocks[position // size], position % size

    def _compute(self, part: Slice, mirror: Mirror) -> int:
        assert part.num_tokens > 0
        assert part.start == mirror.computed, "a gap, or a token computed twice in one life"
        end = part.start + part.num_tokens
        assert end <= len(mirror.tokens), "a token that the stages do not know"
        prefixes = mirror.prefixes_to(end)
        slots = product(mirror.blocks, range(self.config.block_size))
        found = list(map(self.slots.get, islice(slots, part.start)))
        assert found == prefixes[: part.start], f"wrong KV below {part}"
        if self.config.num_saved_states is not None:
            before = mirror.states.get(part.start)
            assert before == [ROOT, *prefixes][part.start], f"wrong state before {part}"
            mirror.states = {part.start: before, end: prefixes[-1]}
        own = islice(slots, part.num_tokens)
        self.slots.update(zip(own, prefixes[part.start :], strict=True))
        mirror.computed = end
        if part.samples:
            assert end == len(mirror.tokens), "samples before the end of what is known"
        return draw(prefixes[-1], mirror.seed)
