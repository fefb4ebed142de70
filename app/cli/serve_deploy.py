"""Gives Serve the config of `legato serve`: at its start, and whenever the file has changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from app.api.http.keys import by_digest
from app.cli.serve_config import num_cpus_of
from app.cli.serve_keys import check_serve_keys
from app.cli.start_failure import cause_of
from app.settings.model_folder import SettingsError
from app.terminal import console, print_error

_LOOK_S = 2.0  # Serve's status takes 40 ms of a core
_ENDS = ("RUNNING", "DEPLOY_FAILED", "UNHEALTHY")


def deploy(config: dict[str, Any]) -> Any:
    """Start Serve with this config; returns its client. Raises SettingsError naming the key."""
    # Imported here, because it takes a second, while Ray's workers start.
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    check_serve_keys(config)
    schema = ServeDeploySchema.model_validate(_with_digests(config))
    client = serve_start(
        http_options=schema.http_options.model_dump(), proxy_location=schema.proxy_location
    )
    client.deploy_apps(schema, _blocking=False)
    return client


def deploy_again(
    client: Any, config: dict[str, Any], read: Callable[[], dict[str, Any]], num_cpus: int
) -> dict[str, Any]:
    """Deploy the current content of the config's file; returns the config then deployed.

    Raises nothing: whatever is wrong with the file, streams of the running server go on. How it
    ends is told later."""
    try:
        changed = read()
        before = _times_s(client.get_serve_details()["applications"])
        _replace(client, config, changed, num_cpus)
    except ValueError as error:  # SettingsError is one
        print_error(f"the changed config is not deployed: {error}")
        return config
    except Exception as error:  # of Serve, or of a file that no check foresaw
        print_error(f"the changed config is not deployed: {type(error).__name__}: {error}")
        return config
    console.print("deploying the changed config", highlight=False)
    threading.Thread(target=_tell_the_end, args=(client, before), daemon=True).start()
    return changed


def _tell_the_end(client: Any, before: Mapping[str, float]) -> None:
    """Say how the deployment ends that follows this one, unless another follows it."""
    mine: Mapping[str, float] = before
    while True:
        time.sleep(_LOOK_S)
        try:
            found = client.get_serve_details()["applications"]
        except Exception:  # the server is ending
            return
        times = _times_s(found)
        if mine not in (before, times):
            return
        mine = times
        if mine != before and all(one["status"] in _ENDS for one in found.values()):
            break
    failed = [one for one in found.values() if one["status"] != "RUNNING"]
    for one in failed:
        print_error(f"the changed config does not run: {_cause(one)}")
    if not failed:
        console.print("the changed config is deployed", highlight=False)


def _times_s(applications: Mapping[str, Any]) -> dict[str, float]:
    """When each was deployed last."""
    return {name: one["last_deployed_time_s"] for name, one in applications.items()}


def _cause(application: Mapping[str, Any]) -> str:
    messages = [one["message"] for one in application["deployments"].values() if one["message"]]
    try:
        return cause_of((messages or [application["message"]])[-1])
    except SettingsError as error:
        return str(error)


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
    client.deploy_apps(ServeDeploySchema.model_validate(_with_digests(changed)), _blocking=False)


def _with_digests(config: dict[str, Any]) -> dict[str, Any]:
    """This config with digests for the API keys that are written in it: Serve's controller logs the
    arguments of applications, in files that every user of the machine may read."""
    given = deepcopy(config)
    for application in given["applications"]:
        api = (application.get("args") or {}).get("api") or {}
        if keys := api.get("api_keys"):
            api["api_keys"] = {by_digest(key): limits for key, limits in keys.items()}
    return given
