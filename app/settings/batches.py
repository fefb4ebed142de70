"""The section `batches` of a deployment's `args`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class BatchSettings(BaseModel):
    """Files and batches over HTTP: app/api/README.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    directory: str | None = Field(
        None,
        description="Where files lie while the server runs, a folder of its machine; in the user's "
        "cache folder if absent.",
    )
    max_file_mib: int = Field(100, ge=1, description="A file that is uploaded.")
    max_files_per_key: int = Field(
        200, ge=3, description="Files of one API key, answers included: two a batch."
    )
    max_gib_per_key: float = Field(1.0, gt=0, description="All of them together.")
    max_lines: int = Field(50_000, ge=1, description="Requests of a batch.")
    max_batches_per_key: int = Field(
        100, ge=1, description="Batches of one API key; the oldest that has ended is forgotten."
    )
    max_requests: int = Field(
        32, ge=1, description="Requests of all batches that are sent at a time."
    )
    upload_timeout_s: float = Field(300.0, gt=0, description="For an upload to arrive.")

    @model_validator(mode="after")
    def _a_file_fits(self) -> BatchSettings:
        if self.max_file_mib > 1024 * self.max_gib_per_key:
            raise ValueError(
                f"max_file_mib: {self.max_file_mib} MiB exceed what a key may keep, "
                f"max_gib_per_key: {self.max_gib_per_key:g}"
            )
        return self
