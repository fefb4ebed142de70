"""The reference of settings tells what flags of vLLM are called here."""

from __future__ import annotations

import re
from pathlib import Path

from app.cli.config import FROM_VLLM

REFERENCE = Path(__file__).resolve().parents[3] / "configs/README.md"


def test_every_setting_beside_a_flag_of_vllm_exists() -> None:
    settings = set(re.findall(r"^\| `([\w.]+)` \|", REFERENCE.read_text(), re.MULTILINE))
    named = re.findall(r"`(\w+\.\w+)", " ".join(FROM_VLLM.values()))
    assert len(named) > 20
    assert not set(named) - settings
