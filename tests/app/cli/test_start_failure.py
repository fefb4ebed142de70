"""What is said of an application that did not start, and whether a setting is at fault."""

from __future__ import annotations

import pytest

from app.cli.start_failure import cause_of
from app.settings.model_folder import SettingsError


@pytest.mark.parametrize(
    ("trouble", "said", "is_set"),
    [
        ("app.engine_client.link.EngineFailed: no memory", "no memory", False),
        (
            "x\nactors.scheduling.config.ConfigError: budget: unknown 'y'\n",
            "scheduling.budget: unknown 'y'",
            True,
        ),
        ("a.EngineFailed: b.ConfigError: slo.tbt_ms: no", "slo.tbt_ms: no", True),
        ("actors.stage.spec.ModelError: model.path: no", "model.path: no", True),
        ("app.text.processor.TokenizerError: model.path: no", "model.path: no", True),
        ("a.EngineFailed: model.quantization: no", "model.quantization: no", True),
        ("a.EngineFailed: adapters.paths.a/b: no", "adapters.paths.a/b: no", True),
        ("a.EngineFailed: models.1: kv.dtype: no", "models.1: kv.dtype: no", True),
        ("a.EngineFailed: listen: x:1: taken", "listen: x:1: taken", True),
        ("a.EngineFailed: model x: no", "model x: no", False),
        (
            "ray.exceptions.RayTaskError(EngineFailed): app.engine_client.EngineFailed: broken",
            "broken",
            False,
        ),
        ("RuntimeError: out of luck", "RuntimeError: out of luck", False),
    ],
)
def test_why_a_server_did_not_start_is_said_without_names_of_code(
    trouble: str, said: str, is_set: bool
) -> None:
    if is_set:  # status 2, as where it is found before anything starts
        with pytest.raises(SettingsError, match=f"^{said}$"):
            cause_of(trouble)
    else:
        assert cause_of(trouble) == said
