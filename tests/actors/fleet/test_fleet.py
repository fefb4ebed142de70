"""What a front knows of its engines, against a plain model of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from actors.fleet.fleet import Fleet
from actors.fleet.snapshot import Arrival, PrefixUpdate
from tests.actors.fleet.pictures import DIGESTS, snapshot

NAMES = ("a", "b", "c")
ACTIONS = ("publish", "overtaken", "send", "send", "take back", "leave", "lose", "cache", "restart")


@dataclass
class Engine:
    sequence: int = 0
    num_received: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)  # tokens to compute, all tokens
    confirmed: set[bytes] = field(default_factory=set)
    expected: Counter[bytes] = field(default_factory=Counter)

    def num_cached(self, digests: tuple[bytes, ...]) -> int:
        return len(list(takewhile(lambda d: d in self.confirmed or self.expected[d], digests)))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES), st.sampled_from(ACTIONS), st.integers(0, 6), st.integers(0, 6)
        ),
        max_size=60,
    )
)
def test_what_was_sent_counts_once_and_prefixes_are_where_they_were_told_to_be(
    script: list[tuple[str, str, int, int]],
) -> None:
    fleet, engines = Fleet(), dict[str, Engine]()
    for name, action, low, high in script:
        engine, digests = engines.get(name), tuple(DIGESTS[min(low, high) : max(low, high)])
        prefix = tuple(DIGESTS[:high])
        arrival = Arrival(16 * high + low + 1, 10, prefix=prefix)
        if engine is None:
            fleet.update_prefixes(PrefixUpdate(name, digests))  # of none that is known
            if action == "publish":
                engines[name] = Engine(sequence=1)
                fleet.published(snapshot(name, num_running=low, num_waiting=high))
        elif action == "publish":
            engine.sequence += 1
            engine.num_received = min(engine.num_received + low, len(engine.sent))
            changes = {"sequence": engine.sequence, "num_received": engine.num_received}
            fleet.published(snapshot(name, num_running=low, num_waiting=high, **changes))
            assert fleet.engines[name].snapshot.num_waiting == high
        elif action == "overtaken":
            fleet.published(snapshot(name, sequence=engine.sequence, num_received=99))
        elif action == "send":
            cached = min(16 * engine.num_cached(prefix), arrival.num_tokens - 1)
            assert fleet.sent(name, arrival) == cached
            engine.sent.append((arrival.num_tokens - cached, arrival.num_tokens))
            engine.expected.update(set(prefix) - engine.confirmed)
        elif action == "take back" and len(engine.sent) > engine.num_received:
            fleet.not_sent(name, 1)
            engine.sent.pop()
        elif action == "leave":
            fleet.unsent(name, prefix)
            engine.expected = +(engine.expected - Counter(prefix))
        elif action == "cache":
            fleet.update_prefixes(PrefixUpdate(name, added=digests, removed=prefix[:low]))
            for digest in prefix[:low]:
                engine.confirmed.discard(digest)
                del engine.expected[digest]
            engine.confirmed |= set(digests)
            for digest in digests:
                del engine.expected[digest]
        elif action == "restart":
            fleet.update_prefixes(PrefixUpdate(name, added=digests, whole=True))
            engine.confirmed, engine.expected = set(digests), Counter()
        elif action == "lose":
            fleet.lost(name)
            del engines[name]
        _check(fleet, engines)


def _check(fleet: Fleet, engines: dict[str, Engine]) -> None:
    assert set(fleet.engines) == set(engines)
    for name, engine in engines.items():
        known, under_way = fleet.engines[name], engine.sent[engine.num_received :]
        assert known.num_live - known.snapshot.num_running - known.snapshot.num_waiting == len(
            under_way
        )
        assert known.num_sent == len(engine.sent)
        assert known.sent_prefill_tokens == sum(num_new for num_new, _ in under_way)
        assert known.sent_tokens == sum(num_tokens for _, num_tokens in under_way)
    for start in range(4):
        digests = tuple(DIGESTS[start:8])
        hits = {name: engine.num_cached(digests) for name, engine in engines.items()}
        assert fleet.prefixes.hits(digests) == {name: n for name, n in hits.items() if n}
    held = [set(engine.confirmed) | set(engine.expected) for engine in engines.values()]
    assert len(fleet.prefixes) == len(set().union(*held))
