"""A batch: its state, and how OpenAI's API shows it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from app.api.batches.files import StoredFile
from app.api.batches.usage import BatchUsage

MAX_PROBLEMS: Final = 20  # told of one input


class BatchStatus(StrEnum):
    """OpenAI's names.

    VALIDATING ──> IN_PROGRESS ──> FINALIZING ──> COMPLETED, EXPIRED
        └───────────────┴──> CANCELLING ──> CANCELLED

    Errors of the input or of the server lead from the first three to FAILED.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


_FINAL: Final = frozenset(
    {BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a batch failed. line: of the input, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def shown(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "code": self.code,
            "message": self.message,
            "param": self.param,
            "line": self.line,
        }


@dataclass(slots=True, eq=False)
class Batch:
    """owner: the key that made it. output, errors: answers with status 200, and all others; None
    until it has ended, and where there are none. entered_s: when each status began."""

    id: str
    owner: str
    endpoint: str
    completion_window: str
    source: StoredFile
    metadata: dict[str, str] | None
    created_s: int
    expires_s: int
    status: BatchStatus = BatchStatus.VALIDATING
    entered_s: dict[BatchStatus, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: BatchUsage = field(default_factory=BatchUsage)
    output: StoredFile | None = None
    errors: StoredFile | None = None

    @property
    def is_finished(self) -> bool:
        return self.status in _FINAL

    def enter(self, status: BatchStatus, now_s: float) -> None:
        """Begin a status."""
        self.status = status
        self.entered_s[status] = int(now_s)

    def shown(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        errors = None
        if self.problems:
            errors = {"object": "list", "data": [problem.shown() for problem in self.problems]}
        stamps = {
            f"{status}_at": self.entered_s.get(status)
            for status in BatchStatus
            if status is not BatchStatus.VALIDATING
        }
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.source.id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": None if self.output is None else self.output.id,
            "error_file_id": None if self.errors is None else self.errors.id,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **stamps,
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "usage": self.usage.shown(),
            "metadata": self.metadata,
        }
