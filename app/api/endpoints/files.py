"""`/v1/files`: inputs of batches, and their answers."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Final

from app.api.batches.files import UPLOADED, FileStore, NewFile, StoredFile
from app.api.endpoints.batches import BatchesOf
from app.api.endpoints.pages import page, parameters
from app.api.http.call import Call, too_slow
from app.api.http.errors import ApiError, invalid, unknown_parameter
from app.api.http.multipart import FormReader, PartBegin, boundary_of
from app.api.schema.batches import FileDeleted

_FORM_BYTES: Final = 64 << 10  # of an upload, beside its file
_FIELD_BYTES: Final = 1 << 10
_NAME_CHARS: Final = 255
_PART_BYTES: Final = 1 << 18  # of a file, written or read at a time
_MOST_LISTED: Final = 10_000
_log = logging.getLogger("legato.api")


class Files:
    """Handlers of files. A key sees its own alone."""

    def __init__(self, batches: BatchesOf) -> None:
        self._batches = batches

    async def create(self, call: Call) -> None:
        """Takes a form of `purpose` and `file`, in any order."""
        files = self._batches().files
        reader = FormReader(boundary_of(call.header(b"content-type")))
        files.check_upload(call.key_name)
        try:
            new = files.begin(call.key_name)
            upload = _Upload(new, files)
            try:
                async with asyncio.timeout(files.limits.upload_timeout_s):
                    await upload.read(call, reader)
                found = new.keep(upload.filename, UPLOADED)
            except BaseException:  # a client that leaves too: no part of an upload is kept
                new.discard()
                raise
        except TimeoutError:
            raise too_slow(files.limits.upload_timeout_s) from None
        except OSError as error:
            _log.error("an upload cannot be kept: %s", error)
            raise ApiError(500, "The server cannot keep the file.") from None
        await call.reply_json(found.shown())

    async def list(self, call: Call) -> None:
        """The newest first, if no other `order` is asked for."""
        given = parameters(call, ("after", "limit", "order", "purpose"))
        found = self._batches().files.all_of(call.key_name)
        if (purpose := given.get("purpose")) is not None:
            found = [file for file in found if file.purpose == purpose]
        await call.reply_json(page(found, given, _MOST_LISTED, _MOST_LISTED))

    async def retrieve(self, call: Call) -> None:
        await call.reply_json(self._found(call).shown())

    async def content(self, call: Call) -> None:
        """The file as it is, read as the client takes it."""
        found = self._found(call)
        with found.path.open("rb") as file:  # which may be deleted meanwhile
            head = {
                "content-type": "application/octet-stream",
                "content-length": str(found.num_bytes),
                "content-disposition": "attachment",
                "x-content-type-options": "nosniff",
            }
            await call.start(200, head)
            while part := await asyncio.to_thread(file.read, _PART_BYTES):
                await call.send(part)
            await call.send(b"", more=False)

    async def delete(self, call: Call) -> None:
        """Removes it, unless a batch that is not finished reads it."""
        found = self._found(call)
        self._batches().files.delete(call.key_name, found.id)
        answer = FileDeleted(id=found.id, object="file", deleted=True)
        await call.reply_json(answer.model_dump())

    def _found(self, call: Call) -> StoredFile:
        return self._batches().files.get(call.key_name, call.scope["path_params"]["file_id"])


class _Upload:
    """One form: its file goes to the disk as it comes."""

    def __init__(self, new: NewFile, files: FileStore) -> None:
        self._new = new
        self._files = files
        self._fields: dict[str, bytes] = {}
        self._held = b""  # of the file, to be written together
        self.filename = ""

    async def read(self, call: Call, reader: FormReader) -> None:
        """Raises ApiError if the form is not what is wanted, or too large."""
        name = ""
        limit = self._files.limits.max_file_bytes + _FORM_BYTES
        async with aclosing(call.body_parts(limit, "batches.max_file_mib")) as parts:
            async for part in parts:
                for event in reader.feed(part):
                    if isinstance(event, PartBegin):
                        name = event.name
                        self._begin(event)
                    elif name == "file":
                        await self._write(event.data)
                    else:
                        self._fields[name] += event.data
                        if len(self._fields[name]) > _FIELD_BYTES:
                            raise invalid(f"'{name}' is too long.", name)
        if not reader.is_complete:
            raise invalid("The form ends before its last boundary.", code="invalid_form")
        await self._flush()
        for field in ("purpose", "file"):
            if field not in self._fields:
                message = f"Missing required parameter: '{field}'."
                raise invalid(message, field, "missing_parameter")
        if self._fields["purpose"] != UPLOADED.encode():
            raise invalid(
                f"Invalid 'purpose': files are for batches here: '{UPLOADED}' is wanted.",
                "purpose",
                "invalid_value",
            )
        if self._new.num_bytes == 0:
            raise invalid("'file' is empty.", "file", "invalid_value")

    def _begin(self, part: PartBegin) -> None:
        name = part.name[:64]
        if name in self._fields:
            raise invalid(f"'{name}' is given twice.", name)
        if name not in ("purpose", "file"):
            raise unknown_parameter(name, ("purpose", "file"))
        if name == "file":
            if part.filename is None:
                raise invalid("'file' is not a file: it has no filename.", "file", "invalid_value")
            self.filename = part.filename[:_NAME_CHARS]
        self._fields[name] = b""

    async def _write(self, data: bytes) -> None:
        limit = self._files.limits.max_file_bytes
        self._held += data
        if self._new.num_bytes + len(self._held) > limit:
            raise ApiError(
                413,
                f"The file is larger than {limit} bytes (setting batches.max_file_mib).",
                "file",
            )
        if len(self._held) >= _PART_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        if not self._new.has_room(len(self._held)):
            raise invalid(
                f"More than {self._files.limits.max_bytes} bytes would be kept: delete some files "
                "first (setting batches.max_gib_per_key).",
                "file",
                "storage_limit_exceeded",
            )
        data, self._held = self._held, b""
        await self._new.write(data)
