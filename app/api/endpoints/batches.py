"""`/v1/batches`: requests of a file, answered in the slack of live streams."""

from __future__ import annotations

from collections.abc import Callable

from app.api.batches.inner_calls import InnerCalls
from app.api.batches.jobs import Batches
from app.api.endpoints.pages import page, parameters
from app.api.http.call import Call
from app.api.http.errors import invalid
from app.api.schema.batches import BatchRequest

_DEFAULT_LISTED, _MOST_LISTED = 20, 100

BatchesOf = Callable[[], Batches]  # raises ApiError where this server keeps none


def no_batches() -> Batches:
    """Raises 400."""
    raise invalid(
        "This server keeps no files and batches (setting `batches`).", code="batches_unavailable"
    )


class BatchCalls:
    """Handlers of batches. A key sees its own alone."""

    def __init__(self, batches: BatchesOf) -> None:
        self._batches = batches

    async def create(self, call: Call) -> None:
        """Answers at once; the input is checked later."""
        batches = self._batches()
        body = await call.read_json(BatchRequest)
        # Its requests go to the routes behind the guard, which has let this one pass.
        server = InnerCalls(call.scope["app"].router, call.scope["state"])
        batch = batches.create(
            call.key_name,
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            body.metadata,
            server,
        )
        await call.reply_json(batch.shown())

    async def retrieve(self, call: Call) -> None:
        batch = self._batches().get(call.key_name, call.scope["path_params"]["batch_id"])
        await call.reply_json(batch.shown())

    async def list(self, call: Call) -> None:
        """The newest first."""
        given = parameters(call, ("after", "limit"))
        found = self._batches().all_of(call.key_name)
        await call.reply_json(page(found, given, _DEFAULT_LISTED, _MOST_LISTED))

    async def cancel(self, call: Call) -> None:
        """Answers at once, mostly with status cancelling."""
        batch = self._batches().cancel(call.key_name, call.scope["path_params"]["batch_id"])
        await call.reply_json(batch.shown())
