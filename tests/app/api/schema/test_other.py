"""The names that adapters may have."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.api.schema.other import LoadAdapterRequest, UnloadAdapterRequest


@pytest.mark.parametrize("name", ["a/b c\n", " a", "a\t", "a\x00b", "\u2028"])
def test_a_name_that_cannot_be_read_is_no_adapter_s(name: str) -> None:
    with pytest.raises(ValidationError, match="printable"):
        LoadAdapterRequest(lora_name=name, lora_path="/x")
    assert UnloadAdapterRequest(lora_name=name).lora_name == name  # so that it can be removed


def test_slashes_and_other_alphabets_are_fine() -> None:
    assert LoadAdapterRequest(lora_name="team/żółw 2", lora_path="/x").lora_name == "team/żółw 2"
