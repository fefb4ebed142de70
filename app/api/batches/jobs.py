"""The batches of a server: each is checked, then its requests are sent in the slack of others.

They live as long as this process. The batches of one key run one after another, those of several
beside each other; they share the requests that may be under way.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Final

from app.api.batches.batch import MAX_PROBLEMS, Batch, BatchStatus, Problem
from app.api.batches.files import UPLOADED, WRITTEN, FileStore, NewFile, StoredFile
from app.api.batches.lines import Line, LineError, numbered_lines, parse_line
from app.api.batches.runner import EXPIRED, Answer, BatchRunner, Server
from app.api.http.errors import ApiError, invalid
from app.api.http.validation import check_size

WINDOWS_S: Final[Mapping[str, float]] = {"24h": 86_400.0}
# Checking an input is work of the event loop, which live streams need: a slice, then a pause.
_SLICE_S: Final = 0.001
_PAUSE_S: Final = 0.004
_RESERVED: Final = ("priority", "slo")
_log = logging.getLogger("legato.batches")


class Batches:
    """Everything runs on one event loop. clock: seconds since the epoch."""

    def __init__(self, files: FileStore, clock: Callable[[], float] = time.time) -> None:
        self.files = files
        self._limits = files.limits
        self._clock = clock
        self._batches: defaultdict[str, dict[str, Batch]] = defaultdict(dict)  # by key and id
        self._tasks: dict[str, asyncio.Task[None]] = {}  # of unfinished batches
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key
        self._checking = asyncio.Lock()
        self._gate = asyncio.Lock()
        self._places = asyncio.Semaphore(self._limits.max_requests)

    def create(
        self,
        owner: str,
        file_id: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        server: Server,
    ) -> Batch:
        """Begin a batch. server: answers its requests, in the name of `owner`."""
        source = self.files.get(owner, file_id, "input_file_id")
        if source.purpose != UPLOADED:
            raise invalid(f"The purpose of this file is not '{UPLOADED}'.", "input_file_id")
        self._make_room(owner)
        now_s = self._clock()
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            owner=owner,
            endpoint=endpoint,
            completion_window=window,
            source=source,
            metadata=metadata,
            created_s=int(now_s),
            expires_s=int(now_s + WINDOWS_S[window]),
        )
        source.num_readers += 1
        self._batches[owner][batch.id] = batch
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch, server))
        task.add_done_callback(lambda _: self._ended(batch))
        return batch

    def _make_room(self, owner: str) -> None:
        """Forget the oldest finished batch at the limit; raises 400 if there is none, or no room
        for the files of one more."""
        own = self._batches[owner]
        unfinished = [batch for batch in own.values() if not batch.is_finished]
        if len(unfinished) >= self._limits.max_batches:
            raise invalid(
                f"{len(unfinished)} batches are not finished (setting "
                "batches.max_batches_per_key).",
                code="too_many_batches",
            )
        if self.files.num_files(owner) + 2 * len(unfinished) + 2 > self._limits.max_files:
            raise invalid(
                "There is no room for the two files of a batch's answers: delete some files first "
                "(setting batches.max_files_per_key).",
                code="too_many_files",
            )
        if len(own) >= self._limits.max_batches:
            del own[next(batch.id for batch in own.values() if batch.is_finished)]

    def get(self, owner: str, batch_id: str) -> Batch:
        """Raises 404."""
        found = self._batches[owner].get(batch_id)
        if found is None:
            raise ApiError(404, f"No such batch: {batch_id[:100]}.", "batch_id")
        return found

    def all_of(self, owner: str) -> list[Batch]:
        """In the order in which they were made."""
        return list(self._batches[owner].values())

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """End its requests under way and send no more; raises 400 if it has ended."""
        batch = self.get(owner, batch_id)
        if batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
            batch.enter(BatchStatus.CANCELLING, self._clock())
            self._tasks[batch.id].cancel()
        elif batch.status is not BatchStatus.CANCELLING:
            raise invalid(f"A batch with status '{batch.status}' cannot be cancelled.", "batch_id")
        return batch

    async def close(self) -> None:
        """End all requests and remove all files."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.files.close)

    # ---- one batch -------------------------------------------------------------------------------

    async def _run(self, batch: Batch, server: Server) -> None:
        try:
            async with self._checking:
                await self._check(batch)
            if batch.problems:
                batch.enter(BatchStatus.FAILED, self._clock())
                return
            batch.enter(BatchStatus.IN_PROGRESS, self._clock())
            async with self._turns[batch.owner]:
                await self._answer(batch, server)
        except Exception as error:  # the disk is full, say: other batches go on
            _log.exception("batch %s", batch.id)
            problem = Problem("server_error", f"The server could not go on: {error}"[:500])
            batch.problems.append(problem)
            batch.enter(BatchStatus.FAILED, self._clock())

    def _ended(self, batch: Batch) -> None:
        """Called once its task is done, which may have been cancelled before it began."""
        if not batch.is_finished:
            batch.enter(BatchStatus.CANCELLED, self._clock())
        batch.source.num_readers -= 1
        del self._tasks[batch.id]

    async def _check(self, batch: Batch) -> None:
        """Count the requests, and note what is wrong with the input."""
        ids: set[str] = set()
        limits = self._limits
        began_s = time.perf_counter()
        async with aclosing(numbered_lines(batch.source.path, limits.max_line_bytes)) as lines:
            async for number, text in lines:
                if len(batch.problems) == MAX_PROBLEMS:
                    break
                batch.num_requests += 1
                if batch.num_requests > limits.max_lines:
                    message = f"More than {limits.max_lines} requests (setting batches.max_lines)."
                    batch.problems.append(Problem("too_many_requests", message, None, number))
                    break
                try:
                    line = self._line(batch, text)
                    if line.custom_id in ids:
                        raise LineError("appears twice", "custom_id", "duplicate_custom_id")
                    ids.add(line.custom_id)
                except LineError as error:
                    problem = Problem(error.code, str(error), error.param, number)
                    batch.problems.append(problem)
                if time.perf_counter() - began_s > _SLICE_S:
                    await asyncio.sleep(_PAUSE_S)
                    began_s = time.perf_counter()
        if not batch.num_requests:
            batch.problems.append(Problem("empty_file", "The file holds no request."))

    def _line(self, batch: Batch, text: bytes) -> Line:
        """Raises LineError."""
        limits = self._limits
        if len(text) > limits.max_line_bytes:
            raise LineError(
                f"longer than {limits.max_line_bytes} bytes (setting api.max_body_bytes)",
                None,
                "line_too_long",
            )
        if text.count(b"{") + text.count(b"[") + text.count(b":") > limits.max_json_nodes:
            try:
                check_size(text, limits.max_json_nodes)
            except ApiError as error:
                raise LineError(error.message, error.param) from None
        line = parse_line(text, (batch.endpoint,))
        for key in _RESERVED:
            if line.body.get(key) is not None:
                raise LineError(
                    "requests of a batch have the lowest priority and no objective: leave it out",
                    f"body.{key}",
                )
        return line

    async def _answer(self, batch: Batch, server: Server) -> None:
        writer = _Writer(batch, self.files)
        runner = BatchRunner(
            server,
            writer.write,
            concurrency=min(self._limits.max_requests, batch.num_requests),
            give_up_s=batch.expires_s - self._clock(),
            has_quotes=True,
            gate=self._gate,
            places=self._places,
        )
        try:
            async with aclosing(self._lines(batch)) as lines:
                await runner.run(lines)
            batch.enter(BatchStatus.FINALIZING, self._clock())
        finally:
            writer.close()
        ended = BatchStatus.EXPIRED if writer.has_expired else BatchStatus.COMPLETED
        batch.enter(ended, self._clock())

    async def _lines(self, batch: Batch) -> AsyncGenerator[Line, None]:
        path, limit = batch.source.path, self._limits.max_line_bytes
        async with aclosing(numbered_lines(path, limit)) as lines:
            async for _, text in lines:
                yield self._line(batch, text)


class _Writer:
    """Writes the answers of a batch, those with status 200 apart from the others, and counts."""

    def __init__(self, batch: Batch, files: FileStore) -> None:
        self._batch = batch
        self._output = files.begin(batch.owner)
        self._errors = files.begin(batch.owner)
        self.has_expired = False

    async def write(self, answer: Answer) -> None:
        """Raises OSError. An answer for which its key has no room left becomes an error; those are
        short, and written in any case."""
        line = answer.line()
        file = self._output if answer.is_done else self._errors
        if not file.has_room(len(line)):
            message = "The key's files leave no room for this answer: delete some files."
            answer = Answer(answer.custom_id, None, "storage_limit_exceeded", message)
            line, file = answer.line(), self._errors
        await file.write(line)
        self.has_expired = self.has_expired or answer.code == EXPIRED
        if answer.reply is not None and answer.is_done:
            self._batch.num_completed += 1
            self._batch.usage.add(answer.reply.content)
        else:
            self._batch.num_failed += 1

    def close(self) -> None:
        """Put what there is where clients find it."""
        name = self._batch.id
        try:
            self._batch.output = _kept(self._output, f"{name}_output.jsonl")
        finally:
            self._batch.errors = _kept(self._errors, f"{name}_error.jsonl")


def _kept(file: NewFile, name: str) -> StoredFile | None:
    if not file.num_bytes:
        file.discard()
        return None
    try:
        return file.keep(name, WRITTEN)
    except OSError:
        file.discard()
        raise
