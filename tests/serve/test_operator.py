"""The Kubernetes manifest's application comes up by the request that KubeRay's operator sends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.own_process import output_of


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_manifest_is_served_as_the_operator_deploys_it(tmp_path: Path) -> None:
    assert "came up" in output_of("tests.serve.operator_deploys", folder=tmp_path)
