"""What a Serve config asks of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.serve_config import load_config, num_cpus_of


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("demo", 2 * 1.0),  # half a CPU for the replica, half for its stage; old beside new
        ("two_stages", 2 * 1.5),
        ("two_replicas", 2 * (0.5 + 2 * 1.0)),
        ("autoscaled", 2 * (0.5 + 3 * 1.0)),
    ],
)
def test_there_is_room_for_the_new_beside_the_old(name: str, most: float) -> None:
    assert num_cpus_of(load_config(Path(f"configs/serve/{name}.yaml"))) == most
