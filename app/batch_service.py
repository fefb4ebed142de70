"""The batches of a replica that answers HTTP, or why it keeps none."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from actors.calibration.cache import cache_folder
from app.api.batches.files import FileStore
from app.api.batches.jobs import Batches
from app.api.batches.limits import BatchLimits
from app.api.endpoints.batches import no_batches
from app.api.http.errors import ApiError
from app.engine_client.link import EngineFailed
from app.settings.schema import Settings

_LINE_BYTES = 8 << 10  # of a request's line, beside its body
_log = logging.getLogger("legato.batches")


class BatchService:
    """Called for the batches, it raises ApiError where there are none."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._batches: Batches | None = None
        self._problem = ""
        self._is_closed = False

    async def open(self) -> None:
        """Open the folder of files. Raises EngineFailed if the settings name one that cannot be;
        where they name none, a server without a folder to write to serves everything else."""
        settings = self._settings.batches
        if settings is None:
            return
        own = settings.directory
        folder = _folder(own)
        try:
            files = await asyncio.to_thread(FileStore, folder, limits_of(self._settings))
        except OSError as error:
            self._problem = f"No folder for files: {error.strerror or error}"
            _log.warning("%s (%s)", self._problem, folder)
            if own is not None:
                raise EngineFailed(f"batches.directory: {folder}: {error.strerror}") from error
            return
        self._batches = Batches(files)

    def __call__(self) -> Batches:
        """Raises 400, naming the setting, or 503 once it is closed."""
        if self._settings.batches is None:
            return no_batches()
        if self._is_closed:
            raise ApiError(503, "The server is shutting down.", retry_after_s=1.0)
        if (problem := several_replicas()) is not None:
            raise _unavailable(problem)
        if self._batches is None:
            raise _unavailable(f"{self._problem} (setting batches.directory).")
        return self._batches

    async def close(self) -> None:
        """End all batches, and remove their files."""
        self._is_closed = True
        if self._batches is not None:
            await self._batches.close()


def _folder(own: str | None) -> Path:
    return cache_folder() / "batches" if own is None else Path(own).expanduser().absolute()


def limits_of(settings: Settings) -> BatchLimits:
    """The bounds that these settings mean."""
    found = settings.batches
    assert found is not None
    return BatchLimits(
        max_file_bytes=found.max_file_mib << 20,
        max_files=found.max_files_per_key,
        max_bytes=int(found.max_gib_per_key * (1 << 30)),
        max_lines=found.max_lines,
        max_batches=found.max_batches_per_key,
        max_requests=found.max_requests,
        upload_timeout_s=found.upload_timeout_s,
        max_line_bytes=settings.api.max_body_bytes + _LINE_BYTES,
        max_json_nodes=settings.api.max_json_nodes,
    )


def several_replicas() -> str | None:
    """Why there can be no batches, where requests go to one of several replicas, as each knows its
    own files alone. Asked anew each time, as their number may be changed."""
    try:
        context = serve.get_replica_context()
    except RayServeException:  # no replica, as in tests
        return None
    config: Any = context._deployment_config
    scaling = config.autoscaling_config
    if scaling is not None and scaling.max_replicas > 1:
        setting = f"autoscaling_config.max_replicas: {scaling.max_replicas}"
    elif scaling is None and (config.num_replicas or 1) > 1:
        setting = f"num_replicas: {config.num_replicas}"
    else:
        return None
    return (
        f"Files and batches need one replica that answers HTTP, and deployment "
        f"{context.deployment} has {setting}: set num_replicas: 1 (of a fleet, for Front)."
    )


def _unavailable(message: str) -> ApiError:
    return ApiError(400, message, code="batches_unavailable")
