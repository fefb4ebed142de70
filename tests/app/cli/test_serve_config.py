"""What a Serve config asks of the cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli.serve_config import load_config, num_cpus_of, set_address
from app.settings.model_folder import SettingsError

pytestmark = pytest.mark.ray  # counting the CPUs of a deployment imports Ray


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("demo", 2 * 1.0),  # half a CPU for the replica, half for its stage; old beside new
        ("two_stages", 2 * 1.5),
        ("two_replicas", 2 * (0.5 + 2 * 1.0)),
        ("split", 2 * (0.5 + 2 * 1.0)),
        ("autoscaled", 2 * (0.5 + 3 * 1.0)),
    ],
)
def test_there_is_room_for_the_new_beside_the_old(name: str, most: float) -> None:
    assert num_cpus_of(load_config(Path(f"configs/serve/{name}.yaml"))) == most


@pytest.mark.parametrize(
    ("sleeps", "least", "said"),
    [(True, 1, "fleet.sleeps: needs"), (False, 0, "needs fleet.sleeps: true")],
)
def test_a_fleet_that_sleeps_is_one_that_wakes(sleeps: bool, least: int, said: str) -> None:
    config = load_config(Path("configs/serve/autoscaled.yaml"))
    application = config["applications"][0]
    application["args"]["fleet"]["sleeps"] = sleeps
    application["deployments"][0]["autoscaling_config"]["min_replicas"] = least
    with pytest.raises(SettingsError, match=said):
        set_address(config, None, None)
    application["args"]["fleet"]["sleeps"] = not sleeps
    set_address(config, None, None)
