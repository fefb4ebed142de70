"""Ways through a fleet: the deployments that each has, and what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from actors.fleet.snapshot import Role
from app.settings.load import parse, resolve
from app.settings.model_folder import SettingsError

MODEL = {"model": {"path": "configs/models/demo"}}


def split(**fleet: Any) -> dict[str, Any]:
    return {**MODEL, "kv": {"shared_cache_gib": 1}, "fleet": {"way": "split", **fleet}}


def test_ways_have_deployments_of_their_roles() -> None:
    fleet = parse(split()).fleet
    assert fleet is not None
    assert fleet.roles == (Role.PREFILL, Role.DECODE)
    flexible = parse(split(way="flexible", way_options={"least_gain": 0.2})).fleet
    assert flexible is not None
    assert flexible.roles == (Role.PREFILL, Role.BOTH)
    assert resolve(parse(split())).kv.shared_cache_gib == 1
    assert resolve(parse(split(way="colocated"))).kv.has_tier  # streams that leave are fetched


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (split() | {"kv": {}}, "fleet.way: split needs `kv.shared_cache_gib`"),
        (split(sleeps=True), "fleet.sleeps: not with `fleet.way: split`"),
        (split(way_options={"least_gain": 0.2}), "way_options"),
        (split(way="flexible", way_options={"least_gain": 2}), "least_gain"),
        (
            split() | {"kv": {"shared_cache_gib": 1, "prefix_cache": False}},
            "kv.shared_cache_gib: has no effect with",
        ),
        (
            {**MODEL, "fleet": {}, "kv": {"direct_gib": 0.1}},
            "kv.direct_gib: has no effect without `kv.shared_cache_gib`",
        ),
    ],
)
def test_a_way_that_cannot_be_is_refused(args: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        resolve(parse(args))
