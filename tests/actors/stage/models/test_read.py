"""What a config.json says: every family has a tiny model, and layers go to stages evenly."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.stage.models.config import ModelError
from actors.stage.models.read import FAMILIES, load_config
from actors.stage.models.split import split_layers
from tests.tiny_models import BY_OTHER_NAMES, VARIANTS, architecture


@pytest.mark.parametrize("num_layers", [1, 5, 30, 32, 61])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 7])
def test_layers_are_split_evenly(num_layers: int, num_stages: int) -> None:
    if num_stages > num_layers:
        with pytest.raises(ModelError, match="cannot fill"):
            split_layers(num_layers, num_stages)
        return
    ranges = split_layers(num_layers, num_stages)
    assert [layer for start, end in ranges for layer in range(start, end)] == list(
        range(num_layers)
    )
    counts = [end - start for start, end in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts[-1] == min(counts)


def test_every_family_has_a_tiny_model() -> None:
    """So every one is held against transformers."""
    assert set(FAMILIES) == {architecture(variant) for variant in VARIANTS} | set(BY_OTHER_NAMES)


def test_published_configs() -> None:
    """The shapes that ship with the repository are readable."""
    root = Path(__file__).resolve().parents[4] / "configs" / "models"
    folders = [path.parent for path in root.rglob("config.json")]
    assert folders
    for folder in folders:
        config = load_config(folder)
        assert config.num_heads % config.num_kv_heads == 0
