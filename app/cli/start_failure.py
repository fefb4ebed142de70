"""Why an application did not start, from what Ray Serve reports."""

from __future__ import annotations

import re

from app.settings.messages import in_section
from app.settings.model_folder import SettingsError
from app.settings.schema import Settings

# Ours whose messages are written for users: "module.Error: ". All but EngineFailed say that the
# settings, or what they name, will not do.
_OWN_ERROR = re.compile(
    r"([a-z_]+\.)*(RayTaskError\()?"
    r"(?P<name>ApiKeyError|ConfigError|EngineFailed|HubError|ModelError|SettingsError|"
    r"TokenizerError)\)?: "
)
# What such a message begins with where a process that knows no such error has passed it on.
_KEY = re.compile(rf"(models\.\d+: )?({'|'.join(Settings.model_fields)})(\.[^\s:]+)*: ")


def cause_of(trouble: str) -> str:
    """The last line of a remote traceback that names the cause, as a user would say it. Raises
    SettingsError with it where a setting is the cause."""
    lines = [line.strip() for line in trouble.splitlines() if line.strip()]
    telling = [line for line in lines if "Error:" in line or "Failed:" in line]
    said = (telling or lines or ["the application failed to start"])[-1]
    is_set = False
    while own := _OWN_ERROR.match(said):  # one may wrap another
        said = said[own.end() :]
        said = in_section(said) if own["name"] == "ConfigError" else said
        is_set = is_set or own["name"] != "EngineFailed"
    if is_set or _KEY.match(said):
        raise SettingsError(said)
    return said
