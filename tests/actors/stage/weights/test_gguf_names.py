"""Names of parts, beside the examples in their docstrings."""

from __future__ import annotations

from actors.stage.weights.gguf_names import first_part, model_stem, part_name, part_names


def test_a_name_that_only_resembles_a_part_s_is_that_of_a_whole_file() -> None:
    for name in ("a-1-of-2.gguf", "a-00001-of-00002.gguf.part", "-00001-of-00002.gguf"):
        assert part_names(name) == [name] == [first_part(name)]
    assert model_stem("a-1-of-2.gguf") == "a-1-of-2"


def test_parts_are_named_by_any_of_them() -> None:
    last = "sub/a-00002-of-00002.gguf"
    assert part_names(last) == ["sub/a-00001-of-00002.gguf", last]
    assert part_name("model.gguf", 1, 2) == "model.gguf"
