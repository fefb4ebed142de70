"""Gives Serve the config of `legato serve`: at its start, and whenever the file has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.cli.serve_config import num_cpus_of
from app.cli.serve_keys import check_serve_keys
from app.settings.model_folder import SettingsError
from app.terminal import console, print_error


def deploy(config: dict[str, Any]) -> Any:
    """Start Serve with this config; returns its client. Raises SettingsError naming the key."""
    # Imported here, because it takes a second, while Ray's workers start.
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    check_serve_keys(config)
    schema = ServeDeploySchema.model_validate(config)
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema, _blocking=False)
    return client


def deploy_again(
    client: Any, config: dict[str, Any], read: Callable[[], dict[str, Any]], num_cpus: int
) -> dict[str, Any]:
    """Deploy the current content of the config's file; returns the config then deployed.

    Raises nothing: whatever is wrong with the file, streams of the running server go on."""
    try:
        changed = read()
        _replace(client, config, changed, num_cpus)
    except ValueError as error:  # SettingsError is one
        print_error(f"the changed config is not deployed: {error}")
        return config
    except Exception as error:  # of Serve, or of a file that no check foresaw
        print_error(f"the changed config is not deployed: {type(error).__name__}: {error}")
        return config
    console.print("deploying the changed config", highlight=False)
    return changed


def _replace(client: Any, config: dict[str, Any], changed: dict[str, Any], num_cpus: int) -> None:
    from ray.serve.schema import ServeDeploySchema

    if changed["http_options"] != config["http_options"]:
        raise SettingsError("the address of a running server cannot be changed")
    check_serve_keys(changed)
    if (wanted := num_cpus_of(changed)) > num_cpus:
        raise SettingsError(
            f"its replicas, old beside new, reserve {wanted} CPUs, and this server began with "
            f"{num_cpus}: restart it"
        )
    client.deploy_apps(ServeDeploySchema.model_validate(changed), _blocking=False)
