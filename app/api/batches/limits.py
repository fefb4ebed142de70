"""Bounds on batches and their files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What may be kept and run. Where there are no API keys, all clients together have one's share.

    max_files, max_bytes, max_batches: of one API key. A finished batch makes room for a new one.
    max_requests: sent at a time, over all batches. upload_timeout_s: for a file to arrive.
    max_line_bytes, max_json_nodes: of one request, as for a body of the API.
    """

    max_file_bytes: int = 100 << 20
    max_files: int = 200
    max_bytes: int = 1 << 30
    max_lines: int = 50_000
    max_batches: int = 100
    max_requests: int = 32
    upload_timeout_s: float = 300.0
    max_line_bytes: int = (2 << 20) + (1 << 13)
    max_json_nodes: int = 20_000
