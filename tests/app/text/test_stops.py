from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from app.text.stops import StopStrings

letters = st.text(alphabet="ab ", max_size=40)
stops_strategy = st.lists(st.text(alphabet="ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first string to be complete wins; of two ending together the longer."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(letters, stops_strategy, st.data())
def test_any_split_finds_the_same_stop(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    watch = StopStrings(stops)
    shown = "".join(
        watch.push(text[start:end])
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)
    )
    assert (shown + watch.finish(), watch.found) == expected(text, stops)


@given(letters, stops_strategy)
def test_only_what_may_become_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    shown = "".join(watch.push(char) for char in text)
    if watch.found is None:
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_what_follows_a_stop_is_kept_apart() -> None:
    watch = StopStrings(["END"])
    assert watch.push("aENDb") == "a"
    assert (watch.rest, watch.push("c"), watch.finish()) == ("b", "", "")
