from __future__ import annotations

import pytest

from actors.stage.grammars.patterns import as_rust, looks_around


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"[^<>()[\]\.,;:\s@\"]+", r"[^<>()\[\]\.,;:\s@\"]+"),
        (r"[^]*x", r"[\s\S]*x"),
        (r"[^]abc]", r"[^]abc]"),
        (r"[]a]", r"[]a]"),
        (r"[a&&b~~c]", r"[a\&\&b\~\~c]"),
        (r"[\b\0\<]", r"[\x08\x00<]"),
        (r"\<\>\0\/\-\d", r"<>\x00\/\-\d"),
        (r"[[:alpha:]_]", r"[[:alpha:]_]"),
        (r"\[a[b]", r"\[a[b]"),
        (r"(?<name>a)|[", r"(?<name>a)|["),
    ],
)
def test_patterns_of_other_languages_are_rewritten(pattern: str, expected: str) -> None:
    assert as_rust(pattern) == expected
    assert as_rust(expected) == expected


@pytest.mark.parametrize("pattern", ["^(?!a)b", "(?<=a)b", "(?=b)", r"\\(?!a", "a(?<!b)"])
def test_looking_around_is_seen(pattern: str) -> None:
    assert looks_around(pattern)


@pytest.mark.parametrize("pattern", [r"\(?!a", "[(?=]", "(?:a)", "(?<n>a)", r"[\](?=]", "[^](?!]"])
def test_what_only_seems_to_look_around(pattern: str) -> None:
    assert not looks_around(pattern)
