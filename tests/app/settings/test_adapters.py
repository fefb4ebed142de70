"""Names of adapters in the settings are those that clients could ask for."""

from __future__ import annotations

import pytest

from app.settings.load import parse
from app.settings.model_folder import SettingsError

DEMO = {"path": "configs/models/demo"}


@pytest.mark.parametrize("name", ["", " pirate", "pi\nrate", "x" * 129])
def test_a_name_that_no_live_load_would_take_is_refused_by_its_key(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse({"model": DEMO, "adapters": {"max_adapters": 1, "paths": {name: "folder"}}})
    assert str(caught.value).startswith(f"adapters.paths.{name}: ")


def test_names_may_have_slashes_and_letters_of_any_script() -> None:
    paths = {"org/pirate-1.0": "a", "пират": "b"}
    settings = parse({"model": DEMO, "adapters": {"max_adapters": 2, "paths": paths}})
    assert settings.adapters is not None
    assert settings.adapters.paths == paths


def test_more_adapters_than_slots_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"^adapters: 2 paths, but max_adapters is 1"):
        parse({"model": DEMO, "adapters": {"max_adapters": 1, "paths": {"a": "a", "b": "b"}}})
